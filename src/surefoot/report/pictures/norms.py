"""Pictures and tables of `surefoot evaluate norms`, drawn from norms.json.

results: by side ("base" and "adapter", or "model"), as written by `surefoot.evaluate.norms.results_to_json`. Each side
has its own color in all pictures; the first position has a solid line, the rest a dashed one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.report.pictures.plots import evenly, finish_axes
from surefoot.report.tables.evaluation import four_digits, mean_of_known, number_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Results = Mapping[str, Mapping[str, Any]]

# Okabe and Ito's palette, as in `plots`.
_COLORS = {"base": "#0072B2", "model": "#0072B2", "adapter": "#D55E00"}
_MARKED_UP_TO = 48  # layers or positions; more would run together
_LINES = 5  # layers in the picture by position
_MOST_LAYERS = 40  # rows of the table; norms.json has all layers


def position_picture(results: Results) -> Figure:
    """Norm of the residual stream by position, for some layers; one panel per side, with a common scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2 * len(results), 4.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (side, report) in zip(panels, results.items(), strict=True):
        rows = report["norm_by_position"]
        shown = evenly(range(len(rows)), _LINES)
        for place, row in enumerate(shown):
            label = "out of the last layer" if row == len(rows) - 1 else f"into layer {row}"
            shade = _viridis(place / max(1, len(shown) - 1))
            marker = "o" if len(rows[row]) <= _MARKED_UP_TO else None
            places = range(1, len(rows[row]) + 1)
            axes.plot(places, rows[row], color=shade, label=label, marker=marker, ms=3, linewidth=1.4)
        finish_axes(axes, f"{side}: residual stream", "position (1 is the first token)", "norm of the vector")
        axes.set_xscale("log", base=2)  # the first positions matter most
        axes.xaxis.set_major_formatter("{x:.0f}")
    every = [value for report in results.values() for row in report["norm_by_position"] for value in row]
    panels[0].set_yscale(**_scale(every))
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    return figure


def layer_picture(results: Results) -> Figure:
    """Norm of the residual stream into each layer, first position compared with the rest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    values: list[float] = []
    for side, report in results.items():
        for key, style, marker, what in (
            ("first_norm", "-", "o", "first position"),
            ("rest_norm", "--", "s", "the rest"),
        ):
            points = [(one["layer"], one["residual_in"][key]) for one in report["layers"]]
            values += _plot(axes, points, f"{side}: {what}", side, style, marker)
    finish_axes(axes, "Residual stream into each layer", "layer", "norm of the vector, mean")
    axes.set_yscale(**_scale(values))
    _whole_numbers(axes)
    axes.legend(frameon=False, fontsize=9)
    return figure


def attention_picture(results: Results) -> Figure:
    """Attention on the first position, by layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    values: list[float] = []
    for side, report in results.items():
        points = [(one["layer"], one["attention"]) for one in report["layers"]]
        values += _plot(axes, points, side, side, "-", "o")
    finish_axes(axes, "Attention on the first position", "layer", "share, mean of heads and queries")
    # From 0, so that heights compare, and no higher than needed, so that small shares stay apart.
    axes.set_ylim(0, min(1.0, 1.25 * max(values, default=1.0)) or 1.0)
    _whole_numbers(axes)
    axes.legend(frameon=False, fontsize=9)
    return figure


def layer_table(results: Results) -> Table:
    """One row per layer: the stream's norm (first position, rest) and the attention on the first position, by side."""
    heads = ["layer"]
    for side in results:
        heads += [f"{side}: norm, first", "rest", "attention on first"]
    rows = []
    for number, _ in enumerate(next(iter(results.values()))["layers"][:_MOST_LAYERS]):
        row = [str(number)]
        for report in results.values():
            layer = report["layers"][number]
            row += [four_digits(layer["residual_in"][key]) for key in ("first_norm", "rest_norm")]
            row.append(four_digits(layer["attention"]))
        rows.append(row)
    return number_table(heads, rows)


def norm_table(results: Results) -> Table:
    """One row per kind of norm, averaged over the layers: its weight, and the rms of its input and output."""
    heads = ["norm (mean of layers)", "of", "weight, mean", "rms in, first", "rest", "rms out, first", "rest"]
    kinds: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for side, report in results.items():
        for norm in report["norms"]:
            kinds.setdefault(_within_layer(norm), {}).setdefault(side, []).append(norm)
    rows = []
    for kind, sides in kinds.items():
        for side, found in sides.items():
            weights = [one["weight"]["mean"] for one in found if one["weight"]]
            parts = [[one[part][key] for one in found] for part in ("input", "output") for key in _RMS]
            rows.append(
                [
                    kind,
                    side,
                    four_digits(mean_of_known(weights)),
                    *(four_digits(mean_of_known(values)) for values in parts),
                ]
            )
    return number_table(heads, rows)


_RMS = ("first_rms", "rest_rms")


def _within_layer(norm: Mapping[str, Any]) -> str:
    if norm["layer"] is None:
        return norm["name"]
    return norm["name"].partition(f".{norm['layer']}.")[2]


def _plot(axes: Any, points: Sequence[tuple[int, Any]], label: str, side: str, style: str, marker: str) -> list[float]:
    known = [(x, y) for x, y in points if y is not None]
    if known:
        shown = marker if len(known) <= _MARKED_UP_TO else None
        axes.plot(*zip(*known, strict=True), style, color=_COLORS[side], label=label, marker=shown, ms=4, linewidth=1.6)
    return [y for _, y in known]


def _whole_numbers(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _viridis(share: float) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 * share)  # the last tenth is too bright on white


def _scale(values: Sequence[float]) -> dict[str, Any]:
    """Log scale, with room for a zero, such as a first token scaled to nothing."""
    positive = [value for value in values if value > 0]
    if len(positive) == len(values) or not positive:
        return {"value": "log" if positive else "linear"}
    return {"value": "symlog", "linthresh": min(positive)}
