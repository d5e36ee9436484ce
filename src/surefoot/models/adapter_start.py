"""Adapters that start from factors of the base's own weights: PiSSA and OLoRA.

    W x  =  (W - s B0 A0) x  +  s B0 A0 x                before training
    W'   =  (W - s B0 A0) + s B A  =  W + s [B, -B0] [A; A0]     after

PiSSA (Meng et al. 2024, arXiv 2404.02948): s B0 A0 is the best approximation of W that has the adapter's rank, from its
largest singular values, which A0 and B0 share. OLoRA (Büyükakyüz 2024, arXiv 2406.01775): B0 and A0 are the first
columns and rows of W = Q R. PEFT computes both, and the base keeps W - s B0 A0 in its own dtype.

Folders hold the last form: a LoRA of twice the rank and alpha over the unchanged base, which every program reads, and
from which a run resumes exactly (PEFT's `path_initial_model_for_weight_conversion` writes the same). A0 and B0 stay in
host memory for that.

Shapes: r rank; A [r, inputs], B [outputs, r].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from surefoot.models.adapters import ADAPTER
from surefoot.models.peft import LoraLayer, PeftModel

Tensors = dict[str, torch.Tensor]
_A, _B = "lora_A", "lora_B"
_FIRST: WeakKeyDictionary[PeftModel, Tensors] = WeakKeyDictionary()  # A0 and B0 by their names in the file


def remember(model: PeftModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Keep the adapter's tensors, by their names in the file, as A0 and B0."""
    _FIRST[model] = {name: one.detach().cpu().clone() for name, one in tensors.items() if _A in name or _B in name}


def in_file(model: PeftModel, tensors: Tensors, settings: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors and adapter_config.json as they stand in a folder: over the unchanged base."""
    first = _FIRST.get(model)
    if first is None:
        return tensors, settings
    joined = {name: _joined(name, one, first[name]) if name in first else one for name, one in tensors.items()}
    # s is alpha / r, with rslora alpha / sqrt(r): it has to stay.
    alpha = settings["lora_alpha"] * (math.sqrt(2) if settings["use_rslora"] else 2)
    return joined, settings | {"r": 2 * settings["r"], "lora_alpha": alpha, "init_lora_weights": True}


def _joined(name: str, one: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return torch.cat([one, first.to(one.device)], 0) if _A in name else torch.cat([one, -first.to(one.device)], 1)


def read_file(path: Path) -> tuple[Tensors, Tensors]:
    """Return the adapter's tensors in such a file, and A0 and B0."""
    own, first = {}, {}
    for name, tensor in load_file(path).items():
        if _A not in name and _B not in name:
            own[name] = tensor
            continue
        one, other = tensor.chunk(2, dim=0 if _A in name else 1)
        # Contiguous as PEFT made them, so that their product has the same bits.
        own[name], first[name] = one.contiguous(), (other if _A in name else -other).contiguous()
    return own, first


@torch.no_grad()
def take_out(model: PeftModel, first: Mapping[str, torch.Tensor]) -> None:
    """Subtract s B0 A0 from the weights of the base, as PEFT did at the start, and keep A0 and B0."""
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        weight = layer.get_base_layer().get_parameter("weight")
        a, b = (first[f"{name}.{part}.weight"].to(weight.device) for part in (_A, _B))
        turned = isinstance(layer.get_base_layer(), Conv1D)  # which stores W transposed
        rest = (weight.float().T if turned else weight.float()) - layer.scaling[ADAPTER] * b @ a
        weight.data = (rest.T if turned else rest).to(weight.dtype)
    _FIRST[model] = dict(first)
