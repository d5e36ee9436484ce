"""Read JSON and JSONL so strictly that a fault is found here, with its line, and not inside a tokenizer.

`read_source` takes the bytes of a file (one read: what is hashed is what is parsed), `parse_rows` turns them into rows.
The standard library's parser keeps the last of two equal keys, accepts NaN and half characters, and says "row 30" of
nothing; each of these is refused with file, line and what to do. The whole file is held in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from surefoot.errors import EnvironmentFault, Fault, InputError

_BLANK = re.compile(r"[ \t\r\n]*")
_LINES = (".jsonl", ".ndjson")
_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_EXCERPT = 20  # characters shown on either side of a syntax error


@dataclass(frozen=True)
class Source:
    """A data file as it was read. name: the path as the user wrote it. sha256: of the bytes, in hexadecimal."""

    name: str
    data: bytes
    sha256: str


@dataclass(frozen=True)
class Row:
    """One record. number: its place in the file, from 1. line: where it starts, from 1."""

    number: int
    line: int
    value: dict[str, Any]


def read_source(path: str | Path) -> Source:
    """The bytes of a .json, .jsonl or .ndjson file. InputError when there is no such file."""
    name = str(path)
    if Path(path).suffix.lower() not in (".json", *_LINES):
        raise InputError(Fault(name, "is neither .json nor .jsonl", "surefoot reads a JSON list or JSON lines"))
    try:
        data = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(Fault(name, "no such file", "check the path; it is relative to the working folder")) from None
    except IsADirectoryError:
        raise InputError(Fault(name, "is a folder, not a file")) from None
    except OSError as error:
        raise EnvironmentFault(Fault(name, f"cannot be read: {error.strerror or error}")) from None
    return Source(name, data, hashlib.sha256(data).hexdigest())


def parse_rows(source: Source) -> list[Row]:
    """All records of the file, at least one. InputError names the line (and column) of the first fault."""
    text = _decode(source)
    read = _read_lines if Path(source.name).suffix.lower() in _LINES else _read_list
    rows = []
    for number, (line, value) in enumerate(read(source.name, text), start=1):
        where = f"{source.name}:{line}"
        if not isinstance(value, dict):
            raise InputError(Fault(where, f"record {number} is {kind_of(value)}, not an object with named fields"))
        _check_characters(value, where)
        rows.append(Row(number, line, value))
    if not rows:
        raise InputError(Fault(source.name, "0 records", "put at least one example into the file"))
    return rows


def kind_of(value: Any) -> str:
    """A JSON value's type in words."""
    return "an empty list" if value == [] else _KINDS[type(value)]


def _decode(source: Source) -> str:
    data = source.data
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(Fault(f"{source.name}:1", "is UTF-16", "save the file as UTF-8"))
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        where = f"{source.name}:{line}"
        if error.end >= len(data) and "unexpected end" in error.reason:
            raise InputError(Fault(where, "the file ends in the middle of a character", "it looks cut off")) from None
        what = f"byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8"
        raise InputError(Fault(where, what, "save the file as UTF-8")) from None


def _read_lines(name: str, text: str) -> Iterator[tuple[int, Any]]:
    """JSON lines. Only \\n ends a line: strings may hold other separators such as U+2028."""
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        start = _skip_blank(line, 0)
        if start == len(line):
            continue
        place = _Place(name, line, number, last=number == len(lines))
        value, end = place.decode(start)
        if (rest := _skip_blank(line, end)) != len(line):
            place.fail(rest, "text after the end of the record", "write one record per line")
        yield number, value


def _read_list(name: str, text: str) -> Iterator[tuple[int, Any]]:
    """One JSON list of records."""
    place = _Place(name, text, 1, last=True)
    position = _skip_blank(text, 0)
    if position == len(text):
        return
    if text[position] != "[":
        fix = "name the file .jsonl if it holds one record per line" if text[position] == "{" else "write [record, …]"
        place.fail(position, "the file does not hold a list of records", fix)
    position = _skip_blank(text, position + 1)
    closed = text.startswith("]", position)
    while not closed:
        value, end = place.decode(position)
        yield place.line(position), value
        position = _skip_blank(text, end)
        closed = text.startswith("]", position)
        if not closed:
            if not text.startswith(",", position):
                place.fail(position, "a comma or ] is missing after a record")
            position = _skip_blank(text, position + 1)
    if (rest := _skip_blank(text, position + 1)) != len(text):
        place.fail(rest, "text after the end of the list", "one file holds one list")


class _Place:
    """A stretch of text and where it stands in its file. last: nothing comes after it."""

    def __init__(self, name: str, text: str, first_line: int, *, last: bool):
        self._name, self._text, self._last = name, text, last
        self._line, self._counted = first_line, 0

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
        raise InputError(Fault(f"{self._name}:{self.line(start)}", f"the record that starts here {what}", fix))

    def fail(self, position: int, what: str, fix: str = "") -> NoReturn:
        position = min(position, len(self._text))
        if self._last and position >= len(self._text.rstrip()):
            what, fix = "the file ends in the middle of a record", "it looks cut off"
        around = self._text[max(0, position - _EXCERPT) : position + _EXCERPT]
        column = position - self._text.rfind("\n", 0, position)
        where = f"{self._name}:{self.line(position)}:{column}"
        raise InputError(Fault(where, f"{what} (near {around!r})", fix)) from None

    def _malformed(self, error: json.JSONDecodeError) -> NoReturn:
        whole = self._text.rstrip()
        unfinished = whole.lstrip().startswith(("{", "[")) and not whole.endswith(("}", "]"))
        cut = error.msg.startswith("Unterminated string") or unfinished
        position = len(whole) if self._last and cut else error.pos
        self.fail(
            position, f"malformed JSON: {error.msg[0].lower()}{error.msg[1:]}", "check quotes, commas and brackets"
        )


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


def _check_characters(value: dict[str, Any], where: str) -> None:
    """Half characters and NUL come in through \\u escapes; tokenizers and files fail on them later, without a line."""
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str) and not _is_text(item):
            what = "holds NUL (\\u0000)" if "\0" in item else "holds half of a character (a lone \\ud800-\\udfff)"
            raise InputError(Fault(where, f"the record that starts here {what}", "remove it from the text"))


def _is_text(item: str) -> bool:
    if item.isascii():
        return "\0" not in item
    try:
        item.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in item
