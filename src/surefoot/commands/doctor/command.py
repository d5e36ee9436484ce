"""`surefoot doctor`: find problems of this machine, or of a run before it starts; prints a table and advice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from surefoot.commands.doctor.findings import CODES, Examination, Finding, to_json
from surefoot.commands.keys import complete_configs, complete_overrides
from surefoot.commands.options import load_or_exit
from surefoot.commands.terminal import echo_json, screen


@click.command()
@click.argument(
    "config",
    metavar="[CONFIG.yaml]",
    required=False,
    type=click.Path(path_type=Path),
    shell_complete=complete_configs,
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_overrides)
@click.option("--json", "as_json", is_flag=True, help="Print all checks as JSON.")
@click.option("--anew", is_flag=True, help="Measure this machine again instead of using cached measurements.")
def doctor(config: Path | None, overrides: tuple[str, ...], as_json: bool, anew: bool) -> int:
    """Look for what makes a run slow or wrong. Every line is measured, and has a code, a limit and a remedy.

    Without CONFIG.yaml: the machine, its libraries, environment variables, disk and hub. With it, also the run: data,
    labels, types, memory, independence of examples, ten real steps and where their time goes. Only caches of machine
    measurements and tokenized data are written.

    Exits with 2 or 3 if the run would fail. docs/doctor.md lists all codes.
    """
    loaded = load_or_exit(config, overrides).config if config else None

    from surefoot.commands.doctor.examine import examine

    with screen(err=True).passing() as show:
        show("examining …")
        found = examine(loaded, anew=anew, on_finding=lambda one: show(f"examining … {one.code}: {one.verdict}"))
    if config:
        words = (str(config), *overrides)
        found = replace(found, looked_at=tuple(one.with_config(words) for one in found.looked_at))
    if as_json:
        echo_json(to_json(found), allow_nan=False)
    else:
        console = screen()
        console.show(doctor_table(found))
        for line, style in advice(found):
            console.say(line, style=style)
    return found.exit_code


_NOISE = 0.05  # relative difference between two timings of the same work
_STYLE = {"ok": "green", "caution": "yellow", "fault": "red", "unknown": "dim"}


def doctor_table(examination: Examination) -> Table:
    """The table for `Console.show`: one line per check."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in ("code", "verdict", "value", "limit"):
        table.add_column(name, no_wrap=name in ("code", "verdict"), overflow="fold")
    for one in examination.looked_at:
        table.add_row(one.code, Text(one.verdict, _STYLE[one.verdict]), _value(one), one.limit)
    return table


def advice(examination: Examination) -> Iterator[tuple[str, str]]:
    """Yield (line, style) for each finding, faults first, and a last line."""
    for one in examination.findings:
        yield _advice(one), _STYLE[one.verdict]
    faults = sum(one.verdict == "fault" for one in examination.findings)
    cautions = len(examination.findings) - faults
    if not examination.findings:
        yield f"no problems found by {len(examination.looked_at)} checks", "green"
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
        return " (measured: no change in speed)"
    if gain < 1:
        return " (measured: not faster on this machine now)"
    return f" (measured: {gain:{'.0f' if gain >= 10 else '.2g'}} times as fast)"
