"""`surefoot doctor`: what is wrong with this machine, or with a run before it is one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from surefoot.commands.completion import complete_configs, complete_overrides
from surefoot.commands.options import load_or_exit
from surefoot.commands.printing import echo_json

if TYPE_CHECKING:
    from surefoot.commands.doctor.findings import Examination


@click.command()
@click.argument(
    "config",
    metavar="[CONFIG.yaml]",
    required=False,
    type=click.Path(path_type=Path),
    shell_complete=complete_configs,
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_overrides)
@click.option("--json", "as_json", is_flag=True, help="Print everything that was looked at as JSON.")
@click.option("--anew", is_flag=True, help="Measure this machine again, whatever is kept of it.")
def doctor(config: Path | None, overrides: tuple[str, ...], as_json: bool, anew: bool) -> int:
    """Look for what makes a run slow or wrong: measured, with a code, a limit and what to do about it.

    Without CONFIG.yaml: the machine, its libraries, environment variables, disk and hub. With it, the run as well:
    data, labels, types and memory, what one example does to another, ten real steps and where their time goes. Nothing
    is written but what is kept of the machine and of the tokenised data.

    Exits with 2 or 3 where the run would fail. docs/doctor.md has all codes.
    """
    loaded = load_or_exit(config, overrides).config if config else None

    from surefoot.commands.doctor.examine import examine
    from surefoot.report.console import open_console
    from surefoot.system import process

    with open_console(sys.stderr, process.terminal_wishes()).passing() as show:
        show("looking …")
        found = examine(loaded, anew=anew, tell=lambda one: show(f"looking … {one.code}: {one.verdict}"))
    if config:
        words = (str(config), *overrides)
        found = replace(found, looked_at=tuple(one.with_config(words) for one in found.looked_at))
    if as_json:
        from surefoot.commands.doctor.findings import to_json

        echo_json(to_json(found), allow_nan=False)
    else:
        _show(found)
    return found.exit_code


def _show(found: Examination) -> None:
    from surefoot.commands.doctor.table import advice, doctor_table
    from surefoot.report.console import open_console
    from surefoot.system import process

    console = open_console(sys.stdout, process.terminal_wishes())
    console.show(doctor_table(found))
    for line, style in advice(found):
        console.say(line, style=style)
