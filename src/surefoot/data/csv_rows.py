"""Read CSV and TSV: a header row, then one record per row; every value is text.

Nothing is guessed but the delimiter, and that only among comma, semicolon and tab, from the header. A row with another
number of cells than the header, a header name that is empty or stands twice, and a quote that is never closed are
refused with their line: a reader that repairs them shifts answers into questions.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterable, Iterator

from surefoot.data.text_pieces import lines_with_ends
from surefoot.system.errors import Fault, InputError

_DELIMITERS = ",;\t"


def read_csv(name: str, pieces: Iterable[str], delimiter: str | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, record) of each row below the header. pieces: of the text. delimiter: None looks at the header. Quoted
    cells may hold line breaks; `line` is where the row starts. Blank lines between rows are skipped."""
    lines = lines_with_ends(pieces)
    begin: list[str] = []
    for line in lines:
        begin.append(line)
        if line.strip():
            break
    else:
        return
    delimiter = delimiter or _delimiter("".join(begin))
    cells = _cells(name, itertools.chain(begin, lines), delimiter)
    line, header = next(cells)
    _check_header(f"{name}:{line}", header)
    for line, row in cells:
        if len(row) != len(header):
            what = f"the row that starts here has {len(row)} cells, and the header has {len(header)}"
            raise InputError(
                Fault(
                    f"{name}:{line}",
                    what,
                    "quote cells that hold a delimiter, a quote or a line break",
                    code="SF-DATA-FILE",
                )
            )
        yield line, dict(zip(header, row, strict=True))


def _cells(name: str, lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of every row that is not blank."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    line, before = 1, csv.field_size_limit()
    while True:
        csv.field_size_limit(sys.maxsize)  # 128 KiB otherwise, which a long document exceeds; the limit is global
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            what, fix = str(error), "double the quotes inside a quoted cell"
            if "unexpected end" in what:
                what, fix = "a quote is opened in the row that starts here and never closed", "close it"
            raise InputError(Fault(f"{name}:{line}", f"malformed CSV: {what}", fix, code="SF-DATA-ROW")) from None
        finally:
            csv.field_size_limit(before)
        if row:
            yield line, row
        line = reader.line_num + 1


def _delimiter(text: str) -> str:
    """The one that cuts the header into most cells; the comma among equals."""
    header = text.lstrip("\r\n").splitlines()[0]
    return max(_DELIMITERS, key=lambda delimiter: len(next(csv.reader([header], delimiter=delimiter))))


def _check_header(where: str, header: list[str]) -> None:
    if empty := [number for number, cell in enumerate(header, start=1) if not cell.strip()]:
        fix = "name every column; an unnamed first one is often an index, written with index=False"
        raise InputError(Fault(where, f"column {empty[0]} of the header has no name", fix, code="SF-DATA-FILE"))
    if twice := [cell for cell in header if header.count(cell) > 1]:
        raise InputError(
            Fault(where, f"the header has the column {twice[0]!r} twice", "rename one of them", code="SF-DATA-FILE")
        )
