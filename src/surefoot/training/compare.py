"""Compare two checkpoints bit by bit: weights, optimizer state and run state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from surefoot.models.convert.tensors import as_bytes
from surefoot.system.errors import IntegrityError
from surefoot.training.checkpoint import STATE
from surefoot.training.manifest import unreadable

TIMING = frozenset({"seconds", "beside", "trackers"})  # keys of state.json in which two equal runs differ


@dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints.

    where: file, and tensor or key.
    what: description of the difference.
    """

    where: str
    what: str


def compare_checkpoints(a: Path, b: Path) -> list[Difference]:
    """List all differences between two checkpoint folders; empty if they are bit-identical."""
    return compare_weights(a, b) + _compare_state(a / STATE, b / STATE)


def compare_weights(a: Path, b: Path) -> list[Difference]:
    """List the differences between the safetensors files of two folders. Reads one tensor at a time."""
    differences = []
    for name in sorted({path.name for folder in (a, b) for path in folder.glob("*.safetensors")}):
        if not ((a / name).is_file() and (b / name).is_file()):
            differences.append(Difference(name, f"only in {a if (a / name).is_file() else b}"))
        else:
            differences += _compare_tensors(name, a / name, b / name)
    return differences


def _compare_tensors(name: str, a: Path, b: Path) -> list[Difference]:
    differences = []
    with _opened(a) as first, _opened(b) as second:
        for key in sorted({*first.keys(), *second.keys()}):
            where = f"{name}: {key}"
            if (key in first.keys()) != (key in second.keys()):  # noqa: SIM118 (safe_open is no mapping)
                differences.append(Difference(where, f"only in {a if key in first.keys() else b}"))  # noqa: SIM118
            elif what := _tensor_difference(first.get_tensor(key), second.get_tensor(key)):
                differences.append(Difference(where, what))
    return differences


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:  # safe_open checks the header against the file size
        raise IntegrityError(unreadable(path, error, "surefoot verify names all such files")) from None


def _tensor_difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    # As bytes: equal NaNs are equal, and 0.0 is not -0.0.
    if torch.equal(as_bytes(a), as_bytes(b)):
        return None
    distance = (a.double() - b.double()).abs().max().item()
    return f"differs by at most {distance:.3g}"


def _compare_state(a: Path, b: Path) -> list[Difference]:
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in (a, b))
    return [
        Difference(f"{STATE}: {key}", f"{_show(first, key)} against {_show(second, key)}")
        for key in sorted({*first, *second} - TIMING)
        if first.get(key) != second.get(key)
    ]


def _show(data: Mapping[str, Any], key: str) -> str:
    return json.dumps(data.get(key))
