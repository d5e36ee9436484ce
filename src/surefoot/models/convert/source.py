"""Open weights of any kind: a model folder, an adapter, a single file or a ZeRO checkpoint; pickled or safetensors."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.models.convert import zero
from surefoot.models.convert.pickled import Wanted, open_pickled, state_dict
from surefoot.models.convert.safetensors_file import (
    INDEX,
    PICKLED,
    SINGLE,
    indexed_files,
    lazy_tensors,
    stored_in,
    weights_error,
)
from surefoot.models.convert.tensors import LazyTensor
from surefoot.system.errors import Fault, InputError

VALUE_HEAD_FILE = "value_head.safetensors"
WEIGHTS = (".safetensors", *PICKLED)  # suffixes
_ADAPTER = "adapter_model"
_ORDER = ("model", "pytorch_model", _ADAPTER)  # preference among several weight files in a folder


@dataclass
class Source:
    """Weights as lazy tensors, and where they are stored.

    folder: may also contain config and tokenizer.
    files: the weight files.
    zero: whether it is a ZeRO checkpoint.
    """

    folder: Path
    files: list[Path]
    tensors: dict[str, LazyTensor]
    zero: bool = False


def open_source(path: Path, scratch: Path) -> Source:
    """Open the weights at `path`; tensors are read later.

    scratch: folder for the output of child processes; must exist until all weights are read.

    Raises InputError if there are none.
    """
    files_or_checkpoint = find_weights(path)
    if isinstance(files_or_checkpoint, Path):
        files: list[Path] = []

        def opened(wanted: Sequence[tuple[Path, Sequence[str]]]) -> list[Any]:
            files.extend(file for file, _ in wanted if file not in files)
            return _opened([Wanted(file, tuple(keys)) for file, keys in wanted], scratch)

        return Source(path, files, zero.consolidate(files_or_checkpoint, opened), zero=True)
    files = files_or_checkpoint
    if path.is_file():
        return Source(path.parent, files, _read(files, scratch)[0])
    tensors: dict[str, LazyTensor] = {}
    for file, more in zip(files, _read(files, scratch), strict=True):
        if twice := sorted(more.keys() & tensors.keys()):
            raise weights_error(file, f"{len(twice)} weights are in another file, too; the first is {twice[0]}")
        tensors |= more
    head = path / VALUE_HEAD_FILE
    if head.is_file():
        files.append(head)
        tensors |= _read([head], scratch)[0]
    return Source(path, files, tensors)


def find_weights(path: Path) -> list[Path] | Path:
    """Return the weight files at `path`, or the folder of a ZeRO checkpoint. Raises InputError if there are none.
    Decides by file names: opens no weights and does not import torch."""
    if path.is_file():
        if path.suffix not in WEIGHTS:
            raise weights_error(path, "is not a weight file", f"give a file of type {', '.join(WEIGHTS)}")
        return [path]
    if not path.is_dir():
        raise InputError(Fault(str(path), "no such file or folder", code="SF-FILE-MISSING"))
    return zero.find_checkpoint(path) or _weights(path)


def _opened(wanted: Sequence[Wanted], scratch: Path) -> list[Any]:
    scratch.mkdir(parents=True, exist_ok=True)
    return open_pickled(wanted, Path(tempfile.mkdtemp(dir=scratch)) / "opened")


def _read(files: Sequence[Path], scratch: Path) -> list[dict[str, LazyTensor]]:
    """Return the weights of each file. One child process opens all pickled files."""
    pickled = [path for path in files if path.suffix in PICKLED]
    values = _opened([Wanted(path) for path in pickled], scratch) if pickled else []
    opened = {path: state_dict(value, path) for path, value in zip(pickled, values, strict=True)}
    return [opened[path] if path in opened else lazy_tensors(stored_in([path])) for path in files]


def _weights(folder: Path) -> list[Path]:
    """Return the files of a folder's model or adapter, safetensors rather than pickled ones."""
    for index in (INDEX, "pytorch_model.bin.index.json"):
        if (folder / index).is_file() and not (folder / SINGLE).is_file():
            return _shards(folder, index)
    for stem in _ORDER:
        for suffix in WEIGHTS:
            if (folder / f"{stem}{suffix}").is_file():
                return [folder / f"{stem}{suffix}"]
    loose = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
    loose = [path for path in loose if path.name != VALUE_HEAD_FILE and not path.name.startswith("training_args")]
    if len(loose) == 1:
        return loose
    what = f"has {len(loose)} files that could be the weights: {', '.join(p.name for p in loose[:3])}"
    raise weights_error(folder, what if loose else "contains no weights", "give the file" if loose else "")


def _shards(folder: Path, index: str) -> list[Path]:
    files = indexed_files(folder, index)
    if missing := [file for file in files if not file.is_file()]:
        raise weights_error(missing[0], f"missing, but {index} names it", "copy all shards")
    return files
