"""`surefoot verify`: is every byte as it was written, and are two runs the same?"""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from surefoot.commands.terminal import echo_json, screen
from surefoot.system.messages import counted


@click.command(context_settings={"allow_extra_args": True})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--same-as",
    "other",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Compare with another run or checkpoint, bit for bit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def verify(ctx: click.Context, folder: Path, other: Path | None, as_json: bool) -> None:
    """Check FOLDER, a run, a checkpoint or an export, against its manifests.

    Exit 0: every file is as it was written (and the two are identical). Exit 4: something is not.
    """
    if ctx.args:
        meant = f"surefoot verify {shlex.join([str(folder), '--same-as', ctx.args[0]])}"
        raise click.UsageError(f"one folder is checked; two are compared with --same-as: `{meant}`", ctx)

    from surefoot.system.folders import is_run, require_written

    for one in (folder, other):
        if one:
            require_written(one)

    from surefoot.commands.compare import config_differences
    from surefoot.config.dump import shown
    from surefoot.report.verification import (
        compare_folders,
        counts_line,
        differences_table,
        files_table,
        is_finished,
        verdict,
        verify_folder,
    )
    from surefoot.system.errors import Fault, IntegrityError

    checks = [check for one in (folder, other) if one for check in verify_folder(one)]
    faults = [fault for check in checks for fault in check.faults]
    differences = compare_folders(folder, other) if other and not faults else None
    if as_json:
        echo_json(verdict(checks, differences))
    else:
        console = screen()
        if faults:
            console.show(files_table(checks))
        console.say(counts_line(checks))
        if differences and other:
            console.say(f"{folder} and {other} differ in {counted(len(differences), 'place')}")
            for one in config_differences(folder, other):
                console.say(f"config: {one.path} is {shown(one.old)} in {folder} and {shown(one.new)} in {other}")
        if differences is not None:
            console.show(differences_table(differences))
        for one in (folder, other):
            if one and is_run(one) and not any(check.logs for check in checks):
                console.say(f"{one}: its logs are not covered: no checkpoint that is whole has copies of them")
        if differences and other and is_run(folder) and is_run(other):
            console.say(f"why they differ: surefoot compare {shlex.join([str(folder), str(other)])}")
        if not faults:
            for one in (folder, other):
                if one and (one / "plan.json").is_file() and not is_finished(one):
                    console.say(f"{one} is not finished: only its checkpoints were checked")
        if differences == []:
            console.say(f"{folder} and {other} are identical: weights, optimizer, state and logged values")
    if faults:
        raise IntegrityError(faults)
    if differences:
        raise IntegrityError(Fault("", f"{folder} and {other} are not identical", code="SF-VERIFY-DIFFERS"))
