"""The text of a file a piece at a time: unpacked where it is packed, decoded, and cut into lines.

What is wrong with the bytes is found where it stands, and everything before it has been read by then.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import zlib
from collections.abc import Iterable, Iterator
from io import StringIO
from typing import BinaryIO

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
    """What a file of gzip holds. size: of the file. InputError for what unpacks to far more than text does: a small
    file could fill the memory."""
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
