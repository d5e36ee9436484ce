"""`surefoot train`: the run itself."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from surefoot.cli.options import config_arguments, load_or_exit


@click.command()
@config_arguments
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint that verifies, or start.")
@click.option("--overwrite", is_flag=True, help="Replace the run in the output folder.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing on the screen but errors; run.log has all of it.")
@click.option("--push", "name", metavar="OWNER/NAME", help="Afterwards, upload the model to the hub, privately.")
@click.option("--dry-run", is_flag=True, help="Plan, read the data, and stop; write nothing.")
def train(
    config: Path,
    overrides: tuple[str, ...],
    resume: bool,
    overwrite: bool,
    quiet: bool,
    name: str | None,
    dry_run: bool,
) -> int:
    """Fine-tune the model that CONFIG.yaml describes.

    Any key can be overridden: surefoot train run.yaml optim.lr=1e-4 precision=bf16
    """
    if resume and overwrite:
        raise click.UsageError("--resume continues a run and --overwrite replaces it: give one of them")
    loaded = load_or_exit(config, overrides)

    from surefoot import hardware
    from surefoot.report.console import open_console
    from surefoot.stages.push import check_name, push_run
    from surefoot.stages.run import train_run

    if name is not None:
        check_name(name)
    mode = "resume" if resume else "overwrite" if overwrite else "new"
    typed = ["surefoot", *sys.argv[1:]]
    with open(os.devnull, "w", encoding="utf-8") if quiet else nullcontext(sys.stdout) as stream:
        console = open_console(stream, hardware.terminal_wishes())
        code = train_run(loaded.config, mode, console, typed=typed, dry_run=dry_run)
        if name is not None and code == 0 and not dry_run:
            console.say(f"pushed: {push_run(Path(loaded.config.output), name, public=False)}")
        return code
