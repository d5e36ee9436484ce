"""What a path in a config or on the command line means: a local file or a name on the hub.

Pure rules, shared by models and data. A path that could be local is never taken for a hub id, so a misspelt folder
cannot start a download.
"""

from __future__ import annotations

import os.path  # returns False where pathlib raises: names too long, unreadable folders
import re

from surefoot.system.errors import Fault, InputError

DATA_KINDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet")
DATA_SUFFIXES = (
    *DATA_KINDS,
    *(f"{kind}.gz" for kind in DATA_KINDS if kind != ".parquet"),
)  # Parquet is already compressed
TEMPLATE_SUFFIX = ".jinja"  # data.template may name such a file
DESCRIPTION = "dataset_info.json"  # file that names the data sets of a folder

_MODULE = re.compile(r"[A-Za-z_]\w+(\.\w+)*:[A-Za-z_]\w*")  # two letters at least: C:name is a drive
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_local(text: str) -> bool:
    """Whether a path means a local file or folder rather than a hub id such as org/name."""
    if text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text):
        return True
    return os.path.exists(text) or os.path.exists(os.path.dirname(text))


def is_hub_data(text: str) -> bool:
    """Whether a source's path means a data set on the hub: org/name, and nothing that could be a file."""
    return not looks_local(text) and data_kind(text) is None


def data_kind(name: str) -> str | None:
    """The file's kind in DATA_KINDS by its name, compressed or not; None for any other file."""
    name = name.lower()
    return os.path.splitext(name.removesuffix(".gz"))[1] if name.endswith(DATA_SUFFIXES) else None


def is_address(text: str) -> bool:
    """Whether it is the address of a server."""
    return text.startswith(("http://", "https://"))


def is_function(text: str) -> bool:
    """Whether it has the form FILE.py:FUNCTION, or MODULE:FUNCTION of an installed package."""
    return "://" not in text and (".py:" in text or _MODULE.fullmatch(text) is not None)


def check_name(name: str, *, own: bool = False) -> None:
    """Raises InputError unless it is a repository name, owner/name. own: a name alone is one of the token's account."""
    if not _HUB_ID.fullmatch(f"owner/{name}" if own and "/" not in name else name):
        raise InputError(Fault(name, "is not a repository name", "write it like owner/name", code="SF-HUB-MISSING"))
