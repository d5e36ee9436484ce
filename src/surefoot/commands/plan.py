"""`surefoot plan`: show every choice of a run with its reason, before any weights are loaded.

`--scale` forecasts the config on 1, 8, 64 and 512 GPUs from the model's files alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from surefoot.commands.options import config_arguments, load_or_exit
from surefoot.commands.terminal import echo, echo_json, screen
from surefoot.config.schema import BatchConfig, KernelsConfig, RunConfig
from surefoot.planning.fast_paths import plain_kernels
from surefoot.planning.plan import RunPlan, plan_to_json
from surefoot.system import hardware
from surefoot.system.errors import InputError

if TYPE_CHECKING:
    from surefoot.planning.scale import ScaleRow
    from surefoot.report.console import Console


@click.command()
@config_arguments
@click.option(
    "--hardware", "machine", metavar="NAME", help="Plan for another machine: h100, a40, t4, cpu ..., or 48GiB."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--scale", is_flag=True, help="Forecast 1, 8, 64 and 512 GPUs of the type --hardware, such as h100.")
def plan(config: Path, overrides: tuple[str, ...], machine: str | None, as_json: bool, scale: bool) -> None:
    """Show how CONFIG.yaml would run: precision, attention, tokens, adapter, memory, batch, each with its reason.

    Needs the model's config.json and tokenizer files, but no weights. Without --hardware it measures this machine for a
    second or two and reads the data, because lengths decide on packing and micro-batches; the run reuses both. Data
    with a fault are told below the plan, with the exit code of the run.
    """
    loaded = load_or_exit(config, overrides)
    if scale:
        if as_json or machine is None:
            raise click.UsageError("--scale needs --hardware and prints a table, not JSON")
        _show_scale(loaded.config, machine)
        return

    if machine is None:
        from surefoot.runs.plan_with_data import plan_with_data

        made, unread = plan_with_data(loaded.config)
    else:
        from surefoot.runs.make_plan import make_plan

        made, unread = make_plan(loaded.config, hardware=hardware.preset(machine)), "--hardware does not read it"
    wrong = isinstance(unread, InputError)  # not, for example, a hub that cannot be reached from here
    if unread:
        said = "see the error" if wrong else unread
        echo(f"planned without the data, so packing and micro-batches may differ in the run: {said}", err=True)
    if as_json:
        echo_json(plan_to_json(made))
    else:
        _show_plan(loaded.config, made, disk=machine is None)
    if wrong:
        raise unread


def _show_plan(config: RunConfig, made: RunPlan, *, disk: bool) -> None:
    from surefoot.report.tables.plan import plan_table

    console = screen()
    console.show(plan_table(made))
    if disk:
        _say_disk(config, made, console)


def _say_disk(config: RunConfig, made: RunPlan, console: Console) -> None:
    from surefoot.runs.output_folder import disk_of, disk_words, free_space
    from surefoot.system.messages import size_text

    place, free = free_space(Path(config.output))
    console.say(f"disk: {disk_words(disk_of(config, made))}; {size_text(free)} are free at {place}")


def _show_scale(config: RunConfig, machine: str) -> None:
    from surefoot.report.tables.plan import scale_table

    console = screen()
    console.show(scale_table(forecast_scale(config, machine)))
    console.say(
        "calculated for micro-batches of one example of data.max_length, four per GPU and step; see docs/scale.md"
    )


_BOUNDLESS = 2**60  # bytes of a machine on which every plan fits; its parts are then divided among GPUs
_ACCUMULATION = 4  # examples of max_length tokens on each GPU, accumulated one at a time


def forecast_scale(config: RunConfig, name: str) -> list[ScaleRow]:
    """Return one row per number of GPUs and engine. name: a machine known to `--hardware`. Raises InputError if its
    links or its rate are not known."""
    from surefoot.models.facts import facts_of
    from surefoot.models.folder import resolve_folder
    from surefoot.planning.scale import Forecasts, scale_rows
    from surefoot.runs.make_plan import make_plan

    machine = hardware.preset(name)
    boundless = replace(machine, memory=_BOUNDLESS, free=None)
    alone = config.model_copy(update={"batch": BatchConfig(size=_ACCUMULATION, micro=1)})
    model = facts_of(resolve_folder(config.model.path, config.model.revision, weights=False))

    def planned(kernels: KernelsConfig, switch: str) -> RunPlan:
        requested = alone.model_copy(update={"kernels": kernels, "gradient_checkpointing": switch})
        return make_plan(requested, hardware=boundless, measure=False)

    def forecasts(kernels: KernelsConfig) -> Forecasts:
        once, again = (planned(kernels, switch).memory for switch in ("off", "on"))
        return Forecasts(once, again)

    # Engines that shard parameters materialize a module's weights only during its own forward; surefoot's kernels read
    # weights of other modules, so they cannot be used there.
    whole, cut = forecasts(config.kernels), forecasts(plain_kernels())
    plan = planned(config.kernels, "off")
    return list(
        scale_rows(
            model,
            plan,
            {"ddp": whole, "zero 2": cut, "fsdp2": cut},
            length=plan.tokenizer.max_length.value,
            accumulation=_ACCUMULATION,
            machine=machine,
        )
    )
