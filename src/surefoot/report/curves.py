"""Turn rows of the training log into curves, for the report and for the live page.

A non-finite value is None, a gap in its line, and its step is listed so that it can be marked; it is never drawn as
zero. Long lines are thinned: of each stretch of steps only the lowest and the highest value are kept, so that no spike
is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.report.pictures.plots import (
    EVAL_REWARD,
    REWARD,
    SMOOTH_FROM,
    Quantity,
    evaluates_rewards,
    loss_unit,
    metric_quantities,
    smooth,
)
from surefoot.report.trainer_log import Row, is_train_row, step_metrics
from surefoot.system.messages import GIB

Point = tuple[int, float | None]  # optimizer step, value
Style = Literal["line", "raw", "smooth", "points"]
MOST_POINTS = 2000  # per line; a screen has fewer columns
_FEWEST = 3  # points of a line that may be called still
_DIGITS = 6  # significant digits of a value in the page


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    style: how it is drawn.
    points: in order of steps; None is a gap.
    """

    name: str
    style: Style
    points: tuple[Point, ...]

    @property
    def gaps(self) -> list[int]:
        return [step for step, value in self.points if value is None]


@dataclass(frozen=True)
class Chart:
    """Lines that share a unit. x: name of the horizontal axis, one word."""

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    x: str = "step"


@dataclass(frozen=True)
class _Recipe:
    key: str
    title: str
    unit: str
    lines: tuple[tuple[Quantity, Style], ...]


_RECIPES = (
    _Recipe(
        "loss",
        "Loss",
        "nats per token",
        ((Quantity("loss", "training"), "raw"), (Quantity("eval_loss", "evaluation"), "points")),
    ),
    _Recipe(
        "accuracy",
        "Evaluation accuracy",
        "% of tokens",
        ((Quantity("eval_accuracy", "evaluation", 100.0), "points"),),
    ),
)
_LATER = (
    _Recipe("lr", "Learning rate", "", ((Quantity("lr", "learning rate"), "line"),)),
    _Recipe("grad_norm", "Gradient norm", "before clipping", ((Quantity("grad_norm", "gradient norm"), "raw"),)),
    _Recipe(
        "throughput",
        "Throughput",
        "tokens per second",
        ((Quantity("throughput", "all"), "line"), (Quantity("supervised_throughput", "supervised"), "line")),
    ),
    _Recipe("memory", "Peak memory", "GiB", ((Quantity("peak_memory", "peak", 1 / GIB), "line"),)),
)


def charts_of(rows: Sequence[Row]) -> list[Chart]:
    """All charts for which the rows hold at least one point, not thinned. The first is what the run is about."""
    first = [replace(recipe, unit=recipe.unit.replace("nats per token", loss_unit(rows))) for recipe in _RECIPES]
    metrics = _metrics(rows)
    if evaluates_rewards(rows):  # in the chart of the reward, which leads: the loss is near 0 whatever is learned
        first[0] = replace(first[0], lines=first[0].lines[:1])
        lead = [recipe for recipe in metrics if recipe.key in (REWARD.key, EVAL_REWARD.key)]
        first, metrics = [*lead, *first], [recipe for recipe in metrics if recipe not in lead]
    charts = [_chart(recipe, rows) for recipe in (*first, *metrics, *_LATER)]
    return [chart for chart in charts if chart.lines]


def _metrics(rows: Sequence[Row]) -> list[_Recipe]:
    """One chart per evaluation metric, together with the training metric of that name, and one per remaining training
    metric."""
    own = dict.fromkeys(key for row in rows if is_train_row(row) for key in step_metrics(row))
    found: list[_Recipe] = []
    for quantity in metric_quantities(rows):
        name = quantity.key.removeprefix("eval_")
        title = quantity.label.capitalize()
        if name in own:
            del own[name]
            both: tuple[tuple[Quantity, Style], ...] = (
                (Quantity(name, "training"), "raw"),
                (replace(quantity, label="evaluation"), "points"),
            )
            found.append(_Recipe(quantity.key, title, "", both))
        else:
            found.append(_Recipe(quantity.key, title, "", ((quantity, "points"),)))
    for name in own:
        label = name.replace("_", " ")
        found.append(_Recipe(name, label.capitalize(), "", ((Quantity(name, label), "raw"),)))
    return found


def without_still(charts: Sequence[Chart]) -> tuple[list[Chart], list[str]]:
    """Return the charts in which something changes, and the others as "title value unit".

    A line of fewer than `_FEWEST` points says nothing of change, and the first is always a chart.
    """
    changing: list[Chart] = []
    still: list[str] = []
    for chart in charts:
        values = {value for line in chart.lines for _, value in line.points}
        longest = max(len(line.points) for line in chart.lines)
        if len(values) > 1 or None in values or longest < _FEWEST or chart == charts[0]:
            changing.append(chart)
        else:
            still.append(f"{chart.title} {values.pop():.4g} {chart.unit}".strip())
    return changing, still


def thinned(charts: Sequence[Chart]) -> list[Chart]:
    """The same charts with at most `MOST_POINTS` points per line."""
    return [
        replace(chart, lines=tuple(replace(line, points=thin(line.points, MOST_POINTS)) for line in chart.lines))
        for chart in charts
    ]


def thin(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """Keep at most `most` points: of each stretch the lowest, the highest and one gap, in order."""
    if len(points) <= most:
        return tuple(points)
    stretches = most // 3
    kept: list[Point] = []
    for k in range(stretches):
        stretch = points[k * len(points) // stretches : (k + 1) * len(points) // stretches]
        kept += _extremes(stretch)
    return tuple(kept)


def to_json(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Charts for the page's script: steps and values as two lists, values rounded to visible digits."""
    return [
        {
            "key": chart.key,
            "title": chart.title,
            "unit": chart.unit,
            "x": chart.x,
            "label": described(chart),
            "lines": [
                {
                    "name": line.name,
                    "style": line.style,
                    "x": [step for step, _ in line.points],
                    "y": [None if value is None else float(f"{value:.{_DIGITS}g}") for _, value in line.points],
                }
                for line in chart.lines
            ],
        }
        for chart in charts
    ]


def described(chart: Chart) -> str:
    """Describe a chart in words."""
    unit = f" ({chart.unit})" if chart.unit else ""
    over = "optimizer step" if chart.x == "step" else chart.x
    return f"{chart.title}{unit} by {over}. {' '.join(_line_in_words(line, chart.x) for line in chart.lines)}"


def number(value: object) -> float | None:
    """Return a finite number, or None for anything else in a row."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _chart(recipe: _Recipe, rows: Sequence[Row]) -> Chart:
    lines: list[Line] = []
    for quantity, style in recipe.lines:
        points = _points(rows, quantity)
        if not points:
            continue
        rough = style == "raw" and len(points) >= SMOOTH_FROM
        lines.append(Line(quantity.label, style if rough or style != "raw" else "line", points))
        if rough:
            lines.append(Line(f"{quantity.label}, smoothed", "smooth", _smoothed(points)))
    return Chart(recipe.key, recipe.title, recipe.unit, tuple(lines))


def _points(rows: Sequence[Row], quantity: Quantity) -> tuple[Point, ...]:
    found = ((row["current_steps"], number(row[quantity.key])) for row in rows if quantity.key in row)
    return tuple((step, None if value is None else value * quantity.factor) for step, value in found)


def _smoothed(points: Sequence[Point]) -> tuple[Point, ...]:
    values = iter(smooth([value for _, value in points if value is not None]))
    return tuple((step, None if value is None else next(values)) for step, value in points)


def _extremes(stretch: Sequence[Point]) -> list[Point]:
    finite = [(value, place) for place, (_, value) in enumerate(stretch) if value is not None]
    gap = next((place for place, (_, value) in enumerate(stretch) if value is None), None)
    places = {place for _, place in (min(finite), max(finite))} if finite else set()
    return [stretch[place] for place in sorted(places if gap is None else places | {gap})]


def _line_in_words(line: Line, x: str) -> str:
    finite = [(value, step) for step, value in line.points if value is not None]
    missing = f"; {len(line.gaps)} not finite" if line.gaps else ""
    if not finite:
        return f"{line.name}: no finite value{missing}."
    (first, at), (last, end) = finite[0], finite[-1]
    low, high = min(finite), max(finite)
    return (
        f"{line.name}: {first:.4g} at {x} {at}, {last:.4g} at {x} {end}, "
        f"lowest {low[0]:.4g} at {low[1]}, highest {high[0]:.4g} at {high[1]}{missing}."
    )
