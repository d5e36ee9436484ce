"""The curves of a run as PNG files: `training_loss.png`, `training_eval_loss.png`, `training_eval_accuracy.png`; in
stages ppo and grpo `training_reward.png`, of drawn answers with those of the evaluations, and no evaluation loss.

File names are those of LLaMA-Factory. matplotlib is used without pyplot, so that no global state changes, and imported
only when something is drawn. A picture that cannot be drawn is a caution and never ends a run.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from surefoot.families.files import read_json
from surefoot.report.trainer_log import Row, metric_fields, unit_of
from surefoot.system import durable
from surefoot.system.process import held_interruptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
# Okabe and Ito's palette: readable with every kind of color vision, and by lightness in print.
_BLUE, _SKY, _ORANGE, _RED = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
SMOOTH_FROM = 5  # points of a training loss or reward, noisy as each is another batch; fewer are not smoothed
_SMOOTH_OTHERS_FROM = 30  # points of a quantity measured repeatedly on the same data
_SPAN = 1 / 50  # mean distance of the smoothing weights, as a share of the curve
_LEAST_SPAN = 1.0  # least mean distance in points, so that a short curve is smoothed too
_LEAST_NEW = 0.1  # least weight of the point itself, so that a long curve keeps its bends
_MARKED_UP_TO = 60  # points; more would run together


@dataclass(frozen=True)
class Quantity:
    """A column of trainer_log.jsonl that is plotted. factor: multiplies the values to get the shown unit."""

    key: str
    label: str
    factor: float = 1.0


EVAL_LOSS = Quantity("eval_loss", "evaluation loss (nats per token)")
REWARD, EVAL_REWARD = Quantity("reward", "mean reward of drawn answers"), Quantity("eval_reward", "reward")
QUANTITIES = (
    Quantity("loss", "training loss (nats per token)"),
    EVAL_LOSS,
    Quantity("eval_accuracy", "evaluation accuracy (% of tokens)", 100.0),
)


@dataclass(frozen=True)
class Curve:
    """Finite values by step; gaps: steps that were skipped or not finite."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    gaps: tuple[int, ...]


def loss_unit(rows: Sequence[Row]) -> str:
    """The unit of the losses in these rows: nats per token for a cross entropy."""
    unit = unit_of(rows)
    return "nats per token" if unit == "tokens" else f"mean over {unit.replace('_', ' ')}"


def evaluates_rewards(rows: Sequence[Row]) -> bool:
    """Whether the evaluation loss is minus the mean reward, as in stage ppo, and not comparable with the training
    loss."""
    return unit_of(rows) == "response_tokens"


def in_unit(quantity: Quantity, rows: Sequence[Row]) -> Quantity:
    """The quantity with the unit of these rows."""
    of_rewards = quantity.key == EVAL_LOSS.key and evaluates_rewards(rows)
    unit = "minus the mean reward" if of_rewards else loss_unit(rows)
    return replace(quantity, label=quantity.label.replace("nats per token", unit))


def draw_curves(run: Path, rows: Sequence[Row], name: str) -> tuple[list[str], list[str]]:
    """Draw the curves. name: the run's name, for the titles. Returns the names of the files, and cautions."""
    written: list[str] = []
    cautions: list[str] = []
    beside = {REWARD.key: curve_of(rows, EVAL_REWARD)}
    if not evaluates_rewards(rows):
        beside["loss"] = curve_of(rows, EVAL_LOSS)
    for quantity in (REWARD, *QUANTITIES, *metric_quantities(rows)):
        curve = curve_of(rows, quantity)
        if len(curve.values) < 2 or (
            quantity == EVAL_LOSS and evaluates_rewards(rows)
        ):  # the evaluation reward upside down
            continue
        path = run / f"training_{quantity.key}.png"
        try:
            with held_interruptions():
                picture = png(draw(curve, in_unit(quantity, rows), name, beside.get(quantity.key)))
            durable.write_bytes(path, picture)
            written.append(path.name)
        except Exception as error:  # fonts, back ends, disk: a failed picture must not lose the model
            cautions.append(f"{path.name} was not drawn: {type(error).__name__}: {error}")
    return written, cautions


def draw_history(run: Path, keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """Draw `training_<key>.png` for columns of the run's trainer_state.json, named as by other tools' plotting
    functions. Returns the names of the files, and the keys with fewer than two points.

    Raises InputError if the run has no such file.
    """
    history = read_json(run / "trainer_state.json").get("log_history", [])
    known = {quantity.key: quantity for quantity in QUANTITIES}
    written: list[str] = []
    for key in keys:
        rows = [{**row, "current_steps": row["step"]} for row in history if key in row]
        quantity = known.get(key, Quantity(key, key.replace("_", " ")))
        curve = curve_of(rows, quantity)
        if len(curve.values) >= 2:
            path = run / f"training_{key.replace('/', '_')}.png"
            durable.write_bytes(path, png(draw(curve, quantity, run.name)))
            written.append(path.name)
    return written, [key for key in keys if f"training_{key.replace('/', '_')}.png" not in written]


def metric_quantities(rows: Sequence[Row]) -> list[Quantity]:
    """One quantity per evaluation metric, in order of appearance."""
    keys = dict.fromkeys(key for row in rows for key in metric_fields(row))
    return [Quantity(key, key.removeprefix("eval_").replace("_", " ")) for key in keys]


def curve_of(rows: Sequence[Row], quantity: Quantity) -> Curve:
    points = [row for row in rows if quantity.key in row]
    good = [row for row in points if row[quantity.key] is not None]
    gaps = [row["current_steps"] for row in points if row[quantity.key] is None or "skipped" in row]
    return Curve(
        tuple(row["current_steps"] for row in good),
        tuple(row[quantity.key] * quantity.factor for row in good),
        tuple(gaps),
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Smooth with weights w ** distance to both sides. Past and future count equally, so that the line does not lag
    behind a falling loss; weights are normalized over the existing values, so that the first value is not overweighted.
    w is such that the mean distance to one side is `_SPAN` of the curve, and at least `_LEAST_SPAN` points."""
    side = max(_SPAN * len(values), _LEAST_SPAN)
    weight = min(side / (1 + side), 1 - _LEAST_NEW)
    before, after = _decayed(values, weight), _decayed(values[::-1], weight)[::-1]
    return [
        (past + future - value) / (past_weight + future_weight - 1)
        for value, (past, past_weight), (future, future_weight) in zip(values, before, after, strict=True)
    ]


def _decayed(values: Sequence[float], weight: float) -> list[tuple[float, float]]:
    """For each place the decayed sum of the values up to it, and the sum of their weights."""
    total, weights = 0.0, 0.0
    found = []
    for value in values:
        total, weights = weight * total + value, weight * weights + 1
        found.append((total, weights))
    return found


def draw(curve: Curve, quantity: Quantity, name: str, evaluation: Curve | None = None) -> Figure:
    """Draw a curve. evaluation: a second curve in the same unit, drawn as points."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    _plot_values(axes, curve, SMOOTH_FROM if quantity.key in ("loss", REWARD.key) else _SMOOTH_OTHERS_FROM)
    if evaluation is not None and evaluation.values:
        axes.plot(
            evaluation.steps, evaluation.values, "D", color=_ORANGE, mec="black", mew=0.6, ms=6, label="evaluation"
        )
    if curve.gaps:
        on_floor = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(curve.gaps, [0.0] * len(curve.gaps), "X", color=_RED, ms=7, label="skipped or not finite", **on_floor)
    finish_axes(axes, f"{name}: {quantity.label.partition(' (')[0]}", "optimizer step", quantity.label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
    return figure


def finish_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Set title, labels and a light grid, and remove the top and right frame."""
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def evenly(items: Sequence[T], most: int) -> list[T]:
    """At most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def png(figure: Figure) -> bytes:
    """Render as PNG; equal figures give equal bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    with held_interruptions():
        FigureCanvasAgg(figure).print_png(out, metadata={"Software": "surefoot"})  # no version: equal runs, equal bytes
    return out.getvalue()


def _plot_values(axes: Axes, curve: Curve, smooth_from: int) -> None:
    """smooth_from: number of points from which a smoothed line is added."""
    marker = "o" if len(curve.values) <= _MARKED_UP_TO else None
    if len(curve.values) < smooth_from:
        axes.plot(curve.steps, curve.values, color=_BLUE, linewidth=1.8, marker=marker, ms=4, label="measured")
        return
    axes.plot(curve.steps, curve.values, color=_SKY, alpha=0.7, linewidth=1.0, marker=marker, ms=3, label="measured")
    axes.plot(curve.steps, smooth(curve.values), color=_BLUE, linewidth=2.0, label="smoothed")
