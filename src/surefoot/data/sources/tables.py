"""CSV, TSV and Parquet tables as records.

CSV: a header row, then one record per row; every value is text. Only the delimiter is detected, from the header: comma,
semicolon or tab. A row with a different number of cells than the header, an empty or repeated column name, and a quote
that is never closed are refused with their line, because repairing them would shift answers into questions.

Parquet: read with pyarrow, row group by row group, and converted to the values that JSON would give: a null inside a
struct becomes an absent field (a struct always has all its fields), a map an object, a category its text, NaN in a
number column null (as pandas writes it), dates and decimals their text. Bytes are refused, except pictures in Hugging
Face's form {"bytes", "path"}: each is stored as a file named by its hash, because pictures are later opened by path for
every batch.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

from surefoot.data.sources.text import lines_with_ends
from surefoot.system import durable
from surefoot.system.errors import EnvironmentFault, Fault, InputError

_DELIMITERS = ",;\t"


def read_csv(name: str, pieces: Iterable[str], delimiter: str | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """Iterate over (line, record) of each row below the header. Quoted cells may contain line breaks; `line` is where
    the row starts. Blank lines are skipped.

    pieces: the text, in pieces.
    delimiter: None: detect it from the header.
    """
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
            what = f"the row that starts here has {len(row)} cells, but the header has {len(header)}"
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
    """Iterate over (line, cells) of every row that is not blank."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    line, before = 1, csv.field_size_limit()
    while True:
        csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is too small for documents; the limit is global
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
    """Return the delimiter that splits the header into most cells; comma in case of a tie."""
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


_BATCH = 1024  # rows converted to Python values at once
_LONGEST = 64 << 20  # maximum characters of a text: Parquet can pack half a billion equal ones into 16 kB
_MISSING = "pip install 'surefoot[data]'"


def read_parquet(name: str, content: bytes | BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """Iterate over (row, record) of each row, rows from 1.

    content: the bytes of the file, or the open file, which is read lazily.

    Raises EnvironmentFault without pyarrow, InputError for a damaged file.
    """
    file = _open(name, content)
    number = 0
    # One row group at a time: over all of them pyarrow reads ahead, and a stream would download unused data.
    groups = range(file.num_row_groups)
    batches = (batch for group in groups for batch in file.iter_batches(_BATCH, row_groups=[group]))
    while (batch := _next(batches, name, number)) is not None:
        columns = {field: batch.column(place) for place, field in enumerate(batch.schema.names)}
        for place in range(batch.num_rows):
            number += 1
            yield number, {field: _cell(column[place], f"{name}:{number}", field) for field, column in columns.items()}


def _open(name: str, content: bytes | BinaryIO) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise EnvironmentFault(
            Fault(name, "Parquet needs pyarrow, which is not installed", _MISSING, code="SF-PACKAGE")
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content) if isinstance(content, bytes) else content)
        names = file.schema_arrow.names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last one: from a column's name
        _reraise_foreign(error)
        what = f"is not a complete Parquet file: {_first_line(error)}"
        raise InputError(Fault(name, what, "it seems truncated or misnamed", code="SF-DATA-FILE")) from None
    if twice := [field for field in names if names.count(field) > 1]:
        raise InputError(Fault(name, f"has the column {twice[0]!r} twice", "rename one of them", code="SF-DATA-FILE"))
    return file


def _next(batches: Iterator[Any], name: str, row: int) -> Any:
    import pyarrow

    try:
        return next(batches, None)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        _reraise_foreign(error)
        what = f"cannot be read further: {_first_line(error)}"
        raise InputError(Fault(f"{name}:{row + 1}", what, "the file is damaged", code="SF-DATA-FILE")) from None


def _reraise_foreign(error: Exception) -> None:
    """Re-raise subclasses of OSError: pyarrow raises plain OSError, so they come from the file object (the hub)."""
    if isinstance(error, OSError) and type(error) is not OSError:
        raise error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _cell(scalar: Any, where: str, column: str) -> Any:
    import pyarrow

    try:
        return _plain(scalar.as_py(maps_as_pydicts="strict"))
    except (_Unreadable, pyarrow.ArrowException, KeyError, ValueError) as error:
        raise InputError(
            Fault(where, f"column {column!r}: {error}", "leave the column out of the file", code="SF-DATA-ROW")
        ) from None


class _Unreadable(Exception):
    """A value that JSON cannot represent."""


def _plain(value: Any) -> Any:
    if is_bytes(value):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None
        raise _Unreadable(f"contains {value}, which is not a JSON number")
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    if isinstance(value, str) and len(value) > _LONGEST:
        raise _Unreadable(f"contains a text of {len(value):,} characters, more than {_LONGEST:,}")
    if isinstance(value, bytes):
        raise _Unreadable("contains bytes (an image or sound?), where text is required")
    return value


_FIELDS = {"bytes", "path"}
_NAME = 60  # characters kept from the end of a picture's name


def is_bytes(value: Any) -> bool:
    """Whether a cell of a table contains a picture's bytes, with or without its name."""
    return isinstance(value, dict) and isinstance(value.get("bytes"), bytes) and value.keys() <= _FIELDS


def as_files(value: Any, folder: Path) -> Any:
    """Store the pictures' bytes in a record (or a part of one) as files in `folder`, and replace them by paths."""
    if is_bytes(value):
        return str(_file(value["bytes"], str(value.get("path") or ""), folder))
    if isinstance(value, dict):
        return {name: as_files(one, folder) for name, one in value.items()}
    return [as_files(one, folder) for one in value] if isinstance(value, list) else value


def _file(data: bytes, name: str, folder: Path) -> Path:
    plain = re.sub(r"[^\w.-]", "_", re.split(r"[/\\]", name)[-1])[-_NAME:]
    path = folder / f"{hashlib.sha256(data).hexdigest()[:32]}-{plain or 'picture'}"
    if not path.is_file() or path.read_bytes() != data:
        durable.make_folders(folder)
        durable.write_bytes(path, data)
    return path
