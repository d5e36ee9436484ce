"""Parse JSON and JSON lines so strictly that a fault is found here, with its line, and not inside a tokenizer.

The standard library's parser keeps the last of two equal keys, accepts NaN and half characters, and says "row 30" of
nothing; each of these is refused with file, line and what to do. The whole text is held in memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from surefoot.errors import Fault, InputError

_BLANK = re.compile(r"[ \t\r\n]*")
_EXCERPT = 20  # characters shown on either side of a syntax error


def read_lines(name: str, text: str) -> Iterator[tuple[int, Any]]:
    """(line, value) of each record of JSON lines. Only \\n ends a line: strings may hold others, such as U+2028."""
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        yield from read_line(name, line, number, last=number == len(lines))


def read_line(name: str, line: str, number: int, *, last: bool) -> Iterator[tuple[int, Any]]:
    """(number, value) of one line, nothing for a blank one. last: nothing comes after it, so it may be cut off."""
    start = _skip_blank(line, 0)
    if start == len(line):
        return
    place = _Place(name, line, number, last=last)
    value, end = place.decode(start)
    if (rest := _skip_blank(line, end)) != len(line):
        place.fail(rest, "text after the end of the record", "write one record per line")
    yield number, value


def read_list(name: str, text: str) -> Iterator[tuple[int, Any]]:
    """(line, value) of each record of one JSON list."""
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


def read_value(where: str, text: str) -> Any:
    """One JSON value that stands alone, such as a cell of a table. where: named by the InputError."""
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
