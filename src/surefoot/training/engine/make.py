"""Make the engine that a plan names, and check what each rank actually holds against the plan.

Libraries silently fall back to full copies: accelerate 1.15 gives plain DDP for FSDP or DeepSpeed on a CPU, and a model
that no wrapping rule matches stays whole on every rank. Such runs would work, but not as planned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.training.engine.base import Elements, Engine, Groups, Members, groups_of
from surefoot.training.engine.deepspeed import DeepSpeedEngine
from surefoot.training.engine.fsdp2 import Fsdp2Engine
from surefoot.training.engine.offloaded import OffloadedEngine
from surefoot.training.engine.replicated import DdpEngine, SingleEngine
from surefoot.training.optimizer import Optimizer, trainable_parameters
from surefoot.training.ranks import Ranks


@dataclass(frozen=True)
class EngineChoice:
    """The engine that a plan names.

    zero_stage: ZeRO stage, for deepspeed only.
    offload: what lies in host memory between uses; single and ddp have "none", single also "optimizer".
    narrow: single with "optimizer" only, see `OffloadedEngine`.
    """

    name: Literal["single", "ddp", "fsdp2", "deepspeed"]
    zero_stage: Literal[1, 2, 3] = 2
    offload: Literal["none", "optimizer", "all"] = "none"
    narrow: torch.dtype | None = None


def make_engine(
    choice: EngineChoice,
    model: nn.Module,
    members: Members,
    make_optimizer: Callable[[Groups], Optimizer],
    ranks: Ranks,
    device: torch.device,
) -> Engine:
    """Make an engine for a model whose weights are loaded already, equal on all ranks.

    model: on `device` for ddp, and for single without offloading; for the others it may be on the CPU, from where each
        rank takes its shard.
    members: group -> predicate on parameter names.
    make_optimizer: makes the optimizer from the parameters as the engine holds them (sharding replaces the model's);
        called once. Moments of a checkpoint are loaded afterwards with `Engine.load_state`.

    Raises InputError if the engine does not support this model or optimizer, EnvironmentFault if ranks differ.
    """
    if choice.name == "single" and choice.offload == "optimizer":
        return OffloadedEngine(model, members, make_optimizer, device, narrow=choice.narrow)
    if choice.name in ("single", "ddp"):
        groups = groups_of(model, members)
        if choice.name == "ddp":
            return DdpEngine(model, make_optimizer(groups), groups, ranks)
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


# Tolerated fraction of elements that are not sharded evenly: norms and biases kept whole, padding to the world size.
_REST = 0.1


def count_elements(model: nn.Module) -> Elements:
    """Count the elements of an unsharded model, as held by a single rank."""
    trained = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    return Elements(sum(parameter.numel() for parameter in model.parameters()), trained, trained)


def verify_share(engine: Engine, name: str, cut: Collection[str], whole: Elements) -> dict[str, Any]:
    """Check the engine's class and element counts against the plan; return them as a JSON-able dict.

    name: planned engine.
    cut: which of "weights", "gradients" and "optimizer" are planned to be sharded.
    whole: `count_elements` of the model, from before the engine was made.

    Raises EnvironmentFault with one line per difference.
    """
    found = engine.elements()
    kind = type(engine).__name__
    faults = []
    if f"{name}engine" not in [one.__name__.lower() for one in type(engine).__mro__]:  # OffloadedEngine is a single's
        faults.append(Fault("plan: parallel.engine", f"planned {name}, found {kind}", code="SF-PLAN-BROKEN"))
    for part, held, total in (
        ("weights", found.parameters, whole.parameters),
        ("gradients", found.gradients, whole.gradients),
        ("optimizer", found.optimizer, whole.optimizer),
    ):
        most = total * (1 / engine.world + _REST) if part in cut and engine.world > 1 else total
        least = 0 if part in cut else total
        if not least <= held <= most:
            what = f"rank {engine.rank} holds {held:,} of {total:,} elements of its {part}"
            planned = f"at most {int(most):,}" if part in cut else "all of them"
            faults.append(Fault("plan: parallel.engine", f"{what}; the plan says {planned}", code="SF-PLAN-BROKEN"))
    if faults:
        raise EnvironmentFault(faults)
    return {
        "rank": engine.rank,
        "engine": kind,
        "device": str(engine.device),
        "parameters": found.parameters,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "of": whole.parameters,
        "of_trainable": whole.gradients,
    }
