"""What a rank really holds, against the plan: libraries fall back to whole copies without a word.

accelerate 1.15, asked for FSDP or DeepSpeed on a CPU, silently gives plain DDP; a model that no rule cuts stays whole
on every rank. Both would run, and both would not be what was planned.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.engine.base import Elements, Engine
from surefoot.training.optimizer import trainable_parameters

# What is not cut evenly (norms and biases that stay whole, padding to the number of ranks), as a share of all.
_REST = 0.1


def count_elements(model: nn.Module) -> Elements:
    """Of a model that is whole; gradients and optimizer as of one rank that holds all of them."""
    trained = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    return Elements(sum(parameter.numel() for parameter in model.parameters()), trained, trained)


def verify_share(engine: Engine, name: str, cut: Collection[str], whole: Elements) -> dict[str, Any]:
    """Hold the engine's class and what it holds against the plan; returns both, JSON-able.

    name: of the planned engine. cut: which of weights, gradients and optimizer are planned to be cut into shares.
    whole: counted before the engine took the model. Raises EnvironmentFault with one line per difference.
    """
    found = engine.elements()
    kind = type(engine).__name__
    faults = []
    if kind.lower() != f"{name}engine":
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
            faults.append(Fault("plan: parallel.engine", f"{what}; planned are {planned}", code="SF-PLAN-BROKEN"))
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
