"""Compare two captures of the same token ids, tensor by tensor; and draw a capture's pictures.

relative = |B - A| / |A|, both in float64, A the reference. For activations also over the first position and over the
rest. One tensor of each capture is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from surefoot.evaluate.capture_folder import COMPARISON_PICTURE, Capture
from surefoot.evaluate.capture_tensors import relative_difference
from surefoot.report.capture import Panel, difference_sheet, layer_sheet, overview
from surefoot.report.pictures.plots import evenly, png
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError

ACTIVATIONS = ("residual_in", "residual_out", "input", "output")


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor from the reference's.

    relative, first, rest: None if undefined (see `relative_difference`); first and rest also for tensors without
        positions.
    abs_max: the largest difference of two values.
    equal: equal bit for bit, with the same dtype.
    """

    name: str
    layer: int | None
    kind: str
    role: str | None
    relative: float | None
    first: float | None
    rest: float | None
    abs_max: float
    equal: bool


@dataclass(frozen=True)
class CaptureComparison:
    """Two captures, compared tensor by tensor.

    reference, other: their folders.
    notes: differences other than values, one line each.
    """

    reference: str
    other: str
    differences: tuple[TensorDifference, ...]
    notes: tuple[str, ...]


def compare_captures(reference: Capture, other: Capture) -> CaptureComparison:
    """Compare. Raises InputError if impossible: other token ids, other shapes, or no layer in common."""
    check_comparable(reference, other)
    common = [name for name in reference.entries if name in other.entries]
    notes = tuple(_notes(reference, other, common))
    return CaptureComparison(
        reference.name, other.name, tuple(_difference(reference, other, name) for name in common), notes
    )


def check_comparable(reference: Capture, other: Capture) -> None:
    where = f"{reference.name} and {other.name}"
    first, second = (other, reference) if _has_one_more(other.ids, reference.ids) else (reference, other)
    again = f"capture the model of {second.name} again with --against {first.name}, which takes its ids"
    check_ids(reference, other.ids, other.name, again)
    common = [name for name in reference.entries if name in other.entries]
    if not common:
        a, b = (_numbers(one.layers) for one in (reference, other))
        what = f"have no tensor in common: layers {a} there, layers {b} here"
        raise InputError(Fault(where, what, "capture the same layers of models of one family", code="SF-EVALUATE"))
    shapes = [(name, *(one.entries[name]["shape"] for one in (reference, other))) for name in common]
    if different := [one for one in shapes if one[1] != one[2]]:
        name, a, b = different[0]
        what = f"{len(different)} tensors have different shapes, first {name}: {a} there, {b} here"
        raise InputError(Fault(where, what, "compare models of the same size", code="SF-EVALUATE"))


def check_ids(reference: Capture, ids: list[int], name: str, fix: str) -> None:
    """Raises InputError with the advice `fix` unless the capture used these token ids."""
    if reference.ids != ids:
        what = f"used other token ids than {name}: {_different_ids(reference.ids, ids)}"
        raise InputError(Fault(reference.name, what, fix, code="SF-EVALUATE"))


def _different_ids(there: list[int], here: list[int]) -> str:
    shorter = min(len(there), len(here))
    if there[:shorter] == here[:shorter]:
        return f"{len(there)} tokens there, and {len(here)} here"
    for one, other, place in ((there, here, "there"), (here, there, "here")):
        if _has_one_more(one, other):
            return f"only {place} the text begins with token {one[0]}, perhaps BOS; the rest is equal, shifted by one"
    at = next(place for place, (a, b) in enumerate(zip(there, here, strict=False)) if a != b)
    return f"{len(there)} tokens there, {len(here)} here, and the first difference is at position {at}"


def _has_one_more(ids: list[int], others: list[int]) -> bool:
    """Whether `ids` are the others after one more token, as with BOS."""
    shorter = min(len(ids), len(others))
    return shorter > 1 and ids != others and ids[1:shorter] == others[: shorter - 1]


def _difference(reference: Capture, other: Capture, name: str) -> TensorDifference:
    entry = reference.entries[name]
    old, new = reference.tensor(name), other.tensor(name)
    by_position = entry["kind"] in ACTIVATIONS and len(old) > 1
    return TensorDifference(
        name=name,
        layer=entry["layer"],
        kind=entry["kind"],
        role=entry["role"],
        relative=relative_difference(new, old),
        first=relative_difference(new[:1], old[:1]) if by_position else None,
        rest=relative_difference(new[1:], old[1:]) if by_position else None,
        abs_max=float((new.float() - old.float()).abs().max()) if old.numel() else 0.0,
        equal=new.dtype == old.dtype and torch.equal(new, old),
    )


def _notes(reference: Capture, other: Capture, common: list[str]) -> Iterator[str]:
    alone = [sorted({*one.layers} - {*two.layers}) for one, two in ((reference, other), (other, reference))]
    for one, layers in zip((reference, other), alone, strict=True):
        if layers:
            yield f"layers {_numbers(layers)} are only in {one.name} and not compared"
    in_both = {*reference.layers} & {*other.layers} | {None}
    lonely = {
        one.name: [name for name, entry in one.entries.items() if name not in two.entries and entry["layer"] in in_both]
        for one, two in ((reference, other), (other, reference))
    }
    for where, names in lonely.items():
        if names:
            yield f"{len(names)} tensors are only in {where} and not compared, first {names[0]}"
    dtypes = [(name, *(one.entries[name]["dtype"] for one in (reference, other))) for name in common]
    if different := [one for one in dtypes if one[1] != one[2]]:
        name, a, b = different[0]
        what = f"{len(different)} tensors are stored in different dtypes, first {name}: {a} and {b}"
        yield f"{what}; rounding counts as a difference"


def _numbers(layers: list[int]) -> str:
    """Format as 0-3, 7."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"


_SHEETS = 6  # layers with a sheet, spread over the model
_PANELS = 16  # panels per sheet
_CELLS = 160  # rows and columns of a panel
_NAME = 24  # characters of a folder's name in a title
_ROWS, _COLUMNS = 60, 64  # of a comparison's picture


class CapturePictures:
    """Draws into `folder` during a capture. names: the files so far."""

    def __init__(self, folder: Path, title: str, layers: Sequence[int]):
        self.names: list[str] = []
        self._folder, self._title = folder, title
        self._sheets = {*evenly(layers, _SHEETS)}
        self._norms: list[np.ndarray] = []
        self._labels: list[str] = []
        self._last = layers[-1] if layers else None

    def layer_finished(self, layer: int | None, tensors: Mapping[str, torch.Tensor]) -> None:
        if layer is None:
            return
        for kind, label in (("residual_in", "into"), *((("residual_out", "out of"),) if layer == self._last else ())):
            found = next(tensor for name, tensor in tensors.items() if name.endswith(kind))
            self._norms.append(found.float().norm(dim=-1).numpy())
            self._labels.append(f"{label} {layer}")
        if layer in self._sheets:
            panels = [_panel(name, tensors[name]) for name in _worth_a_panel(tensors)[:_PANELS]]
            self._write(f"layer-{layer:05d}.png", png(layer_sheet(f"{self._title}: layer {layer}", panels)))

    def draw_overview(self) -> None:
        if self._norms:
            figure = overview(f"{self._title}: norm by position", np.stack(self._norms), self._labels)
            self._write("norms.png", png(figure))

    def _write(self, name: str, picture: bytes) -> None:
        durable.write_bytes(self._folder / name, picture)
        self.names.append(name)


def draw_comparison(folder: Path, found: CaptureComparison) -> list[str]:
    """Draw one row per tensor name within a layer, one column per layer; returns the file's name."""
    layers = sorted({one.layer for one in found.differences if one.layer is not None})
    layers = evenly(layers, _COLUMNS)
    rows: dict[str, dict[int, float]] = {}
    for one in found.differences:
        if one.layer in layers:
            value = np.nan if one.relative is None else one.relative
            rows.setdefault(_within_layer(one.name), {})[one.layer] = value
    names = list(rows)[:_ROWS]
    if not names:
        return []
    values = np.array([[rows[name].get(layer, np.nan) for layer in layers] for name in names])
    title = f"A {Path(found.reference).name[:_NAME]}, B {Path(found.other).name[:_NAME]}: relative difference"
    figure = difference_sheet(title, names, [str(layer) for layer in layers], values)
    durable.write_bytes(folder / COMPARISON_PICTURE, png(figure))
    return [COMPARISON_PICTURE]


def _within_layer(name: str) -> str:
    """The part of a full name after the layer's number."""
    parts = name.split(".")
    number = next(place for place, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[number + 1 :])


def _worth_a_panel(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names, most informative first: attention, residual stream, matrices, their outputs, norms' outputs. For fused
    modules only the parts."""
    order = ("attention", "residual_out", "weight", "output", "residual_in", "input")

    def rank(name: str) -> tuple[int, bool]:
        module, _, ending = name.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        return order.index(ending), weight is not None and weight.ndim == 1

    split = {name.rpartition(".")[0].rpartition(".")[0] + "." + name.rpartition(".")[2] for name in tensors}
    return sorted((name for name, one in tensors.items() if one.ndim > 1 and name not in split), key=rank)


def _panel(name: str, tensor: torch.Tensor) -> Panel:
    title = _within_layer(name)
    if tensor.ndim == 3:
        values, axes = tensor.float().mean(dim=0), ("query", "key, mean of heads")
    else:
        values, axes = tensor, ("row", "column") if name.endswith("weight") else ("position", "channel")
    return Panel(title, block_rms(values), (values.shape[0], values.shape[1]), axes)


def block_rms(matrix: torch.Tensor) -> np.ndarray:
    """Reduce [rows, columns] to at most `_CELLS` x `_CELLS` blocks, each the root of its mean square."""
    size = min(matrix.shape[0], _CELLS), min(matrix.shape[1], _CELLS)
    squares = matrix.float().square()[None, None]
    return torch.nn.functional.adaptive_avg_pool2d(squares, size)[0, 0].sqrt().numpy()
