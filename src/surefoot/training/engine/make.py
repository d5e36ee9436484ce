"""Which engine carries a run, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from surefoot.system.errors import Fault, InputError
from surefoot.training.engine.base import Engine, Groups, Members, groups_of
from surefoot.training.engine.ddp import DdpEngine
from surefoot.training.engine.deepspeed import DeepSpeedEngine
from surefoot.training.engine.fsdp2 import Fsdp2Engine
from surefoot.training.engine.single import SingleEngine
from surefoot.training.optimizer import Optimizer, trainable_parameters
from surefoot.training.ranks import Ranks


@dataclass(frozen=True)
class EngineChoice:
    """zero_stage: of deepspeed alone. offload: what fsdp2 and deepspeed keep in host memory between its uses."""

    name: Literal["single", "ddp", "fsdp2", "deepspeed"]
    zero_stage: Literal[1, 2, 3] = 2
    offload: Literal["none", "optimizer", "all"] = "none"


def make_engine(
    choice: EngineChoice,
    model: nn.Module,
    members: Members,
    make_optimizer: Callable[[Groups], Optimizer],
    ranks: Ranks,
    device: torch.device,
) -> Engine:
    """The engine over a model that has its weights already, from the base or from a checkpoint; the same on all ranks.

    model: for ddp and single on `device`; for the others it may lie on the host, from where each rank takes its share.
    members: group -> which of the parameters belong to it. make_optimizer: of the parameters as this rank
    holds them, which are others than the model had before; called once. Of a checkpoint the moments are loaded
    afterwards with `Engine.load_state`.

    Raises InputError where the engine cannot hold this model or optimizer, EnvironmentFault where ranks differ.
    """
    if choice.name in ("single", "ddp"):
        groups = groups_of(model, members)
        if choice.name == "ddp":
            return DdpEngine(model, make_optimizer(groups), groups, ranks, device)
        return SingleEngine(model, trainable_parameters(model), make_optimizer(groups), groups)
    if choice.name == "deepspeed":
        if choice.offload == "all" and choice.zero_stage < 3:
            what = f"ZeRO {choice.zero_stage} keeps all weights on every device"
            raise InputError(
                Fault("parallel.offload", what, "take optimizer, or zero_stage: 3", code="SF-CONFIG-CONFLICT")
            )
        return DeepSpeedEngine(
            model, members, make_optimizer, ranks, device, stage=choice.zero_stage, offload=choice.offload
        )
    if choice.offload == "optimizer":
        what = "fsdp2 keeps weights, gradients and moments in one place"
        raise InputError(Fault("parallel.offload", what, "take all, or engine: deepspeed", code="SF-CONFIG-CONFLICT"))
    return Fsdp2Engine(model, members, make_optimizer, ranks, device, offload=choice.offload == "all")
