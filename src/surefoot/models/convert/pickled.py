"""Read pickled weights in a child process that converts them to safetensors. Nothing else in surefoot opens a pickle.

    weights, more = open_pickled([Wanted(first), Wanted(second)], scratch)   # one child: torch takes seconds to start

A pickle is a program. torch's weights-only unpickler runs only what builds tensors; in addition, the child has limits
on time and memory and cannot start processes. The safetensors file is written to the disk that `convert` writes to
anyway, so this process needs no memory for it.
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

_SECONDS = 120  # enough to import torch on a busy machine
_BYTES_PER_SECOND = 20_000_000  # of a slow disk
_MEMORY = 8_000_000_000  # address space for torch itself, generously
_COPIES = 3  # of the file in address space: mapped twice, plus the tensor being written
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")  # no tokens, no proxies
_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")  # keys under which trainers store weights


@dataclass(frozen=True)
class Wanted:
    """A pickled file to read.

    keep: dotted prefixes of the entries to read; () for all.
    """

    file: Path
    keep: tuple[str, ...] = ()


def open_pickled(wanted: Sequence[Wanted], folder: Path) -> list[Any]:
    """Return the content of each file: dicts, lists, numbers and strings, with a LazyTensor for each tensor; for other
    objects the class name and constructor arguments. One child process opens all files.

    folder: created on disk; holds the tensors, so it must exist as long as they are read.

    Raises InputError if a file contains more than tensors or is not a torch pickle, EnvironmentFault if the child runs
    out of time or memory.
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
        what, fix = f"took more than {seconds:.0f} s to open", "the file may be malicious, or the disk very slow"
        raise EnvironmentFault(Fault(_current(wanted, places), what, fix, code="SF-MODEL-WEIGHTS")) from None
    if child.returncode == REFUSED:
        raise weights_error(Path(_current(wanted, places)), child.stdout.decode("utf-8", "replace").strip()[:300])
    if child.returncode:
        last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it was killed"]
        what = f"cannot be opened: {last[0][:200]}"
        fix = "check that there is enough memory"
        raise EnvironmentFault(Fault(_current(wanted, places), what, fix, code="SF-MODEL-WEIGHTS"))
    return [
        _rebuilt(read_json(place / STRUCTURE)["value"], lazy_tensors(read_header(place / TENSORS))) for place in places
    ]


def _current(wanted: Sequence[Wanted], places: Sequence[Path]) -> str:
    """Return the file that the child was opening when it ended, the first without a structure file."""
    unfinished = (one.file for one, place in zip(wanted, places, strict=True) if not (place / STRUCTURE).is_file())
    return str(next(unfinished, wanted[-1].file))


def state_dict(value: Any, source: Path) -> dict[str, LazyTensor]:
    """Return the name -> tensor mapping of an opened file, at the top level or under a key that trainers use.

    Raises InputError if there is none, or more than one.
    """
    if isinstance(value, dict):
        if flat := _tensors(value):
            return flat
        found = [flat for key in _CONTAINERS if isinstance(value.get(key), dict) and (flat := _tensors(value[key]))]
        if len(found) == 1:
            return found[0]
    raise weights_error(source, "has no mapping of names to tensors", "give a file of model weights")


def _tensors(value: dict[str, Any]) -> dict[str, LazyTensor]:
    """Return a mapping's tensors if it has nothing else, otherwise {}. Empty entries, as of DeepSpeed, are ignored."""
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
