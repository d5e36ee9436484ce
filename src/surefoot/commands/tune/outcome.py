"""Output of `surefoot tune`: a line per setting, the result at the end, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surefoot.commands.tune.search import Settings, Tried
from surefoot.config.dump import shown
from surefoot.report.pictures.plots import finish_axes, png
from surefoot.system.messages import size_text

_BLUE, _LIGHT, _ORANGE, _GREY = "#0072B2", "#99C7E0", "#D55E00", "#888888"


def trial_line(number: int, tried: Tried, start: Tried) -> str:
    """Describe a trial by its difference from the plan's own choices. start: the trial of these."""
    what = difference(tried.settings, start.settings) or "the plan's own choices"
    if not tried.rate:
        return f"{number:>3}  {'-':>9} tok/s {'':>6} {'-':>9}  {what}: {tried.failure}"
    change = f"{tried.rate / start.rate - 1:+.0%}" if start.rate and tried is not start else ""
    wrong = f": rejected, {tried.failure}" if tried.failure else ""
    early = ", stopped early" if tried.early and not wrong else ""
    return f"{number:>3}  {tried.rate:>9,.0f} tok/s {change:>6} {size_text(tried.memory):>9}  {what}{wrong}{early}"


def difference(settings: Settings, start: Settings) -> str:
    """Format as "batch.micro 8, data.packing on"; empty if equal."""
    changed = (key for key in settings if settings[key] != start.get(key))
    return ", ".join(f"{key} {shown(settings[key])}" for key in changed)


def outcome_lines(
    tried: Sequence[Tried],
    turns: Sequence[Tried],
    best: Tried,
    left_out: Sequence[tuple[str, str]],
    *,
    held_up: float = 0.0,
) -> Iterator[str]:
    """The last lines of a tuning.

    tried: all trials, the plan's own choices first.
    turns: the plan's choices and the fastest setting, timed again, if they were, with the numbers of their lines.
    best: the chosen setting.
    held_up: share of the time in which other programs used the processor.
    """
    start = turns[0] if turns else tried[0]
    for one in turns:
        (number,) = [number for number, line in enumerate(tried, start=1) if line.settings == one.settings]
        yield trial_line(number, one, start)
    for key, why in left_out:
        yield f"not varied: {key}, {why}"
    if held_up:
        yield f"caution: {_disturbance(held_up)}; tune again on an idle machine"
    if best is start:
        how = " in turns" if turns else ""
        yield f"the plan's own choices are best: nothing is clearly faster{how} than {start.rate:,.0f} tokens/s"
        return
    yield (
        f"best: {difference(best.settings, start.settings)}: {best.rate:,.0f} tokens/s and {size_text(best.memory)}, "
        f"{best.rate / start.rate:.2f} times the plan's own {start.rate:,.0f} and {size_text(start.memory)}"
    )


def _disturbance(held_up: float) -> str:
    return f"other programs used the processor for {held_up:.0%} of the time, which distorts the measurements"


def picture(tried: Sequence[Tried], start: Tried, best: Tried, name: str, *, held_up: float = 0.0) -> bytes:
    """Plot tokens per second over memory as a PNG, one point per timed setting, numbered like the lines. Start and best
    are drawn at their last measurement.

    held_up: see `outcome_lines`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    chosen = (start.settings, best.settings)
    timed = [(one, number) for number, one in enumerate(tried, start=1) if one.rate]
    others = [(one, number) for one, number in timed if one.settings not in chosen]
    own, found = ([(last, n) for one, n in timed if one.settings == last.settings] for last in (start, best))
    for label, color, marker, points in (
        ("tried", _BLUE, "o", [one for one in others if not (one[0].failure or one[0].early)]),
        ("stopped early", _LIGHT, "o", [one for one in others if one[0].early and not one[0].failure]),
        ("rejected: wrong results", _GREY, "x", [one for one in others if one[0].failure]),
        ("the plan's own", _ORANGE, "s", own),
        (f"best: {difference(best.settings, start.settings) or 'the same'}", _ORANGE, "*", found),
    ):
        if not points:
            continue
        places = [(one.memory / 2**20, one.rate) for one, _ in points]
        axes.plot(*zip(*places, strict=True), marker, color=color, ms=13 if marker == "*" else 7, label=label, ls="")
        for place, (_, number) in zip(places, points, strict=True):
            axes.annotate(str(number), place, xytext=(7, 4), textcoords="offset points", fontsize=8, color=_GREY)
    title = f"{name}: speed and memory of the settings tried"
    finish_axes(axes, title, "peak memory without the libraries' (MiB)", "real tokens per second")
    if held_up:
        figure.suptitle(_disturbance(held_up), x=0.01, ha="left", fontsize=10, color=_ORANGE)
    axes.margins(x=0.08, y=0.1)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    return png(figure)
