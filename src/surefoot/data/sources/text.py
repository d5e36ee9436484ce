"""Read a text file in pieces: decompress, decode, split into lines, and parse JSON.

Errors are raised at their position, after everything before it was yielded. JSON is parsed more strictly than by the
standard library, which keeps the last of two equal keys and accepts NaN and lone surrogates; these are refused with
file and line. Only the record being read is in memory.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from io import StringIO
from typing import Any, BinaryIO, NoReturn

from surefoot.system.errors import Fault, InputError

_PIECE = 1 << 18  # bytes read at once
_RATIO = 200  # maximum compression ratio; text reaches 3 to 20, gzip's maximum is 1,030
_SMALL = 64 << 20  # bytes that may be unpacked at any ratio: similar rows compress well


def decoded(name: str, pieces: Iterable[bytes]) -> Iterator[str]:
    """Decode UTF-8 and drop a byte order mark. Raises InputError with line and offset of a byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, offset, started = 1, 0, False  # position of the next piece
    for piece in itertools.chain(pieces, [None]):
        open_end = len(decoder.getstate()[0])  # bytes of a character that continues in the next piece
        try:
            text = decoder.decode(piece or b"", final=piece is None)
        except UnicodeDecodeError as error:
            raise InputError(_undecodable(name, error, line, offset - open_end)) from None
        line, offset = line + text.count("\n"), offset + len(piece or b"")
        if text:
            yield text if started else text.removeprefix("\ufeff")
            started = True


def _undecodable(name: str, error: UnicodeDecodeError, line: int, offset: int) -> Fault:
    """Describe a decoding error. line, offset: position of the first byte of the failing piece."""
    data, at = error.object, error.start
    if offset == 0 and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return Fault(f"{name}:1", "is UTF-16", "save the file as UTF-8", code="SF-DATA-FILE")
    if offset == 0 and data[:2] == b"\x1f\x8b":
        return Fault(f"{name}:1", "is gzip", "let its name end in .gz", code="SF-DATA-FILE")
    line += data.count(b"\n", 0, at)
    where = f"{name}:{line}"
    if "unexpected end" in error.reason:
        return Fault(where, "the file ends in the middle of a character", "it seems truncated", code="SF-DATA-FILE")
    return Fault(
        where,
        f"byte 0x{data[at]:02x} at offset {offset + at} is not UTF-8",
        "save the file as UTF-8",
        code="SF-DATA-FILE",
    )


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """Read the rest of the file in pieces."""
    return iter(lambda: file.read(_PIECE), b"")


def unpacked(name: str, file: BinaryIO, size: int) -> Iterator[bytes]:
    """Decompress a gzip file in pieces.

    size: bytes of the compressed file.

    Raises InputError if it unpacks to far more than text would: a small file could fill the memory.
    """
    most, count = max(_SMALL, _RATIO * size), 0
    try:
        with gzip.GzipFile(fileobj=file) as packed:
            while piece := packed.read(_PIECE):
                if (count := count + len(piece)) > most:
                    what = f"unpacks to more than {_RATIO} times its size, which text does not"
                    raise InputError(Fault(name, what, "unpack it by hand if you trust it", code="SF-DATA-FILE"))
                yield piece
    except (OSError, EOFError, zlib.error):
        raise InputError(
            Fault(name, "is not a complete gzip file", "it seems truncated or misnamed", code="SF-DATA-FILE")
        ) from None


def lines_of(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Iterate over (line without \\n, whether it is the text after the last \\n). No other character ends a line:
    strings may contain U+2028 and the like."""
    open_line: list[str] = []
    for piece in pieces:
        *whole, rest = piece.split("\n")
        if whole:
            yield "".join([*open_line, whole[0]]), False
            for line in whole[1:]:
                yield line, False
            open_line = []
        open_line.append(rest)
    yield "".join(open_line), True


def lines_with_ends(pieces: Iterable[str]) -> Iterator[str]:
    """Iterate over the lines of a table with their ends, which may be \\r\\n, \\n or \\r."""
    open_line: list[str] = []
    for piece in pieces:
        open_line.append(piece)
        if "\n" in piece or "\r" in piece:
            *whole, rest = StringIO("".join(open_line), newline="")
            yield from whole
            open_line = [rest]  # the \n of a \r\n may be in the next piece
    yield from StringIO("".join(open_line), newline="")


_BLANK = re.compile(r"[ \t\r\n]*")
_EXCERPT = 20  # characters shown on either side of a syntax error
_OPEN_END = 16  # characters at the end of a piece that may be an incomplete word, number or escape


def read_lines(name: str, pieces: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Iterate over (line, value) of each record of a JSON lines file."""
    for number, (line, last) in enumerate(lines_of(pieces), start=1):
        yield from read_line(name, line, number, last=last)


def read_line(name: str, line: str, number: int, *, last: bool) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of one line; nothing for a blank one.

    last: it is the end of the file, so it may be truncated.
    """
    start = _skip_blank(line, 0)
    if start == len(line):
        return
    place = _Place(name, line, number, last=last)
    value, end = place.decode(start)
    if (rest := _skip_blank(line, end)) != len(line):
        place.fail(rest, "text after the end of the record", "write one record per line")
    yield number, value


def read_list(name: str, pieces: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Iterate over (line, value) of each record of a JSON list."""
    text = _Window(name, pieces)
    begin = text.next()
    if not begin:
        return
    if begin != "[":
        fix = "name the file .jsonl if it holds one record per line" if begin == "{" else "write [record, …]"
        text.fail(text.at, "the file does not hold a list of records", fix)
    text.at += 1
    closed = text.next() == "]"
    while not closed:
        yield text.value()
        closed = text.next() == "]"
        if not closed:
            if text.next() != ",":
                text.fail(text.at, "a comma or ] is missing after a record")
            text.at += 1
            text.next()
    text.at += 1
    if text.next():
        text.fail(text.at, "text after the end of the list", "one file holds one list")


class _Place:
    """A stretch of text and its position in the file. last: it is the end of the file."""

    def __init__(self, name: str, text: str, first_line: int, *, last: bool):
        self._name, self._text, self._last = name, text, last
        self._line, self._counted = first_line, 0
        self._before = 0  # characters of the first line before the text

    def line(self, position: int) -> int:
        """Return the line of a position. Positions must not decrease, because lines are counted incrementally."""
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return self._line

    def decode(self, start: int) -> tuple[Any, int]:
        """Parse the value that starts here; return it and its end."""
        try:
            return _DECODER.raw_decode(self._text, start)
        except json.JSONDecodeError as error:
            self._malformed(error)
        except _Refused as refused:
            what, fix = str(refused), ""
        except RecursionError:
            what, fix = "is nested too deeply", "records must be flat"
        except ValueError:  # Python refuses to convert integers of thousands of digits
            what, fix = "holds a number with too many digits", "write it as text"
        raise InputError(
            Fault(f"{self._name}:{self.line(start)}", f"the record that starts here {what}", fix, code="SF-DATA-ROW")
        )

    def fail(self, position: int, what: str, fix: str = "") -> NoReturn:
        position = min(position, len(self._text))
        if self._last and position >= len(self._text.rstrip()):
            what, fix = "the file ends in the middle of a record", "it seems truncated"
        around = self._text[max(0, position - _EXCERPT) : position + _EXCERPT]
        where = f"{self._name}:{self.line(position)}:{self._column(position)}"
        raise InputError(Fault(where, f"{what} (near {around!r})", fix, code="SF-DATA-ROW")) from None

    def _column(self, position: int) -> int:
        begin = self._text.rfind("\n", 0, position)
        return position - begin + (self._before if begin < 0 else 0)

    def _malformed(self, error: json.JSONDecodeError) -> NoReturn:
        whole = self._text.rstrip()
        cut = error.msg.startswith("Unterminated string") or self._unfinished(whole)
        position = len(whole) if self._last and cut else error.pos
        self.fail(
            position, f"malformed JSON: {error.msg[0].lower()}{error.msg[1:]}", "check quotes, commas and brackets"
        )

    def _unfinished(self, whole: str) -> bool:
        return whole.lstrip().startswith(("{", "[")) and not whole.endswith(("}", "]"))


class _Window(_Place):
    """The part of a file that is in memory: more is read on demand, and text before the reader is dropped.

    at: position of the reader in the part.
    """

    def __init__(self, name: str, pieces: Iterable[str]):
        super().__init__(name, "", 1, last=False)
        self._pieces = iter(pieces)
        self.at = 0

    def next(self) -> str:
        """Move to the next character that is not blank, and return it; "" at the end."""
        self.at = _skip_blank(self._text, self.at)
        while self.at == len(self._text) and not self._last:
            self._more()
            self.at = _skip_blank(self._text, self.at)
        return self._text[self.at : self.at + 1]

    def value(self) -> tuple[int, Any]:
        """Parse the value at the reader and move past it; return its line and the value."""
        while (found := self.decode(self.at) if self._last else self._certain()) is None:
            self._more()
        value, end = found
        line = self.line(self.at)
        self.at = end
        return line, value

    def fail(self, position: int, what: str, fix: str = "") -> NoReturn:
        while not self._last and len(self._text.rstrip()) < position + _EXCERPT:
            position -= self._more()
        super().fail(position, what, fix)

    def _certain(self) -> tuple[Any, int] | None:
        """Return the result of `decode`; None if more text could change it."""
        open_end = len(self._text) - _OPEN_END
        try:
            value, end = _DECODER.raw_decode(self._text, self.at)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string") or error.pos >= open_end:
                return None
            return self.decode(self.at)
        except (_Refused, RecursionError, ValueError):
            return self.decode(self.at)
        return None if isinstance(value, int | float) and end >= open_end else (value, end)

    def _more(self) -> int:
        """Drop the text before the reader, except for an error's excerpt, and double the rest by reading more, so that
        parsing a long record repeatedly takes linear time overall. Returns the number of dropped characters."""
        gone = max(0, self.at - _EXCERPT)
        if gone > self._counted:
            self.line(gone)
        self._before = self._column(gone) - 1
        self._counted -= gone
        self.at -= gone
        found, wanted = [self._text[gone:]], max(1, len(self._text) - gone)
        while wanted > 0 and not self._last:
            piece = next(self._pieces, None)
            self._last = piece is None
            found.append(piece or "")
            wanted -= len(found[-1])
        self._text = "".join(found)
        return gone

    def _unfinished(self, whole: str) -> bool:
        return not whole.endswith(("}", "]"))


def read_value(where: str, text: str) -> Any:
    """Parse a single JSON value, such as a cell of a table.

    where: place for the InputError.
    """
    place = _Place(where, text, 1, last=True)
    value, end = place.decode(_skip_blank(text, 0))
    if (rest := _skip_blank(text, end)) != len(text):
        place.fail(rest, "text after the end of the value")
    return value


class _Refused(Exception):
    """JSON that the standard library accepts and surefoot refuses."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Refused(f"has the key {twice!r} twice")
    return value


def _no_constant(text: str) -> NoReturn:
    raise _Refused(f"holds {text}, which is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _Refused(f"holds {text}, which is too large for a number")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    assert match is not None  # the pattern matches nothing as well
    return match.end()
