"""`surefoot plan`: every choice of a run with its reason, before anything is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from surefoot.commands.options import config_arguments, load_or_exit
from surefoot.commands.printing import echo, echo_json

if TYPE_CHECKING:
    from surefoot.config.schema import RunConfig
    from surefoot.planning.plan import RunPlan
    from surefoot.report.console import Console


@click.command()
@config_arguments
@click.option("--hardware", "machine", metavar="NAME", help="Plan for another machine: h100, h200, a100, rtx4090, cpu.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--scale", is_flag=True, help="Forecast 1, 8, 64 and 512 GPUs of --hardware instead: h100, h200, a100.")
def plan(config: Path, overrides: tuple[str, ...], machine: str | None, as_json: bool, scale: bool) -> None:
    """Show how CONFIG.yaml would run: precision, attention, tokens, adapter, memory, batch, each with its reason.

    Needs the model's config.json and tokenizer files, no weights. Without --hardware it measures this machine for a
    second or two and reads the data, as lengths decide on packing and micro-batches; the run finds them in the cache.
    """
    loaded = load_or_exit(config, overrides)
    if scale:
        if as_json or machine is None:
            raise click.UsageError("--scale prints a table for the machine that --hardware names")
        _show_scale(loaded.config, machine)
        return

    from surefoot.system import hardware, process

    if machine is None:
        from surefoot.runs.run_plan import plan_with_data

        made, unread = plan_with_data(loaded.config)
    else:
        from surefoot.runs.plan import make_plan

        made, unread = make_plan(loaded.config, hardware=hardware.preset(machine)), "--hardware takes no look at them"
    if unread:
        echo(f"planned without the data, whose lengths decide on packing and micro-batches: {unread}", err=True)
    if as_json:
        from surefoot.planning.plan import plan_to_json

        echo_json(plan_to_json(made))
        return
    from surefoot.report.console import open_console
    from surefoot.report.tables.plan import plan_table

    console = open_console(sys.stdout, process.terminal_wishes())
    console.show(plan_table(made))
    if machine is None:
        _say_disk(loaded.config, made, console)


def _say_disk(config: RunConfig, made: RunPlan, console: Console) -> None:
    from surefoot.runs.output_folder import disk_of, disk_words, free_space
    from surefoot.system.messages import size_text

    place, free = free_space(Path(config.output))
    console.say(f"disk: {disk_words(disk_of(config, made))}; {size_text(free)} are free at {place}")


def _show_scale(config: RunConfig, machine: str) -> None:
    from surefoot.commands.scale import forecast_scale
    from surefoot.report.console import open_console
    from surefoot.report.tables.plan import scale_table
    from surefoot.system import process

    console = open_console(sys.stdout, process.terminal_wishes())
    console.show(scale_table(forecast_scale(config, machine)))
    console.say(
        "on paper: one example of data.max_length at once and four in a row on each GPU; docs/scale.md says how"
    )
