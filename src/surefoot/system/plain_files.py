"""Read a file whole where something else may stand in its place: a FIFO, which is waited for without end, a device, or
a file so large that it fills the memory. All of these are an OSError, told as other files' faults are.

For texts and records. Weights and data, which may be larger than any limit, are read a piece at a time elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST = 512 << 20  # bytes: of a tokenizer some tens of millions, of a log of a million steps 400 million
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # Windows has no FIFOs


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """Of a regular file, which a link may lead to. Raises OSError for anything else and for more than `most` bytes."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAIT)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        content = file.read(most + 1) if status.st_size <= most else b""
        if status.st_size > most or len(content) > most:  # it may have grown in between
            raise OSError(errno.EFBIG, f"is larger than {most >> 20} MiB")
    return content


def read_text(path: Path, most: int = MOST) -> str:
    """`read_bytes` in UTF-8, ends of lines as line feeds. Raises UnicodeDecodeError, a ValueError, as well."""
    return read_bytes(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
