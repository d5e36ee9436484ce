"""Two or more runs side by side, as `surefoot compare` shows them: tables, JSON, a picture, a self-contained page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.config.keys import as_yaml
from surefoot.planning.plan import Difference
from surefoot.report.curves import Chart, thinned, to_json
from surefoot.report.html import render
from surefoot.report.pictures.plots import evenly
from surefoot.report.trainer_log import Row, is_eval_row, without_timing
from surefoot.report.views import Table
from surefoot.report.wording import duration_text, number
from surefoot.system.messages import counted, size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


_RANK = re.compile(r"rank (\d+)\.(.+)")
_FAST = re.compile(r"rank \d+\.fast_paths(\..+)?")
_OF_A_RANK = {
    "parameters": "parameters held",
    "gradients": "gradients held",
    "optimizer": "parameters with moments",
    "of": "parameters of the model",
    "of_trainable": "parameters that train",
}
# The measured error of a fast path before step 1 and its limit. Each run measures other rows, with the limits of its
# precision, so these are no difference between two runs.
_MEASURED = re.compile(r"rank \d+\.fast_paths\..+\.(differs|limits|together)(\..+)?")
_OF_A_PLAN = {"memory.holes": "memory.fragmentation", "memory.apart": "memory.overlap"}  # as the plan prints them


def spoken(part: str, differences: Sequence[Difference]) -> list[tuple[str, Difference]]:
    """Return the differences to show, each with its displayed name. part: config, plan, environment or data."""
    if part == "plan":
        # The environment has its own table.
        return [
            (_OF_A_PLAN.get(one.path, one.path.removesuffix(".value")), one)
            for one in differences
            if one.path != "environment"
        ]
    if part != "environment":
        return [(one.path, one) for one in differences]
    shown = [_as_used(one) for one in differences if not _MEASURED.fullmatch(one.path)]
    several = any(one.path.startswith("rank ") and not one.path.startswith("rank 0") for one in shown)
    return [(_of_environment(one.path, several), one) for one in shown]


def _as_used(one: Difference) -> Difference:
    """Of fast paths that only one of the runs has, whether they were used; what was measured of them is of that run."""
    if not _FAST.fullmatch(one.path):
        return one
    return Difference(one.path, *map(_used, (one.old, one.new)))


def _used(record: Any) -> Any:
    if not isinstance(record, dict):
        return record
    if "used" in record:
        return "used" if record["used"] else "not used"
    return ", ".join(f"{name} {_used(own)}" for name, own in record.items())


def _of_environment(path: str, several: bool) -> str:
    """several: whether there are several ranks; with one, its number is left out."""
    if match := _RANK.fullmatch(path):
        name = _OF_A_RANK.get(match[2], match[2].replace("fast_paths.", "fast path "))
        return f"rank {match[1]}: {name}" if several else name
    return path.removeprefix("environment.")


FIGURES = (  # keys of all_results.json with their displayed names
    ("train_first_reward", "reward of the first rollout"),
    ("train_last_reward", "reward of the last rollout"),
    ("train_loss", "training loss"),
    ("eval_loss", "evaluation loss"),
    ("eval_accuracy", "evaluation accuracy"),
    ("train_steps", "steps"),
    ("whole_runtime", "total time"),
    ("train_runtime", "training time"),
    ("steps_runtime", "time in steps"),
    ("steps_tokens_per_second", "tokens per second in steps"),
    ("train_tokens_per_second", "tokens per second"),
    ("peak_memory", "peak memory"),
)
REWARDS = ("reward", "eval_reward", "eval_pass_at_1")  # columns of a log with rollouts
_CONTROL = "grpo.control"
GRID = 8  # steps of a curve in the table
_SHOWN = 96  # characters of a value in a table
_EXACT = 17
_DIGITS = (4, 7, _EXACT)  # tried in turn until two different values also look different


@dataclass(frozen=True)
class Comparison:
    """How two runs differ.

    names: of the runs.
    config, plan, environment, data: the differences.
    results: figure -> its value in each run.
    curves: of losses and rewards, (step, value, value) at steps that both logged.
    first: the first logged step that differs, with the fields; None if the logs agree as far as both go.
    alone: fields that only one of the logs has, by run; they do not count as a difference of a step.
    weights: number of tensors that differ, None if nothing could be compared.
    """

    names: tuple[str, str]
    config: tuple[Difference, ...]
    plan: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    data: tuple[Difference, ...]
    results: Mapping[str, tuple[Any, Any]]
    curves: Mapping[str, tuple[tuple[int, Any, Any], ...]]
    first: str | None
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    weights: int | None


def side_by_side(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The figures that at least one of two all_results.json holds, including evaluation metrics."""
    metrics = [key for key in {**a, **b} if key.startswith("eval_") and isinstance({**a, **b}[key], int | float)]
    keys = dict.fromkeys([key for key, _ in FIGURES] + metrics)
    return {key: (a.get(key), b.get(key)) for key in keys if key in a or key in b}


def shared_curve(a: Sequence[Row], b: Sequence[Row], key: str, most: int = GRID) -> tuple[tuple[int, Any, Any], ...]:
    """Return (step, value in a, value in b) at up to `most` steps that both logged, including the first and the
    last."""
    one, other = ({row["current_steps"]: row[key] for row in rows if key in row} for rows in (a, b))
    steps = sorted(one.keys() & other.keys())
    return tuple((step, one[step], other[step]) for step in evenly(steps, most))


def first_difference(a: Sequence[Row], b: Sequence[Row]) -> str | None:
    """Describe the first step whose logged values are not bit-equal. Ignores times and fields that one run never
    logs."""
    alone = {key for keys in fields_alone(a, b) for key in keys}
    one, other = ({(row["current_steps"], is_eval_row(row)): without_timing(row) for row in rows} for rows in (a, b))
    for place in sorted(one.keys() & other.keys()):
        first, second = one[place], other[place]
        # These depend on the duration and would differ from the first row on.
        ignored = {"total_steps", "percentage", "epoch", *alone}
        keys = [key for key in {**first, **second} if key not in ignored and first.get(key) != second.get(key)]
        if keys:
            kind = "evaluation at step" if place[1] else "step"
            keys.sort(
                key=lambda key: (not key.endswith("loss"), key.startswith("total_"))
            )  # the most informative first
            parts = ("{} {} and {}".format(key, *_two_values(first.get(key), second.get(key))) for key in keys)
            return f"{kind} {place[0]}: " + ", ".join(parts)
    return None


def fields_alone(a: Sequence[Row], b: Sequence[Row]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Fields that only the first log has, and fields that only the second has, such as a metric that one run did not
    compute. Skips kinds of rows (training, evaluation) that one log does not have at all."""
    kinds = [{is_eval_row(row) for row in rows} for rows in (a, b)]
    shared = kinds[0] & kinds[1]
    one, other = (
        dict.fromkeys(key for row in rows if is_eval_row(row) in shared for key in without_timing(row))
        for rows in (a, b)
    )
    return tuple(key for key in one if key not in other), tuple(key for key in other if key not in one)


def comparison_tables(found: Comparison) -> list[Table]:
    """One table for each part that differs."""
    tables = []
    for title in ("config", "plan", "environment", "data"):
        measured = title != "config"
        rows = [
            (name, *_both(one.path, one.old, one.new, measured=measured))
            for name, one in spoken(title, getattr(found, title))
        ]
        tables += [_table(title, found.names, rows)] if rows else []
    results = [(_called(key), *_both(key, *values)) for key, values in found.results.items()]
    tables += [_table("results", found.names, results)] if results else []
    for key, points in found.curves.items():
        rows = [(f"step {step}", *_both(key, one, other)) for step, one, other in points]
        tables += [_table(key.replace("eval_", "evaluation "), found.names, rows)] if rows else []
    return tables


def verdict_lines(found: Comparison) -> list[str]:
    """The conclusions below the tables."""
    equal = [name for name in ("config", "plan", "environment", "data") if not getattr(found, name)]
    lines = [f"the same in both: {', '.join(equal)}"] if equal else []
    alone = [(name, keys) for name, keys in zip(found.names, found.alone, strict=True) if keys]
    lines += [f"logged only by {name}: {', '.join(keys)}" for name, keys in alone]
    far = " as far as both go" if len(set(found.results.get("train_steps", ()))) > 1 else ""
    agree = f"the logs agree bit for bit{far}" + (" in the fields of both" if alone else "")
    lines.append(f"first difference in the logs: {found.first}" if found.first else agree)
    if found.weights is not None:
        verb = "differs" if found.weights == 1 else "differ"
        differ = f"{counted(found.weights, 'tensor')} of the trained weights {verb}"
        lines.append(differ if found.weights else "the trained weights are identical, bit for bit")
    return [*lines, *_gain(found)]


def _gain(found: Comparison) -> list[str]:
    """What the rewards are worth, where one of two runs learned from random numbers in their place."""
    arms = next(((one.old, one.new) for one in found.config if one.path == _CONTROL), None)
    if arms is None:
        return []
    control = arms.index("random")
    lines = []
    for key, points in found.curves.items():
        if key in REWARDS and points and None not in points[-1]:
            step, *ends = points[-1]
            name, own, random = key.replace("eval_", "evaluation ").replace("_", " "), ends[1 - control], ends[control]
            lines.append(
                f"gain over random rewards: {name} {own:.4g} against {random:.4g} at step {step}, {own - random:+.4g}"
            )
    return lines


def curve_picture(names: tuple[str, str], a: Sequence[Row], b: Sequence[Row]) -> Figure:
    """Draw both runs by step: training losses as lines, evaluation losses as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, rows, color in zip(names, (a, b), ("#0072B2", "#D55E00"), strict=True):
        for key, style in (("loss", "-"), ("eval_loss", "o")):
            points = [(row["current_steps"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                label = f"{name}: {'training' if key == 'loss' else 'evaluation'} loss"
                axes.plot(*zip(*points, strict=True), style, color=color, label=label, linewidth=1.2, markersize=5)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    if axes.lines:
        axes.legend()
    return figure


def _table(title: str, names: tuple[str, str], rows: Sequence[tuple[str, str, str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in (title, *names):
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    return table


def _called(key: str) -> str:
    """The displayed name of a figure of all_results.json."""
    return dict(FIGURES).get(key, key.replace("eval_", "evaluation ", 1).replace("runtime", "time").replace("_", " "))


def _both(key: str, one: Any, other: Any, *, measured: bool = True) -> tuple[str, str]:
    """Format two values with units. measured: whether the number is measured; settings are shown exactly."""
    texts = ("", "")
    for digits in _DIGITS if measured else (0,):
        texts = _short(key, _value_alone(one), digits), _short(key, _value_alone(other), digits)
        if texts[0] != texts[1] or one == other:
            break
    return texts


def _two_values(one: Any, other: Any) -> tuple[str, str]:
    """Format two different values with as few digits as distinguish them."""
    for digits in _DIGITS[:-1] if isinstance(one, float) and isinstance(other, float) else ():
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return repr(one) if isinstance(one, float) else str(one), repr(other) if isinstance(other, float) else str(other)


def _value_alone(value: Any) -> Any:
    """A choice of a plan, also one inside a section, without its reason and source."""
    if not isinstance(value, dict):
        return value
    if value.keys() >= {"value", "reason", "source"}:
        return value["value"]
    return {name: _value_alone(inner) for name, inner in value.items()}


def _short(key: str, value: Any, digits: int) -> str:
    """digits: significant digits of a measured number; 0 formats a setting as the config would."""
    if value is None:
        return "not set" if key.startswith("environment.") else "none"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if digits and is_number and (text := _with_unit(key, value)) is not None:
        return text if digits == _DIGITS[0] else f"{text} ({value:,}{' bytes' if _is_size(key) else ''})"
    if digits and isinstance(value, float):
        return repr(value) if digits == _EXACT else number(value, digits)
    text = (
        as_yaml(value) if isinstance(value, float | list | tuple | dict) else f"{value:,}" if is_number else str(value)
    )
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _with_unit(key: str, value: float) -> str | None:
    """Format with the key's unit, None if it has none."""
    if _is_size(key):
        return size_text(int(value))
    if key.endswith("_accuracy"):
        return f"{value:.1%}"
    if key.endswith("_runtime"):
        return duration_text(value)
    if key.endswith("_tokens_per_second"):
        return f"{value:,.0f}"
    return None


def _is_size(key: str) -> bool:
    """Whether the key is a size in bytes."""
    forecast = key.startswith("memory.") and key.count(".") == 1 and key != "memory.recomputed"
    return forecast or key in ("peak_memory", "device.memory")


def overlay_page(
    title: str,
    summary: str,
    charts: Sequence[Chart],
    tables: Sequence[tuple[str, Table]],
    cautions: Sequence[str] = (),
) -> str:
    """Return the HTML page. tables: (heading, table) pairs."""
    values = {
        "title": title,
        "summary": summary,
        "cautions": list(cautions),
        "tables": list(tables),
        "curves": {"charts": to_json(thinned(charts)), "marks": []},
        "live": "",
    }
    return render("overlay.html", values)
