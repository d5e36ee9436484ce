"""The forecast of one config on 1, 8, 64 and 512 GPUs, from the model's files alone."""

from __future__ import annotations

from dataclasses import replace

from surefoot import hardware
from surefoot.config.schema import BatchConfig, RunConfig
from surefoot.models.hub import resolve_folder
from surefoot.models.tree import facts_of
from surefoot.planning.scale import ScaleRow, scale_rows
from surefoot.stages.planned import make_plan

_BOUNDLESS = 2**60  # bytes: a machine on which every plan fits, whose parts are then shared out


def forecast_scale(config: RunConfig, name: str, *, micro: int = 1, accumulation: int = 4) -> list[ScaleRow]:
    """name: of a machine that `--hardware` knows. micro: examples of max_length tokens at once on each GPU, of which so
    many follow each other in a step (accumulation). Raises InputError for a machine whose links are not known."""
    machine = hardware.preset(name)
    boundless = replace(machine, memory=_BOUNDLESS, free=None)
    alone = config.model_copy(update={"batch": BatchConfig(size=micro, micro=micro)})
    plans = [
        make_plan(alone.model_copy(update={"gradient_checkpointing": switch}), hardware=boundless, measure=False)
        for switch in ("off", "on")
    ]
    model = facts_of(resolve_folder(config.model.path, config.model.revision, weights=False))
    return list(
        scale_rows(
            model,
            plans[0],
            plans[1].memory,
            length=plans[0].tokenizer.max_length.value,
            accumulation=accumulation,
            name=name,
            memory=machine.memory,
        )
    )
