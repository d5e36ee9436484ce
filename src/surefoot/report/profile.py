"""Where the time of profiled steps went (`surefoot train --profile N`): a record, tables, sentences, a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surefoot.report.pictures.plots import png

FOLDER = "profile"  # of a run folder
RECORD, TRACE, PICTURE = "profile.json", "trace.json.gz", "profile.png"
OTHER = "other"
_WAITED = 0.1  # share of the time above which waiting is reported
_SHOWN = 15  # operators in the table
IN_STEP = ("data", "forward", "backward", "optimizer", OTHER)
BETWEEN = ("evaluation", "checkpoint")


@dataclass(frozen=True)
class LimitFacts:
    """How close the steps were to the arithmetic limit.

    flops_per_token: FLOP per real token that the mathematics needs.
    recomputed_per_token: FLOP per real token that gradient checkpointing adds.
    rate: FLOP/s of matrix products in `dtype`, measured next to the steps.
    of_step, of_forward, of_backward: achieved share of that rate.
    """

    flops_per_token: float
    recomputed_per_token: float
    rate: float
    dtype: str
    of_step: float
    of_forward: float
    of_backward: float


@dataclass(frozen=True)
class OperatorTime:
    """seconds, calls: per step."""

    name: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class ProfileReport:
    """Where the time of profiled steps went.

    first, last: the timed steps.
    parts: seconds per step by part; `other` is the rest.
    between: total seconds of activities between these steps.
    traced: number of steps under the profiler, from which `operators` come, longest first.
    no_limit: why `limit` is None.
    clocked: seconds of all timed steps and of what was between them.
    processor: CPU seconds of the run in that time, over all its threads.
    waited: seconds in which its threads were ready but had no processor.
    """

    first: int
    last: int
    tokens_per_second: float
    parts: Mapping[str, float]
    between: Mapping[str, float]
    traced: int
    operators: tuple[OperatorTime, ...]
    limit: LimitFacts | None
    no_limit: str = ""
    clocked: float = 0.0
    processor: float = 0.0
    waited: float = 0.0

    @property
    def step_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def backward_over_forward(self) -> float | None:
        forward = self.parts.get("forward", 0.0)
        return self.parts.get("backward", 0.0) / forward if forward else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProfileReport:
        """Raises KeyError or TypeError if `to_json` has not written it."""
        limit = data["limit"]
        return cls(
            **{
                **data,
                "operators": tuple(OperatorTime(**one) for one in data["operators"]),
                "limit": None if limit is None else LimitFacts(**limit),
            }
        )


def headline(report: ProfileReport) -> str:
    """One line: which steps, how fast, and how close to the limit."""
    steps = f"step {report.first}" if report.first == report.last else f"steps {report.first} to {report.last}"
    said = f"profile of {steps}: {report.tokens_per_second:,.0f} tok/s, {1000 * report.step_seconds:,.1f} ms per step"
    return f"{said}, {_of_limit(report)}"


def part_rows(report: ProfileReport) -> Iterator[tuple[str, str, str, str]]:
    """Yield part, ms per step, share of the step, share of the arithmetic limit."""
    limit = report.limit
    shares = {} if limit is None else {"forward": limit.of_forward, "backward": limit.of_backward}
    for part in IN_STEP:
        seconds = report.parts.get(part, 0.0)
        share = seconds / report.step_seconds if report.step_seconds else 0.0
        yield part, _ms(seconds), f"{share:.1%}", _share(shares[part]) if part in shares else ""


def operator_rows(report: ProfileReport) -> Iterator[tuple[str, str, str, str]]:
    """Yield operator, ms per step, share of all operators, calls per step."""
    total = sum(one.seconds for one in report.operators)
    for one in report.operators[:_SHOWN]:
        yield one.name, _ms(one.seconds), f"{one.seconds / total:.1%}", f"{one.calls:,.0f}"


def notes(report: ProfileReport) -> Iterator[str]:
    """Sentences for what the tables do not show."""
    ratio = report.backward_over_forward
    if ratio is not None:
        yield f"backward takes {ratio:.1f} times as long as forward"
    for name in BETWEEN:
        if report.between.get(name):
            yield f"{name} between these steps: {_ms(report.between[name])} ms in all"
    if said := disturbance(report):
        yield said
    if report.operators:
        yield f"operators: self time, from {report.traced} more steps under the profiler, which slows small ones"


def disturbance(report: ProfileReport) -> str:
    """A caution if other programs used the processor, otherwise empty."""
    if report.waited <= _WAITED * report.clocked:
        return ""
    return (
        f"other programs used the processor: in {report.clocked:,.1f} s the run's threads ran for "
        f"{report.processor:,.1f} s and waited {report.waited:,.1f} s, so these times are too long"
    )


def profile_table(report: ProfileReport) -> RenderableType:
    """The profile for the terminal."""
    parts = _table("part", "ms per step", "share", "of the limit", rows=part_rows(report))
    blocks: list[RenderableType] = [Text(headline(report), "bold"), parts]
    if report.operators:
        blocks += [Text(), _table("operator", "ms per step", "share", "calls", rows=operator_rows(report))]
    return Group(*blocks, *(Text(note, "dim") for note in notes(report)))


def _of_limit(report: ProfileReport) -> str:
    limit = report.limit
    if limit is None:
        return report.no_limit
    more = ""
    if limit.recomputed_per_token:
        more = f", {_mega(limit.recomputed_per_token)} more recomputed by gradient checkpointing"
    return (
        f"{_share(limit.of_step)} of the arithmetic limit ({_mega(limit.flops_per_token)} needed per token{more}; "
        f"products run at {limit.rate / 1e12:.2f} TFLOP/s in {limit.dtype} here)"
    )


def _table(*columns: str, rows: Iterator[tuple[str, ...]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def _share(share: float) -> str:
    """Two digits, because a small model on a busy machine reaches little of its limit."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" if share >= 0.001 else "under 0.1%"


def _mega(flops: float) -> str:
    return f"{flops / 1e9:,.1f} GFLOP" if flops >= 1e9 else f"{flops / 1e6:,.1f} MFLOP"


# Okabe and Ito's palette: readable with every kind of color vision.
_COLORS = {"data": "#999999", "forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#E69F00", "other": "#CCCCCC"}
_MOST = 12  # operators
_LONGEST = 44  # characters per line of a name, which has at most two lines
_TITLE = 95  # characters per line of the title
_LEAST_LABELED = 0.06  # share of the step from which its name fits


def draw_profile(report: ProfileReport) -> bytes:
    """Draw the profile as a PNG."""
    from matplotlib.figure import Figure

    shown = report.operators[:_MOST]
    heights = [1.0, max(1.0, 0.32 * len(shown))]
    figure = Figure(figsize=(9, 1.4 + sum(heights)), dpi=120, layout="constrained")
    bar, operators = figure.subplots(2, 1, height_ratios=heights)
    left = 0.0
    for part in IN_STEP:
        width = 1000 * report.parts.get(part, 0.0)
        bar.barh(0, width, left=left, color=_COLORS[part], label=part, edgecolor="white", linewidth=0.8)
        if width > _LEAST_LABELED * 1000 * report.step_seconds:
            dark = part == "backward"
            bar.text(left + width / 2, 0, part, ha="center", va="center", color="white" if dark else "black")
        left += width
    bar.set_yticks([])
    bar.set_xlabel("milliseconds per step")
    bar.legend(frameon=False, ncols=len(IN_STEP), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)
    operators.barh(range(len(shown)), [1000 * one.seconds for one in shown], color=_COLORS["backward"])
    operators.set_yticks(range(len(shown)), [_fitted(one.name) for one in shown], fontsize=8)
    operators.invert_yaxis()
    operators.set_xlabel("self time in milliseconds per step, under the profiler" if shown else "no step was traced")
    for axes in (bar, operators):
        axes.spines[["top", "right", "left"]].set_visible(False)
    title = [headline(report).partition(" (")[0], *textwrap.wrap(disturbance(report), _TITLE)]
    figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=11)
    return png(figure)


def _fitted(name: str) -> str:
    """Break a long name into two lines, after a colon or before an underscore if both parts fit."""
    if len(name) <= _LONGEST:
        return name
    breaks = [name.rfind(":", 0, _LONGEST) + 1, name.rfind("_", 0, _LONGEST), _LONGEST]
    at = next((at for at in breaks if at > 0 and len(name) - at <= _LONGEST), _LONGEST)
    rest = name[at:].strip()
    return f"{name[:at]}\n{rest if len(rest) <= _LONGEST else rest[: _LONGEST - 1] + '…'}"
