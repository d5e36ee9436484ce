"""Pictures that lie in a table, as Hugging Face's data sets hold them: {"bytes", "path"}. They become files.

What learns pictures names files by path and hash, and opens them again for every batch. A table's pictures are
written once, under their hash, so that two tables with one picture have one file.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from surefoot.system import durable

_FIELDS = {"bytes", "path"}
_NAME = 60  # last characters of the name that a picture had


def is_bytes(value: Any) -> bool:
    """Whether a cell of a table is a picture's bytes with, or without, its name."""
    return isinstance(value, dict) and isinstance(value.get("bytes"), bytes) and value.keys() <= _FIELDS


def as_files(value: Any, folder: Path) -> Any:
    """A record, or a part of one, with the path of a file in `folder` in place of a picture's bytes."""
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
