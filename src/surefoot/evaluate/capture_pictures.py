"""Which pictures a capture gets: a sheet for some of its layers, one of the residual stream, one of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from surefoot.evaluate.capture_comparison import CaptureComparison
from surefoot.evaluate.capture_folder import COMPARISON_PICTURE
from surefoot.report.capture import Panel, difference_sheet, layer_sheet, overview
from surefoot.report.pictures.plots import png
from surefoot.system import durable

_SHEETS = 6  # layers with a sheet of their own, spread over the model
_PANELS = 16  # of a sheet
_CELLS = 160  # rows and columns of a panel
_NAME = 24  # characters of a folder's name in a title
_ROWS, _COLUMNS = 60, 64  # of the picture of a comparison


class CapturePictures:
    """Draws into `folder` while a capture runs. names: the files so far."""

    def __init__(self, folder: Path, title: str, layers: Sequence[int]):
        self.names: list[str] = []
        self._folder, self._title = folder, title
        self._sheets = {*_spread(layers, _SHEETS)}
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
    """One row per tensor name within a layer, one column per layer; returns the file's name."""
    layers = sorted({one.layer for one in found.differences if one.layer is not None})
    layers = _spread(layers, _COLUMNS)
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


def _spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, evenly, the first and the last among them."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _within_layer(name: str) -> str:
    """What follows the layer's number in a full name."""
    parts = name.split(".")
    number = next(place for place, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[number + 1 :])


def _worth_a_panel(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names, the most telling first: attention, the stream, matrices, what they give, what norms give. Of what is fused
    the parts alone."""
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


def block_rms(matrix: torch.Tensor, cells: int = _CELLS) -> np.ndarray:
    """[rows, columns] as at most cells x cells blocks, each the root of its mean square."""
    size = min(matrix.shape[0], cells), min(matrix.shape[1], cells)
    squares = matrix.float().square()[None, None]
    return torch.nn.functional.adaptive_avg_pool2d(squares, size)[0, 0].sqrt().numpy()
