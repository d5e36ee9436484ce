"""What doctor found, for people: what was looked at; then, where a terminal ends, what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from surefoot.commands.doctor.codes import CODES
from surefoot.commands.doctor.findings import Examination, Finding

_NOISE = 0.05  # two timings of the same differ by as much
_STYLE = {"ok": "green", "caution": "yellow", "fault": "red", "unknown": "dim"}


def doctor_table(examination: Examination) -> Table:
    """For `Console.show`: a line for everything that was looked at."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in ("code", "verdict", "value", "limit"):
        table.add_column(name, no_wrap=name in ("code", "verdict"), overflow="fold")
    for one in examination.looked_at:
        table.add_row(one.code, Text(one.verdict, _STYLE[one.verdict]), _value(one), one.limit)
    return table


def advice(examination: Examination) -> Iterator[tuple[str, str]]:
    """(line, style) for each finding, faults first, and one for the whole."""
    for one in examination.findings:
        yield _advice(one), _STYLE[one.verdict]
    faults = sum(one.verdict == "fault" for one in examination.findings)
    cautions = len(examination.findings) - faults
    if not examination.findings:
        yield f"nothing found: {len(examination.looked_at)} checks", "green"
    else:
        yield f"{faults} fault{'' if faults == 1 else 's'}, {cautions} caution{'' if cautions == 1 else 's'}", "bold"


def _advice(one: Finding) -> str:
    fix = f"; {one.fix}" if one.fix else ""
    return f"{one.code}: {_value(one)}{fix}{_gain(one)}"


def _value(one: Finding) -> str:
    return f"{one.where}: {one.value}" if one.where and not one.value.startswith(one.where) else one.value


def _gain(one: Finding) -> str:
    gain = one.gain
    if gain is None:
        return " (gain not measured)" if CODES[one.code].speed else ""
    if abs(gain - 1) < _NOISE:
        return " (measured: as fast as now)"
    if gain < 1:
        return " (measured: no faster on this machine now)"
    return f" (measured: {gain:{'.0f' if gain >= 10 else '.2g'}} x as fast)"
