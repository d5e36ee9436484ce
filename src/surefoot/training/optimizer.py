"""AdamW over named parameters, and its state as named tensors.

torch keys optimizer state by position; positions shift when a model gains or loses a parameter. Names do not, so the
state is saved and loaded by name, as safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from surefoot.errors import Fault, IntegrityError


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, for those that require a gradient; tied parameters appear once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adamw(
    parameters: Mapping[str, nn.Parameter],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Fused AdamW. Vectors (biases, norms, DoRA magnitudes) are not decayed. The rate is set before each step."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [
        {"params": tensors, "weight_decay": decay}
        for tensors, decay in ((matrices, weight_decay), (vectors, 0.0))
        if tensors
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """State as {"<parameter>/<entry>": tensor}; empty for parameters that never moved."""
    return {
        f"{name}/{entry}": value
        for name, parameter in parameters.items()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """The inverse of `optimizer_tensors`. Raises IntegrityError when names or shapes do not belong to this model."""
    unknown = sorted({key.rpartition("/")[0] for key in tensors} - parameters.keys())
    if unknown:
        raise IntegrityError(Fault("optimizer.safetensors", f"state of parameters that do not train: {unknown[:3]}"))
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:
            raise IntegrityError(
                Fault("optimizer.safetensors", f"{key} is {list(value.shape)}, not {list(parameter.shape)}")
            )
        optimizer.state[parameter][entry] = value.to(parameter.device)
