"""Save batches as tensors and JSON values, and restore them bit for bit.

    tensors, layout = batches_to_file(batches)      # tensors for safetensors, layout for JSON
    batches = batches_from_file(tensors, layout)

Only surefoot's own batch classes are written and read, so reading a file cannot run code that the file names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from surefoot.data.batching.batch import Batch, DrawnBatch, JudgedBatch, PairBatch, PromptBatch, Weighted, as_read
from surefoot.data.batching.groups import GroupBatch
from surefoot.data.batching.rollouts import PpoBatch

_KINDS = {
    kind.__name__: kind for kind in (Batch, DrawnBatch, PairBatch, JudgedBatch, PromptBatch, PpoBatch, GroupBatch)
}


def batches_to_file(batches: Sequence[Weighted]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Convert batches to tensors and a JSON layout. Raises TypeError for another type of batch."""
    tensors: dict[str, torch.Tensor] = {}
    return tensors, [_plain(batch, f"{number}", tensors) for number, batch in enumerate(batches)]


def batches_from_file(tensors: Mapping[str, torch.Tensor], layout: Sequence[Any]) -> list[Weighted]:
    """Restore the batches. Raises KeyError, TypeError or ValueError if `batches_to_file` did not write the input."""
    return [_made(one, tensors) for one in layout]


def _plain(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors forbids shared memory
        return {"tensor": name}
    if is_dataclass(value) and type(value).__name__ in _KINDS:
        names = ["pixels" if one.name == "pictures" else one.name for one in fields(value)]
        parts = {one: _plain(getattr(value, one), f"{name}.{one}", tensors) for one in names}
        return {"kind": type(value).__name__, "fields": parts}
    if isinstance(value, tuple):
        return [_plain(one, f"{name}.{number}", tensors) for number, one in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # JSON has no such number
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a batch with a {type(value).__name__} cannot be saved")


def _made(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return tuple(_made(one, tensors) for one in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "float" in value:
        return float(value["float"])
    parts = {name: _made(one, tensors) for name, one in value["fields"].items()}
    if "pixels" in parts:
        parts["pictures"] = as_read(parts.pop("pixels"))
    return _KINDS[value["kind"]](**parts)
