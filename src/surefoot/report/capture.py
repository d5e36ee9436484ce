"""Output of `surefoot capture`: tables of what each layer computed and how two captures differ, and heat maps.

A large matrix is drawn as the rms of its blocks, so that a single large channel stays visible at any width; a small one
as absolute values. The scale says which. Each panel has its own scale, from the 1st to the 99.5th percentile, because
one outlier, such as the first position, would turn the rest black. Values above the scale get the brightest color.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.report.tables.evaluation import four_digits, mean_of_known, number_table
from surefoot.system.messages import first_few

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


_MOST_LAYERS = 40  # rows of the table; index.json has all layers
_SHOWN = 3  # names in a warning
_NAME = 22  # characters of a name; so that the table fits 80 columns


def layer_table(index: Mapping[str, Any]) -> Table:
    """The residual stream into each layer and the attention on the first position."""
    entries = {(entry["layer"], entry["kind"]): entry["statistics"] for entry in index["tensors"]}
    rows = []
    for layer in index["layers"][:_MOST_LAYERS]:
        stream, maps = entries[layer, "residual_in"], entries.get((layer, "attention"))
        rest = stream["rest"]
        row = [str(layer), four_digits(stream["first"]["norm"]), four_digits(rest["norm"] if rest else None)]
        rows.append(row + ([four_digits(maps["first_mass"])] if maps else []))
    heads = ["layer", "norm into it, first position", "the rest"]
    return number_table([*heads, *(["attention on the first"] if index["attention"] else [])], rows)


def warning_lines(index: Mapping[str, Any]) -> list[str]:
    """Warnings about tensors with non-finite values."""
    lines = []
    for key, what in (
        ("non_finite", "hold values that are NaN or infinite"),
        ("overflown", f"have values beyond the largest {index['stored_as']} number, stored as infinite"),
    ):
        if names := index[key]:
            lines.append(f"NOT FINITE: {len(names)} tensors {what}: {first_few(names, _SHOWN)}")
    return lines


def difference_table(differences: Sequence[Any]) -> Table:
    """Relative differences from the reference capture by kind and role, over all layers."""
    groups: dict[str, list[Any]] = {}
    for one in differences:
        groups.setdefault(_group(one), []).append(one)
    rows = []
    for name, found in groups.items():
        worst = max(found, key=lambda one: one.relative or 0.0)
        rows.append(
            [
                _fitted(name),
                str(len(found)),
                str(sum(one.equal for one in found)),
                *(
                    four_digits(mean_of_known([getattr(one, key) for one in found]))
                    for key in ("relative", "first", "rest")
                ),
                _place_of(worst),
            ]
        )
    return number_table(
        ["tensor", "count", "equal", "|B-A|/|A|", "first position", "the rest", "largest"], rows, left=(0, 6)
    )


def _group(one: Any) -> str:
    """Role and kind; for a tensor without a role, such as a norm's, the module's own name."""
    if one.kind.startswith("residual"):
        return one.kind
    return f"{one.role or one.name.split('.')[-2]} {one.kind}"


def _fitted(name: str) -> str:
    """Shorten a name in the middle: norms of a layer differ at the start of their names, tensors of a module at the
    end."""
    if len(name) <= _NAME:
        return name
    kind = name.rpartition(" ")[2]
    tail = max(len(kind) + 5, _NAME // 3)
    return f"{name[: _NAME - 1 - tail]}…{name[-tail:]}"


def _place_of(worst: Any) -> str:
    """The largest difference and its layer."""
    if not worst.relative:
        return "–"
    return four_digits(worst.relative) + ("" if worst.layer is None else f" in layer {worst.layer}")


_COLUMNS = 4
_TICKS = 5  # most intervals of an axis: ticks are slow to draw, and a sheet has 48 axes
_COLORS = "viridis"  # perceptually uniform, readable with color blindness and in print


@dataclass(frozen=True)
class Panel:
    """One matrix of a sheet.

    values: [rows, columns], reduced to what is visible.
    size: (rows, columns) of the whole matrix.
    axes: labels of rows and columns.
    """

    title: str
    values: np.ndarray
    size: tuple[int, int]
    axes: tuple[str, str]


def layer_sheet(title: str, panels: Sequence[Panel]) -> Figure:
    """Draw all panels of one layer, four in a row."""
    from matplotlib.figure import Figure

    rows = -(-len(panels) // _COLUMNS)
    height = 3.3 * rows + 0.8
    figure = Figure(figsize=(4.1 * _COLUMNS, height), dpi=90)
    figure.suptitle(title, x=0.01, y=1 - 0.2 / height, va="top", ha="left", fontsize=13)
    # Set by hand, because matplotlib takes most of a second to lay out so many panels.
    figure.subplots_adjust(0.035, 0.5 / height, 1.0, 1 - 0.8 / height, wspace=0.18, hspace=0.35)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, _COLUMNS, place + 1)
        _draw(figure, axes, panel)
    return figure


def overview(title: str, norms: np.ndarray, layers: Sequence[str]) -> Figure:
    """Draw a heat map of the residual stream by layer and position.

    norms: [layers, positions], norms of the residual stream's vectors, on a log scale.
    layers: labels of the rows.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, min(12.0, 2.2 + 0.28 * len(layers))), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    positive = norms[np.isfinite(norms) & (norms > 0)]
    low, high = (positive.min(), positive.max()) if positive.size else (1.0, 10.0)
    shades = LogNorm(low, high if high > low else low * 10)
    edges = np.arange(norms.shape[1] + 1) + 1  # the first position reaches from 1 to 2
    rows = np.arange(norms.shape[0] + 1) - 0.5
    image = axes.pcolormesh(edges, rows, norms, cmap=_COLORS, norm=shades)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xscale("log", base=2)  # the first positions matter most, and of 1,024 each would be a pixel wide
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("position (1 is the first token), log scale")
    axes.set_ylabel("residual stream")
    every = -(-len(layers) // 24)
    axes.set_yticks(range(0, len(layers), every), [layers[row] for row in range(0, len(layers), every)])
    figure.colorbar(image, ax=axes, label="norm of the vector (log scale)", pad=0.01)
    return figure


def difference_sheet(title: str, names: Sequence[str], layers: Sequence[str], values: np.ndarray) -> Figure:
    """Draw relative differences. values: [names, layers]; NaN where there is none. Grey: equal, or no value."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    size = (min(16.0, 5.2 + 0.42 * len(layers)), min(24.0, 1.8 + 0.24 * len(names)))
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    axes = figure.add_subplot()
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = (positive.min(), positive.max()) if positive.size else (1e-6, 1.0)
    low = max(low, high * 1e-8)
    axes.set_facecolor("#dcdcdc")
    shades = LogNorm(low, high if high > low else low * 10)
    shown = np.where(values == 0, np.nan, np.maximum(values, low))
    image = axes.imshow(shown, aspect="auto", cmap=_COLORS, norm=shades, interpolation="nearest")
    axes.set_title(f"{title} (grey: none)", loc="left", fontsize=11)
    axes.set_xlabel("layer")
    axes.set_xticks(range(len(layers)), layers, rotation=0 if len(layers) <= 16 else 90)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    figure.colorbar(image, ax=axes, label="|B - A| / |A| (log scale)", pad=0.01)
    return figure


def _draw(figure: Figure, axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    finite = panel.values[np.isfinite(panel.values)]
    low, high = np.percentile(finite, (1, 99.5)) if finite.size else (0.0, 1.0)
    extent = (-0.5, panel.size[1] - 0.5, panel.size[0] - 0.5, -0.5)
    image = axes.imshow(
        panel.values,
        aspect="auto",
        cmap=_COLORS,
        vmin=low,
        vmax=high if high > low else low + 1.0,
        interpolation="nearest",
        extent=extent,
    )
    axes.set_title(
        panel.title, loc="left", fontsize=9, y=1.0
    )  # y: otherwise matplotlib measures every label to place it
    axes.set_ylabel(panel.axes[0], fontsize=8)
    axes.set_xlabel(panel.axes[1], fontsize=8)
    axes.tick_params(labelsize=7)
    bar = figure.colorbar(image, ax=axes, pad=0.01).ax
    bar.tick_params(labelsize=7)
    bar.set_title("|x|" if panel.values.shape == panel.size else "rms", fontsize=7, y=1.0)
    for axis in (axes.xaxis, axes.yaxis, bar.yaxis):
        axis.set_major_locator(MaxNLocator(_TICKS))
