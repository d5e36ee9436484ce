"""The text of a file a piece at a time: unpacked, decoded, cut into lines, and parsed as JSON.

What is wrong is found where it stands, and everything before it has been read by then. JSON is parsed strictly: the
standard library's parser keeps the last of two equal keys, accepts NaN and half characters, and says "row 30" of
nothing; each of these is refused with file, line and what to do. No more is held than the record that is being read
needs.
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

_PIECE = 1 << 18  # bytes that are read at once
_RATIO = 200  # unpacked to packed; text reaches 3 to 20, gzip's most is 1,030
_SMALL = 64 << 20  # bytes that may be unpacked whatever the ratio: rows alike may be packed well


def decoded(name: str, pieces: Iterable[bytes]) -> Iterator[str]:
    """The text that the bytes are in UTF-8, without a byte order mark. InputError names line and offset of others."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, offset, begun = 1, 0, False  # of what comes next
    for piece in itertools.chain(pieces, [None]):
        open_end = len(decoder.getstate()[0])  # bytes of a character whose end is in the next piece
        try:
            text = decoder.decode(piece or b"", final=piece is None)
        except UnicodeDecodeError as error:
            raise InputError(_undecodable(name, error, line, offset - open_end)) from None
        line, offset = line + text.count("\n"), offset + len(piece or b"")
        if text:
            yield text if begun else text.removeprefix("\ufeff")
            begun = True


def _undecodable(name: str, error: UnicodeDecodeError, line: int, offset: int) -> Fault:
    """line, offset: of the first byte that the error is about."""
    data, at = error.object, error.start
    if offset == 0 and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return Fault(f"{name}:1", "is UTF-16", "save the file as UTF-8", code="SF-DATA-FILE")
    line += data.count(b"\n", 0, at)
    where = f"{name}:{line}"
    if "unexpected end" in error.reason:
        return Fault(where, "the file ends in the middle of a character", "it looks cut off", code="SF-DATA-FILE")
    return Fault(
        where,
        f"byte 0x{data[at]:02x} at offset {offset + at} is not UTF-8",
        "save the file as UTF-8",
        code="SF-DATA-FILE",
    )


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """All that is left of the file."""
    return iter(lambda: file.read(_PIECE), b"")


def unpacked(name: str, file: BinaryIO, size: int) -> Iterator[bytes]:
    """What a file of gzip holds.

    size: of the file.

    InputError for what unpacks to far more than text does: a small file could fill the memory.
    """
    most, count = max(_SMALL, _RATIO * size), 0
    try:
        with gzip.GzipFile(fileobj=file) as packed:
            while piece := packed.read(_PIECE):
                if (count := count + len(piece)) > most:
                    what = f"unpacks to more than {_RATIO} times its size, which no text does"
                    raise InputError(Fault(name, what, "unpack it by hand if you trust it", code="SF-DATA-FILE"))
                yield piece
    except (OSError, EOFError, zlib.error):
        raise InputError(
            Fault(name, "is not, or not wholly, gzip", "it looks cut off or misnamed", code="SF-DATA-FILE")
        ) from None


def lines_of(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Each line without its \\n, and whether it is what stands behind the last one. Nothing else ends a line: strings
    may hold U+2028 and the like."""
    begun: list[str] = []
    for piece in pieces:
        *whole, rest = piece.split("\n")
        if whole:
            yield "".join([*begun, whole[0]]), False
            for line in whole[1:]:
                yield line, False
            begun = []
        begun.append(rest)
    yield "".join(begun), True


def lines_with_ends(pieces: Iterable[str]) -> Iterator[str]:
    """Lines of a table with what ends them, which may be \\r\\n, \\n or \\r."""
    begun: list[str] = []
    for piece in pieces:
        begun.append(piece)
        if "\n" in piece or "\r" in piece:
            *whole, rest = StringIO("".join(begun), newline="")
            yield from whole
            begun = [rest]  # a \n may come behind its \r
    yield from StringIO("".join(begun), newline="")


_BLANK = re.compile(r"[ \t\r\n]*")
_EXCERPT = 20  # characters shown on either side of a syntax error
_OPEN_END = 16  # characters at the end of a piece that may be half a word, a number or an escape


def read_lines(name: str, pieces: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """(line, value) of each record of JSON lines."""
    for number, (line, last) in enumerate(lines_of(pieces), start=1):
        yield from read_line(name, line, number, last=last)


def read_line(name: str, line: str, number: int, *, last: bool) -> Iterator[tuple[int, Any]]:
    """(number, value) of one line, nothing for a blank one.

    last: nothing comes after it, so it may be cut off.
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
    """(line, value) of each record of one JSON list."""
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
    """A stretch of text and where it stands in its file. last: nothing comes after it."""

    def __init__(self, name: str, text: str, first_line: int, *, last: bool):
        self._name, self._text, self._last = name, text, last
        self._line, self._counted = first_line, 0
        self._before = 0  # characters of the first line that stand before the text

    def line(self, position: int) -> int:
        """Positions must not go backwards: lines are counted once."""
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return self._line

    def decode(self, start: int) -> tuple[Any, int]:
        """The value that starts here, and where it ends."""
        try:
            return _DECODER.raw_decode(self._text, start)
        except json.JSONDecodeError as error:
            self._malformed(error)
        except _Refused as refused:
            what, fix = str(refused), ""
        except RecursionError:
            what, fix = "is nested too deeply", "records are flat"
        except ValueError:  # Python refuses to convert integers of thousands of digits
            what, fix = "holds a number with too many digits", "write it as text"
        raise InputError(
            Fault(f"{self._name}:{self.line(start)}", f"the record that starts here {what}", fix, code="SF-DATA-ROW")
        )

    def fail(self, position: int, what: str, fix: str = "") -> NoReturn:
        position = min(position, len(self._text))
        if self._last and position >= len(self._text.rstrip()):
            what, fix = "the file ends in the middle of a record", "it looks cut off"
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
    """The part of a text in pieces that is at hand: more is read where it is asked for, and what lies behind is let go.
    at: where the reader stands in it."""

    def __init__(self, name: str, pieces: Iterable[str]):
        super().__init__(name, "", 1, last=False)
        self._pieces = iter(pieces)
        self.at = 0

    def next(self) -> str:
        """The next character that is no blank, where the reader then stands; empty at the end."""
        self.at = _skip_blank(self._text, self.at)
        while self.at == len(self._text) and not self._last:
            self._more()
            self.at = _skip_blank(self._text, self.at)
        return self._text[self.at : self.at + 1]

    def value(self) -> tuple[int, Any]:
        """The line and the value that starts here; the reader then stands behind it."""
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
        """What `decode` gives; None where that could be otherwise with more of the text."""
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
        """Let go of what lies behind, but for what an error shows, and read as much again as is left: however long a
        record is, what is looked at twice stays in proportion. Returns how many characters went."""
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
    """One JSON value that stands alone, such as a cell of a table.

    where: named by the InputError.
    """
    place = _Place(where, text, 1, last=True)
    value, end = place.decode(_skip_blank(text, 0))
    if (rest := _skip_blank(text, end)) != len(text):
        place.fail(rest, "text after the end of the value")
    return value


class _Refused(Exception):
    """Well-formed for the standard library, refused here."""


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
