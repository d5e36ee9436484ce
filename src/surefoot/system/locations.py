"""What a path in a config or on the command line means: something on this machine, or a name on the hub.

Pure rules, in one place for models and data. A path that could be local is never taken for a hub id, so a misspelt
folder cannot start a download.
"""

from __future__ import annotations

import os.path  # its tests answer False where pathlib's raise: names too long, folders that may not be read
import re

from surefoot.system.errors import Fault, InputError

DATA_KINDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet")
DATA_SUFFIXES = (*DATA_KINDS, *(f"{kind}.gz" for kind in DATA_KINDS if kind != ".parquet"))  # that one packs itself
TEMPLATE_SUFFIX = ".jinja"  # data.template names a file of the user's own
DESCRIPTION = "dataset_info.json"  # of a folder whose data sets have names

_MODULE = re.compile(r"[A-Za-z_]\w+(\.\w+)*:[A-Za-z_]\w*")  # two letters at least: C:name is a drive
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_local(text: str) -> bool:
    """Whether a path means a file or folder on this machine rather than a hub id such as org/name."""
    if text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text):
        return True
    return os.path.exists(text) or os.path.exists(os.path.dirname(text))


def is_hub_data(text: str) -> bool:
    """Whether the path of a source means a data set on the hub: org/name, and nothing that could be a file."""
    return not looks_local(text) and data_kind(text) is None


def data_kind(name: str) -> str | None:
    """Which of DATA_KINDS the file's name says it is, packed or not; None for any other file."""
    name = name.lower()
    return os.path.splitext(name.removesuffix(".gz"))[1] if name.endswith(DATA_SUFFIXES) else None


def is_address(text: str) -> bool:
    """Whether it means a server."""
    return text.startswith(("http://", "https://"))


def is_function(text: str) -> bool:
    """Whether it reads FILE.py:FUNCTION, or MODULE:FUNCTION of an installed package."""
    return "://" not in text and (".py:" in text or _MODULE.fullmatch(text) is not None)


def check_name(name: str) -> None:
    """Raises InputError where it is no name of a repository, owner/name."""
    if not _HUB_ID.fullmatch(name):
        raise InputError(
            Fault(name, "is not a name of a repository", "write it like owner/name", code="SF-HUB-MISSING")
        )
