"""`surefoot verify`: check that every byte is as written, and that two runs are identical."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from surefoot.commands.options import FiniteRange
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
@click.option("--served", metavar="URL", help="Compare a server's answers with the trained model's.")
@click.option("--name", help="With --served: the model's name on the server.  [default: its only model or adapter]")
@click.option("--data", help="With --served: texts, as in data.train.  [default: the run's held-out data]")
@click.option(
    "--max-samples", type=click.IntRange(min=1), default=16, show_default=True, help="With --served: number of texts."
)
@click.option(
    "--threshold",
    type=FiniteRange(min=0, min_open=True),
    help="With --served: allowed difference in nats.  [default: 1e-4, or the effect of rounding to 16 bits]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def verify(
    ctx: click.Context, folder: Path, other: Path | None, served: str | None, as_json: bool, **requested: Any
) -> None:
    """Check FOLDER (a run, a checkpoint or an export) against its manifests.

    Exit 0: every file is as written, and the second folder is identical or the served model is the trained one. Exit 4:
    a file or a value differs.
    """
    if ctx.args:
        meant = f"surefoot verify {shlex.join([str(folder), '--same-as', ctx.args[0]])}"
        raise click.UsageError(f"only one folder can be checked; compare two with --same-as: `{meant}`", ctx)

    if served is not None:
        if other is not None:
            raise click.UsageError("--served and --same-as cannot be combined", ctx)
        _verify_served(folder, served, as_json=as_json, **requested)
        return
    for option, flag in (("name", "--name"), ("data", "--data"), ("threshold", "--threshold")):
        if requested[option] is not None:
            raise click.UsageError(f"{flag} needs --served URL", ctx)

    from surefoot.system.folders import is_run, require_written

    for one in (folder, other):
        if one:
            require_written(one)

    from surefoot.commands.compare import config_differences
    from surefoot.config.dump import shown
    from surefoot.report.conversion import conversion_faults, conversion_line, read_conversion
    from surefoot.report.verification import (
        compare_folders,
        counts_line,
        differences_table,
        is_finished,
        verdict,
        verify_folder,
    )
    from surefoot.system.errors import Fault, IntegrityError

    checks = [check for one in (folder, other) if one for check in verify_folder(one)]
    faults = [fault for check in checks for fault in check.faults]
    faults += [fault for one in (folder, other) if one for fault in conversion_faults(one)]
    differences = compare_folders(folder, other) if other and not faults else None
    if as_json:
        echo_json(verdict(checks, differences))
    else:
        console = screen()
        console.say(counts_line(checks))
        if differences and other:
            console.say(f"{folder} and {other} differ in {counted(len(differences), 'place')}")
            for one in config_differences(folder, other):
                console.say(f"config: {one.path} is {shown(one.old)} in {folder} and {shown(one.new)} in {other}")
        if differences is not None:
            console.show(differences_table(differences))
        for one in (folder, other):
            if one and (converted := read_conversion(one)):
                console.say(f"{one}: {conversion_line(converted)}")
        for one in (folder, other):
            if one and is_run(one) and not any(check.logs for check in checks):
                console.say(f"{one}: its logs could not be checked: no intact checkpoint has copies of them")
        if differences and other and is_run(folder) and is_run(other):
            console.say(f"why they differ: surefoot compare {shlex.join([str(folder), str(other)])}")
        if not faults:
            for one in (folder, other):
                if one and (one / "plan.json").is_file() and not is_finished(one):
                    console.say(f"{one} is not finished, so only its checkpoints were checked")
        if differences == []:
            console.say(f"{folder} and {other} are identical: weights, optimizer, state and logged values")
    if faults:
        raise IntegrityError(faults)
    if differences:
        raise IntegrityError(Fault("", f"{folder} and {other} are not identical", code="SF-VERIFY-DIFFERS"))


def _verify_served(
    folder: Path,
    url: str,
    *,
    name: str | None,
    data: str | None,
    max_samples: int,
    threshold: float | None,
    as_json: bool,
) -> None:
    from surefoot.commands.options import check_models
    from surefoot.methods.requests import DataRequest, check_request
    from surefoot.system.posting import server

    there = server(url.rstrip("/").removesuffix("/v1"), "--served")
    check_models(str(folder), None)
    request = DataRequest(data, max_samples=max_samples) if data else None
    if request:
        check_request(request)

    from surefoot.models.served import served_model

    model = served_model(there, name)  # report an unreachable server before loading a model

    from surefoot.evaluate.served import measure_served
    from surefoot.report.tables.served import served_faults, served_lines, served_table
    from surefoot.system.errors import IntegrityError

    with screen(err=True).passing() as show:
        report = measure_served(
            str(folder),
            model,
            data=request,
            texts=max_samples,
            threshold=threshold,
            on_progress=show,  # pyright: ignore[reportArgumentType]
        )
    if as_json:
        echo_json({"server": there.address, "name": model.name, "kind": model.kind, **report.to_json()})
    else:
        console = screen()
        console.say(f"{there.address}: {model.name} ({model.kind}), {report.source}")
        console.show(served_table(report))
        for line in served_lines(report):
            console.say(line)
    if faults := served_faults(report, f"{there.address}: {model.name}"):
        raise IntegrityError(faults)
