"""What a path in a config or on the command line means: something on this machine, or a name on the hub.

Pure rules, in one place for models and data. A path that could be local is never taken for a hub id, so a misspelt
folder cannot start a download.
"""

from __future__ import annotations

import os.path  # its tests answer False where pathlib's raise: names too long, folders that may not be read
import re

PLAIN_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt")  # may be followed by .gz
DATA_SUFFIXES = (*PLAIN_SUFFIXES, ".parquet")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_local(text: str) -> bool:
    """Whether a path means a file or folder on this machine rather than a hub id such as org/name."""
    if text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text) or data_suffix(text):
        return True
    return os.path.exists(text) or os.path.exists(os.path.dirname(text))


def data_suffix(name: str) -> str | None:
    """What kind of data file the name says it is: one of DATA_SUFFIXES, without .gz; None for any other file."""
    stem, suffix = os.path.splitext(name.lower())
    if suffix == ".gz" and os.path.splitext(stem)[1] in PLAIN_SUFFIXES:
        return os.path.splitext(stem)[1]
    return suffix if suffix in DATA_SUFFIXES else None
