"""Pickled weights, opened by a child process that gives back safetensors. Nothing else of surefoot opens a pickle.

A pickle is a program. torch's weights-only reader runs only what builds tensors; on top of that the child has a limit
on time and memory and no way to start a process. Its result is a file on the disk that `convert` writes to anyway, so
that it needs no memory here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.convert.safetensors_file import read_header, unread
from surefoot.convert.tensors import LazyTensor
from surefoot.convert.unpickle import REFUSED
from surefoot.errors import EnvironmentFault, Fault, InputError
from surefoot.families.files import read_json

_SECONDS = 120  # to import torch on a busy machine, and some
_BYTES_PER_SECOND = 20_000_000  # a slow disk
_MEMORY = 8_000_000_000  # address space of torch itself, generously
_COPIES = 3  # of the file in address space: mapped twice, and a tensor being written
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")  # no tokens, no proxies
_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")  # what trainers put weights under


@dataclass(frozen=True)
class Pickled:
    """What a file held. value: dicts, lists, numbers and texts, with a LazyTensor in place of each tensor; of other
    objects the name of the class and what it was made from."""

    value: Any


def open_pickled(source: Path, folder: Path, wanted: Sequence[str] = ()) -> Pickled:
    """Opens `source` in a child process; `folder` (made, on disk) keeps its tensors for as long as they are read.

    wanted: dotted beginnings of what to keep. Raises InputError for a file that asks for more than tensors or is no
    pickle of torch, EnvironmentFault where the child ran out of time or memory.
    """
    folder.mkdir(parents=True)
    size = source.stat().st_size
    command = [sys.executable, "-m", "surefoot.convert.unpickle", str(source), str(folder)]
    seconds = _SECONDS + size / _BYTES_PER_SECOND
    environment = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ} | {"OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            [*command, str(_MEMORY + _COPIES * size), *wanted],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        what = f"took more than {seconds:.0f} s to open"
        raise EnvironmentFault(Fault(str(source), what, "the file is hostile, or the disk very slow")) from None
    if child.returncode == REFUSED:
        raise InputError(Fault(str(source), child.stdout.decode("utf-8", "replace").strip()[:300]))
    if child.returncode:
        last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it was killed"]
        raise EnvironmentFault(Fault(str(source), f"cannot be opened: {last[0][:200]}", "is there memory for it?"))
    tensors = unread(read_header(folder / "tensors.safetensors"))
    return Pickled(_rebuilt(read_json(folder / "structure.json")["value"], tensors))


def state_dict(pickled: Pickled, source: Path) -> dict[str, LazyTensor]:
    """The mapping of names to tensors in it, at the top or under one of the names that trainers use."""
    value = pickled.value
    if isinstance(value, dict):
        if flat := _tensors(value):
            return flat
        found = [flat for key in _CONTAINERS if isinstance(value.get(key), dict) and (flat := _tensors(value[key]))]
        if len(found) == 1:
            return found[0]
    raise InputError(Fault(str(source), "holds no mapping of names to tensors", "give a file of model weights"))


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
