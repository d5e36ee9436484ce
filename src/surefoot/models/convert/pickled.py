"""Pickled weights, opened by a child process that gives back safetensors. Nothing else of surefoot opens a pickle.

    weights, more = open_pickled([Wanted(first), Wanted(second)], scratch)   # one child: torch takes seconds to start

A pickle is a program. torch's weights-only reader runs only what builds tensors; on top of that the child has a limit
on time and memory and no way to start a process. Its result is a file on the disk that `convert` writes to anyway, so
that it needs no memory here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.families.files import read_json
from surefoot.models.convert.safetensors_file import lazy_tensors, read_header, weights_error
from surefoot.models.convert.tensors import LazyTensor
from surefoot.models.convert.unpickle import REFUSED, STRUCTURE, TENSORS
from surefoot.system.errors import EnvironmentFault, Fault

_SECONDS = 120  # to import torch on a busy machine, and some
_BYTES_PER_SECOND = 20_000_000  # a slow disk
_MEMORY = 8_000_000_000  # address space of torch itself, generously
_COPIES = 3  # of the file in address space: mapped twice, and a tensor being written
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")  # no tokens, no proxies
_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")  # what trainers put weights under


@dataclass(frozen=True)
class Wanted:
    """A pickled file.

    keep: dotted beginnings of what is wanted of it; everything without them.
    """

    file: Path
    keep: tuple[str, ...] = ()


def open_pickled(wanted: Sequence[Wanted], folder: Path) -> list[Any]:
    """What each file holds, in the order of `wanted`: dicts, lists, numbers and texts, with a LazyTensor in place of
    each tensor; of other objects the name of the class and what it was made from.

    One child process opens them all; `folder` (made, on disk) keeps the tensors for as long as they are read. Raises
    InputError for a file that asks for more than tensors or is no pickle of torch, EnvironmentFault where the child ran
    out of time or memory; then nothing of any file is given.
    """
    folder.mkdir(parents=True)
    sizes = [one.file.stat().st_size for one in wanted]
    places = [folder / str(number) for number in range(len(wanted))]
    jobs = [
        {"source": str(one.file), "folder": str(place), "keep": one.keep}
        for one, place in zip(wanted, places, strict=True)
    ]
    memory = str(_MEMORY + _COPIES * max(sizes))
    command = [sys.executable, "-m", "surefoot.models.convert.unpickle", str(folder), memory]
    seconds = _SECONDS + sum(sizes) / _BYTES_PER_SECOND
    environment = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ} | {"OMP_NUM_THREADS": "1"}
    try:
        given = json.dumps(jobs).encode()
        child = subprocess.run(command, input=given, capture_output=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired:
        what, fix = f"took more than {seconds:.0f} s to open", "the file is hostile, or the disk very slow"
        raise EnvironmentFault(Fault(_current(wanted, places), what, fix, code="SF-MODEL-WEIGHTS")) from None
    if child.returncode == REFUSED:
        raise weights_error(Path(_current(wanted, places)), child.stdout.decode("utf-8", "replace").strip()[:300])
    if child.returncode:
        last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it was killed"]
        what = f"cannot be opened: {last[0][:200]}"
        fix = "is there memory for it?"
        raise EnvironmentFault(Fault(_current(wanted, places), what, fix, code="SF-MODEL-WEIGHTS"))
    return [
        _rebuilt(read_json(place / STRUCTURE)["value"], lazy_tensors(read_header(place / TENSORS))) for place in places
    ]


def _current(wanted: Sequence[Wanted], places: Sequence[Path]) -> str:
    """The file that the child was opening when it ended: a finished one has its structure on the disk."""
    unfinished = (one.file for one, place in zip(wanted, places, strict=True) if not (place / STRUCTURE).is_file())
    return str(next(unfinished, wanted[-1].file))


def state_dict(value: Any, source: Path) -> dict[str, LazyTensor]:
    """The mapping of names to tensors in an opened file, at the top or under one of the names that trainers use."""
    if isinstance(value, dict):
        if flat := _tensors(value):
            return flat
        found = [flat for key in _CONTAINERS if isinstance(value.get(key), dict) and (flat := _tensors(value[key]))]
        if len(found) == 1:
            return found[0]
    raise weights_error(source, "holds no mapping of names to tensors", "give a file of model weights")


def _tensors(value: dict[str, Any]) -> dict[str, LazyTensor]:
    """The tensors of a mapping that holds only them, else nothing. DeepSpeed and others add empty entries."""
    rest = [one for one in value.values() if not isinstance(one, LazyTensor) and one not in (None, {}, [])]
    return {} if rest else {key: one for key, one in value.items() if isinstance(one, LazyTensor)}


def _rebuilt(value: Any, tensors: dict[str, LazyTensor]) -> Any:
    if isinstance(value, list):
        return [_rebuilt(item, tensors) for item in value]
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$dict" in value:
            return {key: _rebuilt(item, tensors) for key, item in value["$dict"]}
    return value
