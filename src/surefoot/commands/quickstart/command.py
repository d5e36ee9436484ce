"""`surefoot quickstart`: see a model learn, offline, in a minute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/quickstart"), show_default=True, help="Run folder."
)
@click.option(
    "--adapter",
    type=click.Choice(["lora", "dora", "full"]),
    default="lora",
    show_default=True,
    help="What to train: an adapter, or all weights.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=42, show_default=True, help="Other rooms and questions."
)
@click.option("--resume", is_flag=True, help="Continue a quickstart that was stopped.")
@click.option("--overwrite", is_flag=True, help="Replace the run in the output folder.")
def quickstart(out: Path, adapter: Any, seed: int, resume: bool, overwrite: bool) -> int:
    """Fine-tune a tiny model that comes with surefoot, and ask it the same questions before and after.

    Nothing is downloaded. The run folder is that of any run: chat with it, verify it, train it again.
    """
    if resume and overwrite:
        raise click.UsageError("--resume continues a run and --overwrite replaces it: give one of them")

    from surefoot.commands.quickstart.run import run_quickstart
    from surefoot.report.console import open_console
    from surefoot.system import process

    console = open_console(sys.stdout, process.terminal_wishes())
    mode = "resume" if resume else "overwrite" if overwrite else "new"
    return run_quickstart(out, adapter, mode, seed, console, ["surefoot", *sys.argv[1:]])
