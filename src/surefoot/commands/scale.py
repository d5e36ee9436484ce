"""The forecast of one config on 1, 8, 64 and 512 GPUs, from the model's files alone."""

from __future__ import annotations

from dataclasses import replace

from surefoot.config.schema import BatchConfig, KernelsConfig, RunConfig
from surefoot.models.facts import facts_of
from surefoot.models.folder import resolve_folder
from surefoot.planning.fast_paths import plain_kernels
from surefoot.planning.plan import RunPlan
from surefoot.planning.scale import Forecasts, ScaleRow, scale_rows
from surefoot.runs.plan import make_plan
from surefoot.system import hardware

# Engines that cut parameters hand a module its weights only while its own forward runs, so surefoot's kernels cannot.
_BOUNDLESS = 2**60  # bytes: a machine on which every plan fits, whose parts are then shared out


def forecast_scale(config: RunConfig, name: str, *, micro: int = 1, accumulation: int = 4) -> list[ScaleRow]:
    """name: of a machine that `--hardware` knows. micro: examples of max_length tokens at once on each GPU, of which so
    many follow each other in a step (accumulation). Raises InputError for a machine whose links are not known."""
    machine = hardware.preset(name)
    boundless = replace(machine, memory=_BOUNDLESS, free=None)
    alone = config.model_copy(update={"batch": BatchConfig(size=micro * accumulation, micro=micro)})
    model = facts_of(resolve_folder(config.model.path, config.model.revision, weights=False))

    def planned(kernels: KernelsConfig, switch: str) -> RunPlan:
        asked = alone.model_copy(update={"kernels": kernels, "gradient_checkpointing": switch})
        return make_plan(asked, hardware=boundless, measure=False)

    def forecasts(kernels: KernelsConfig) -> Forecasts:
        once, again = (planned(kernels, switch).memory for switch in ("off", "on"))
        return Forecasts(once, again)

    whole, cut = forecasts(config.kernels), forecasts(plain_kernels())
    plan = planned(config.kernels, "off")
    return list(
        scale_rows(
            model,
            plan,
            {"ddp": whole, "zero 2": cut, "fsdp2": cut},
            length=plan.tokenizer.max_length.value,
            accumulation=accumulation,
            name=name,
            memory=machine.memory,
        )
    )
