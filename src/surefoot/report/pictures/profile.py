"""A profile as a picture: one bar of the step by its parts, and the operators that take most time."""

from __future__ import annotations

import textwrap

from surefoot.report.pictures.plots import png
from surefoot.report.profile import IN_STEP, ProfileReport, disturbance, headline

# Okabe and Ito's palette: told apart by every kind of colour vision.
_COLOURS = {"data": "#999999", "forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#E69F00", "other": "#CCCCCC"}
_MOST = 12  # operators
_LONGEST = 44  # letters in a line of a name, which has two at most
_TITLE = 95  # letters in a line of the title
_LEAST_LABELLED = 0.06  # share of the step in which its name has room


def draw_profile(report: ProfileReport) -> bytes:
    """PNG."""
    from matplotlib.figure import Figure

    shown = report.operators[:_MOST]
    heights = [1.0, max(1.0, 0.32 * len(shown))]
    figure = Figure(figsize=(9, 1.4 + sum(heights)), dpi=120, layout="constrained")
    bar, operators = figure.subplots(2, 1, height_ratios=heights)
    left = 0.0
    for part in IN_STEP:
        width = 1000 * report.parts.get(part, 0.0)
        bar.barh(0, width, left=left, color=_COLOURS[part], label=part, edgecolor="white", linewidth=0.8)
        if width > _LEAST_LABELLED * 1000 * report.step_seconds:
            dark = part == "backward"
            bar.text(left + width / 2, 0, part, ha="center", va="center", color="white" if dark else "black")
        left += width
    bar.set_yticks([])
    bar.set_xlabel("milliseconds per step")
    bar.legend(frameon=False, ncols=len(IN_STEP), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)
    operators.barh(range(len(shown)), [1000 * one.seconds for one in shown], color=_COLOURS["backward"])
    operators.set_yticks(range(len(shown)), [_fitted(one.name) for one in shown], fontsize=8)
    operators.invert_yaxis()
    operators.set_xlabel("own milliseconds per step, under the profiler" if shown else "no step was traced")
    for axes in (bar, operators):
        axes.spines[["top", "right", "left"]].set_visible(False)
    title = [headline(report).partition(" (")[0], *textwrap.wrap(disturbance(report), _TITLE)]
    figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=11)
    return png(figure)


def _fitted(name: str) -> str:
    """In two lines where one is too short, parted behind a colon or before an underscore where both parts fit."""
    if len(name) <= _LONGEST:
        return name
    breaks = [name.rfind(":", 0, _LONGEST) + 1, name.rfind("_", 0, _LONGEST), _LONGEST]
    at = next((at for at in breaks if at > 0 and len(name) - at <= _LONGEST), _LONGEST)
    rest = name[at:].strip()
    return f"{name[:at]}\n{rest if len(rest) <= _LONGEST else rest[: _LONGEST - 1] + '…'}"
