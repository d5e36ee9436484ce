"""The on-disk cache of tokenized data.

The key is a hash of everything that decides the result, so entries never have to be invalidated: another file,
template, tokenizer or length, or other surefoot code, means another folder. A folder is published by one rename and
records the size and SHA-256 of its files; a folder that does not match is written again. The cost is disk space: old
folders stay until the user removes them.

Examples are appended to the array files in batches, so memory never holds a whole data set. The .npy header has room
for the final number of rows, so each file is byte for byte what `numpy.save` would write.
"""

from __future__ import annotations

import errno
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.data.formats.conversation import Picture
from surefoot.data.tokenize.dataset import (
    CONTINUED,
    CONTINUES,
    CONTROL_TEXT,
    FINGERPRINT,
    GIVEN,
    GOOD,
    PROMPT_CUT,
    PROMPT_LOST,
    STOP_LOST,
    TRUNCATED,
    TokenizedFile,
    fingerprints_of,
    supervised_of,
)
from surefoot.data.tokenize.encode import Encoded
from surefoot.system import durable, hardware, plain_files
from surefoot.system.errors import EnvironmentFault

_PACKAGE = Path(__file__).parents[2]
_LIBRARIES = ("surefoot", "tokenizers", "transformers")
_ARRAYS: Mapping[str, tuple[np.dtype | None, tuple[int, ...]]] = {  # dtype (None: that of ids), and shape of one row
    "ids": (None, ()),
    "mask": (np.dtype(bool), ()),
    "offsets": (np.dtype(np.int64), ()),
    "rows": (np.dtype(np.int64), (4,)),
    "supervised": (np.dtype(np.int64), ()),
    "fingerprints": (FINGERPRINT, ()),
    "fields": (np.dtype(np.uint8), ()),
    "field_offsets": (np.dtype(np.int64), ()),
}
_META, _PICTURES = "meta.json", "pictures.json"
Written = tuple[TokenizedFile, dict[str, Any], str]  # examples, metadata, and why nothing was cached ("" if it was)


def cache_key(parts: Mapping[str, Any]) -> str:
    """Return the cache key of these parts (JSON values) and surefoot's own code."""
    return hashlib.sha256(_canonical({"code": code_digest(), **parts})).hexdigest()[:32]


@cache
def code_digest() -> str:
    """Return the SHA-256 of all source files that turn records into ids, and of the libraries' versions. Changes need
    no version number, but after an update all data is tokenized again."""
    installed = hardware.versions()
    digest = hashlib.sha256(json.dumps([installed.get(name) for name in _LIBRARIES]).encode())
    for path in _sources():
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _sources() -> list[Path]:
    return sorted([*(_PACKAGE / "data").rglob("*.py"), *(_PACKAGE / "families").rglob("*.py")])


def open_cache(folder: Path, name: str) -> tuple[TokenizedFile, dict[str, Any]] | None:
    """Load the examples and their metadata; None if they are absent or damaged.

    name: name of the data file. It is not cached, because another file may have the same content.
    """
    try:
        meta = json.loads(plain_files.read_text(folder / _META))
        # Verified at every start: otherwise a flipped bit on the disk would silently be trained on.
        intact = meta["sha256"] == _digest(meta["files"], meta["record"]) and all(
            (folder / name).stat().st_size == facts["size"] and durable.sha256_file(folder / name) == facts["sha256"]
            for name, facts in meta["files"].items()
        )
        if not intact:
            return None
        return _opened(folder, name), meta["record"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_cache(
    folder: Path,
    name: str,
    batches: Iterable[Sequence[Encoded]],
    record: Callable[[], Mapping[str, Any]],
    vocabulary: int,
) -> Written:
    """Write the examples of the file `name` batch by batch, and then their metadata.

    record: return the metadata (JSON values); called after the last batch.
    vocabulary: upper bound of the ids; decides their dtype.

    Several processes may write the same content at the same time: one of them publishes its folder. The returned arrays
    stay valid in all of them, because they are mapped before the rename. If the cache folder is not writable, the
    examples are stored in deleted temporary files, which last as long as the process. Raises EnvironmentFault if the
    disk is full.
    """
    # Half the disk and page cache for vocabularies up to 65,536.
    width = np.dtype(np.uint16 if vocabulary <= np.iinfo(np.uint16).max + 1 else np.uint32)
    try:
        durable.make_folders(folder.parent)
        durable.require_writable(folder.parent)
    except EnvironmentFault as error:
        with _nameless(error) as place:
            _fill(place, batches, width)
            return _opened(place, name), dict(record()), f"{error.faults[0].where} {error.faults[0].what}"
    durable.clear_abandoned(folder.parent)
    found: tuple[TokenizedFile, dict[str, Any]] | None = None
    try:
        with durable.staged_folder(folder) as staging:
            _fill(staging, batches, width)
            files = {
                path.name: {"size": path.stat().st_size, "sha256": durable.sha256_file(path)}
                for path in sorted(staging.iterdir())
            }
            known = dict(record())
            durable.fill_json(staging / _META, {"sha256": _digest(files, known), "files": files, "record": known})
            # Mapped before the rename: the pages stay readable even if another process replaces the folder.
            found = _opened(staging, name), known
            # Remove a damaged folder first: a rename cannot replace a folder that is not empty.
            if open_cache(folder, name) is None:
                _move_away(folder)
    except EnvironmentFault as error:
        if found is None or not _is_taken(error):
            raise
    return *found, ""


@contextmanager
def _nameless(why: EnvironmentFault) -> Iterator[Path]:
    """Yield a temporary folder. It is deleted when the block ends, but files mapped in it stay readable. Raises `why`
    if no temporary folder can be created either."""
    try:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    except OSError:
        raise why from None
    with folder, durable.faults_named(Path(folder.name)):
        yield Path(folder.name)


def _fill(folder: Path, batches: Iterable[Sequence[Encoded]], width: np.dtype) -> None:
    """Write all arrays and pictures.json; `width` is the dtype of the ids."""
    with ExitStack() as stack:
        append = {
            name: stack.enter_context(growing(folder / f"{name}.npy", dtype or width, row))
            for name, (dtype, row) in _ARRAYS.items()
        }
        tokens = examples = fields = 0
        pictures: dict[str, Sequence[Picture]] = {}
        append["offsets"](np.zeros(1, dtype=np.int64))
        append["field_offsets"](np.zeros(1, dtype=np.int64))
        for batch in batches:
            arrays = _arrays(batch, width)
            pictures |= {str(place): one.pictures for place, one in enumerate(batch, start=examples) if one.pictures}
            examples += len(batch)
            append["offsets"](tokens + arrays.pop("offsets")[1:])
            tokens += len(arrays["ids"])
            append["field_offsets"](fields + arrays.pop("field_offsets")[1:])
            fields += len(arrays["fields"])
            for name, rows in arrays.items():
                append[name](rows)
    durable.fill_json(folder / _PICTURES, pictures)


def _is_taken(error: EnvironmentFault) -> bool:
    """Whether another process has already published the same folder."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EEXIST, errno.ENOTEMPTY)


def _move_away(folder: Path) -> None:
    """Remove a damaged folder with one rename, so that no other process sees half of it."""
    with suppress(EnvironmentFault):  # another process was faster; a real fault is raised by the write
        durable.remove(folder)


def _opened(folder: Path, name: str) -> TokenizedFile:
    arrays = {array: _mapped(folder / f"{array}.npy") for array in _ARRAYS}
    written: dict[str, list[list[Any]]] = json.loads(plain_files.read_text(folder / _PICTURES))
    pictures = {int(place): tuple(Picture(*one) for one in own) for place, own in written.items()}
    return TokenizedFile(name, **arrays, pictures=pictures)


def _mapped(path: Path) -> np.ndarray:
    """Memory-map an array read-only, as a plain ndarray: slicing a memmap object costs microseconds more."""
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def _arrays(examples: Sequence[Encoded], width: np.dtype) -> dict[str, np.ndarray]:
    """Build the arrays of `TokenizedFile` for some examples; `width` is the dtype of the ids."""
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
        "fingerprints": _with_files(examples, fingerprints_of(ids, mask, offsets)),
        "fields": np.frombuffer(b"".join(one.fields for one in examples), dtype=np.uint8),
        "field_offsets": np.cumsum([0, *(len(one.fields) for one in examples if one.fields)], dtype=np.int64),
    }


def _with_files(examples: Sequence[Encoded], fingerprints: np.ndarray) -> np.ndarray:
    """Include the pictures in the hashes: the same question about two pictures is two examples."""
    for place, one in enumerate(examples):
        if one.pictures:
            seen = fingerprints[place].tobytes() + "".join(picture.sha256 for picture in one.pictures).encode()
            fingerprints[place] = np.void(hashlib.blake2b(seen, digest_size=FINGERPRINT.itemsize).digest())
    return fingerprints


def _flags(one: Encoded) -> int:
    cut = TRUNCATED * one.truncated + PROMPT_LOST * one.prompt_lost + STOP_LOST * one.stop_lost
    part = CONTINUES * one.continues + CONTINUED * one.continued
    cut += PROMPT_CUT * one.prompt_cut
    return cut + part + CONTROL_TEXT * (one.control_texts > 0) + GOOD * one.good + GIVEN * one.given


def _digest(files: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical({"files": files, "record": record})).hexdigest()


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


@contextmanager
def growing(path: Path, dtype: np.dtype, row: tuple[int, ...]) -> Iterator[Callable[[np.ndarray], None]]:
    """Yield a function that appends rows to a new .npy file in a staging folder.

    dtype, row: dtype of the elements, and shape of one row (() for a number).
    """
    count = 0
    with durable.filling(path) as file:

        def append(rows: np.ndarray) -> None:
            nonlocal count
            count += len(rows)
            durable.write_all(file, rows.astype(dtype, copy=False).tobytes())

        durable.write_all(file, _header(dtype, (0, *row)))
        yield append
        # Now the number of rows is known; the header has the same length for any number.
        file.seek(0)
        durable.write_all(file, _header(dtype, (count, *row)))


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return a .npy header whose length does not depend on the number of rows."""
    header = BytesIO()
    described = np.lib.format.header_data_from_array_1_0(np.empty((0, *shape[1:]), dtype))
    np.lib.format.write_array_header_1_0(header, {**described, "shape": shape})
    return header.getvalue()
