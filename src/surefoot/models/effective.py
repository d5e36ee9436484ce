"""The matrix that a layer multiplies by once its adapter is counted in, one layer at a time.

LoRA (Hu et al. 2021):  W' = W + s B A.  DoRA (Liu et al. 2024):  W' = m / |W + s B A| * (W + s B A), by outputs.
Nothing is merged into the model. In fp32, whatever the base is held in: in bf16 a small adapter would vanish.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from surefoot.models.adapters import ADAPTER
from surefoot.models.peft import LoraLayer, ModulesToSaveWrapper
from surefoot.models.quantised import plain_weight


@dataclass(frozen=True)
class Weights:
    """As the module works with them. weight: as the base holds it ([out, in]; Conv1D: [in, out]), fp32 where an adapter
    changes it. before: the base's own, where an adapter changes it. bias: None where there is none."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    before: torch.Tensor | None = None


@torch.no_grad()
def weights_of(module: nn.Module) -> Weights:
    """Of a linear layer or a norm, under an adapter or not. A norm may have no weight at all."""
    if isinstance(module, LoraLayer):
        base = module.get_base_layer()
        before = plain_weight(base)
        return Weights(_adapted(module, base, before), _own(base, "bias"), before)
    if isinstance(module, ModulesToSaveWrapper):
        trained = module.modules_to_save[ADAPTER]
        return Weights(_own(trained, "weight"), _own(trained, "bias"), _own(module.original_module, "weight"))
    weight = plain_weight(module) if isinstance(module, nn.Linear) else _own(module, "weight")
    return Weights(weight, _own(module, "bias"))


def _adapted(module: LoraLayer, base: nn.Module, before: torch.Tensor) -> torch.Tensor:
    changed = before.float() + module.get_delta_weight(ADAPTER).float()  # pyright: ignore[reportAttributeAccessIssue]
    if ADAPTER not in module.lora_magnitude_vector:
        return changed
    inputs = 0 if isinstance(base, Conv1D) else 1
    magnitude = module.lora_magnitude_vector[ADAPTER].get_parameter("weight").float()
    return changed * (magnitude / torch.linalg.norm(changed, dim=inputs)).unsqueeze(inputs)


def _own(module: nn.Module, name: str) -> torch.Tensor | None:
    return dict(module.named_parameters(recurse=False)).get(name)
