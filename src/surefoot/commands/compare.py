"""`surefoot compare`: in what do two runs differ?"""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.printing import echo_json

_RUN = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("run_a", type=_RUN)
@click.argument("run_b", type=_RUN)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw both loss curves into this PNG file.")
def compare(run_a: Path, run_b: Path, as_json: bool, picture: Path | None) -> None:
    """Show in what RUN_A and RUN_B differ: config, plan, environment, data, results, curves, and the first step whose
    logged numbers are not equal to the last bit.

    Differences are no error: the exit code is 0. `surefoot verify RUN_A --same-as RUN_B` is the strict test.
    """
    from surefoot.system import durable
    from surefoot.system.folders import require_own_picture, require_run

    for run in (run_a, run_b):
        require_run(run)
    if picture is not None:
        require_own_picture(picture)
        durable.require_writable(picture.parent)

    import sys

    from surefoot.commands.comparing import compare_runs, logged_rows
    from surefoot.report.comparison import comparison_tables, comparison_to_json, curve_picture, verdict_lines
    from surefoot.report.console import open_console
    from surefoot.report.pictures.plots import png
    from surefoot.system import process

    found = compare_runs(run_a, run_b)
    if picture is not None:
        durable.write_bytes(picture, png(curve_picture(found.names, logged_rows(run_a), logged_rows(run_b))))
    if as_json:
        echo_json(comparison_to_json(found))
        return
    console = open_console(sys.stdout, process.terminal_wishes())
    for table in comparison_tables(found):
        console.show(table)
        console.say()
    for line in verdict_lines(found):
        console.say(line)
    if picture is not None:
        console.say(f"curves: {picture}")
