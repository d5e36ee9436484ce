"""Tokenised data on disk, found again by what it was made from.

The key is a hash of everything that decides the result, so nothing ever has to be declared stale: another file,
template, tokenizer or length is another folder, and so is other code of surefoot's own. A folder appears by one rename
and carries the size and SHA-256 of its files; one that does not match is made again. The price is disk: old folders
stay until the user removes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from surefoot import durable, hardware, plain_files
from surefoot.data.columns import prints_of, supervised_of
from surefoot.data.dataset import (
    CONTINUED,
    CONTINUES,
    CONTROL_TEXT,
    GOOD,
    PROMPT_CUT,
    PROMPT_LOST,
    STOP_LOST,
    TRUNCATED,
    TokenisedFile,
)
from surefoot.data.encode import Encoded
from surefoot.errors import EnvironmentFault

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = ("surefoot", "tokenizers", "transformers")
_ARRAYS = ("ids", "mask", "offsets", "rows", "supervised", "prints")
_META = "meta.json"


def cache_key(parts: Mapping[str, Any]) -> str:
    """A name for the data that these parts, plain JSON values, and surefoot's own code decide."""
    return hashlib.sha256(_canonical({"code": code_digest(), **parts})).hexdigest()[:32]


@cache
def code_digest() -> str:
    """SHA-256 of the source of everything that turns records into ids and of the libraries' versions, so that no change
    to either has to be declared. The price: after an update all data is tokenised once more."""
    installed = hardware.versions()
    digest = hashlib.sha256(json.dumps([installed.get(name) for name in _LIBRARIES]).encode())
    for path in _sources():
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _sources() -> list[Path]:
    return sorted([*(_PACKAGE / "data").rglob("*.py"), *(_PACKAGE / "families").rglob("*.py")])


def open_cache(folder: Path, name: str) -> tuple[TokenisedFile, dict[str, Any]] | None:
    """The examples and the record written with them, or None when they are absent or not what was written. name: of the
    file they come from, which is no part of the cache: the same content may lie elsewhere."""
    try:
        meta = json.loads(plain_files.read_text(folder / _META))
        intact = meta["sha256"] == _digest(meta["files"], meta["record"]) and all(
            (folder / name).stat().st_size == facts["size"] and durable.sha256_file(folder / name) == facts["sha256"]
            for name, facts in meta["files"].items()
        )
        if not intact:
            return None
        return TokenisedFile(name, **{array: _mapped(folder / f"{array}.npy") for array in _ARRAYS}), meta["record"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_cache(
    folder: Path, name: str, examples: Iterable[Encoded], record: Mapping[str, Any], vocabulary: int
) -> tuple[TokenisedFile, dict[str, Any]]:
    """Write the examples of the file `name` and a JSON record; returns both. vocabulary: every id is below it.

    Several processes may do this at the same time with the same content: one of them writes the folder, the others find
    it. What is returned then depends on no file that another one may move. Raises EnvironmentFault when the disk is
    full or the place cannot be written.
    """
    arrays = _arrays(list(examples), vocabulary)
    for last in (False, True):
        if (found := open_cache(folder, name)) is not None:
            return found
        _move_away(folder)
        try:
            _write(folder, arrays, record)
            break
        except EnvironmentFault:
            if last and open_cache(folder, name) is None:  # not another process that was first, twice
                raise
    return TokenisedFile(name, **arrays), dict(record)


def _write(folder: Path, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
    with durable.staged_folder(folder) as staging:
        for name, array in arrays.items():
            np.save(staging / f"{name}.npy", array, allow_pickle=False)
        files = {
            path.name: {"size": path.stat().st_size, "sha256": durable.sha256_file(path)}
            for path in sorted(staging.iterdir())
        }
        meta = {"sha256": _digest(files, record), "files": files, "record": record}
        durable.write_json(staging / _META, meta)


def _move_away(folder: Path) -> None:
    """A folder that did not verify; at once, so that no other process meets half of it."""
    with suppress(EnvironmentFault):  # another process was faster; a real fault shows at the write
        durable.remove(folder)


def _mapped(path: Path) -> np.ndarray:
    """Read-only and on disk, but seen as a plain array: every slice of a memmap object costs microseconds more."""
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def _arrays(examples: list[Encoded], vocabulary: int) -> dict[str, np.ndarray]:
    width = np.uint16 if vocabulary <= np.iinfo(np.uint16).max + 1 else np.uint32
    rows = [(one.number, one.line, _flags(one), one.answers_lost) for one in examples]
    ids = np.concatenate([np.zeros(0, dtype=width), *(one.ids for one in examples)], dtype=width, casting="unsafe")
    mask = np.concatenate([np.zeros(0, dtype=bool), *(one.supervised for one in examples)])
    offsets = np.cumsum([0, *(len(one.ids) for one in examples)], dtype=np.int64)
    return {
        "ids": ids,
        "mask": mask,
        "offsets": offsets,
        "rows": np.array(rows, dtype=np.int64).reshape(-1, 4),
        "supervised": supervised_of(mask, offsets),
        "prints": prints_of(ids, mask, offsets),
    }


def _flags(one: Encoded) -> int:
    cut = TRUNCATED * one.truncated + PROMPT_LOST * one.prompt_lost + STOP_LOST * one.stop_lost
    part = CONTINUES * one.continues + CONTINUED * one.continued
    cut += PROMPT_CUT * one.prompt_cut
    return cut + part + CONTROL_TEXT * (one.control_texts > 0) + GOOD * one.good


def _digest(files: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical({"files": files, "record": record})).hexdigest()


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()
