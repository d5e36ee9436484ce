"""Read a whole file with a size limit; refuse FIFOs and devices.

A FIFO would block forever, and a device or huge file would fill the memory; both raise OSError. For texts and records;
weights and data may be larger and are read in chunks elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST = 512 << 20  # bytes: a tokenizer has some tens of millions, a log of a million steps 400 million
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # Windows has no FIFOs


def read_bytes(path: Path, most: int | None = MOST) -> bytes:
    """Read a regular file, following links. Raises OSError for anything else and for more than `most` bytes; None: of
    any size."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAIT)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        if most is None:
            return file.read()
        content = file.read(most + 1) if status.st_size <= most else b""
        if status.st_size > most or len(content) > most:  # the file may have grown in between
            raise OSError(errno.EFBIG, f"is larger than {most >> 20} MiB")
    return content


def read_text(path: Path, most: int = MOST) -> str:
    """Read as UTF-8 with line ends as line feeds. Raises like `read_bytes`, and UnicodeDecodeError (a ValueError)."""
    return read_bytes(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
