"""What there is to see in the decoder layers of a model: the norms and linear layers of one, and the final norm.

What stands where is read from the family's row, or, for a family without one, from the module tree; no model is asked
for its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

from surefoot.families.model_facts import ModelFacts
from surefoot.models.decoder import decoder_layers
from surefoot.models.forward import causal_model
from surefoot.models.peft import LoraLayer


@dataclass(frozen=True)
class Part:
    """A module inside every decoder layer, or the final norm. path: within the layer; the full name of the final norm.

    roles, sizes: of a linear layer that several are fused in, what they are called and how many outputs each has, in
    order; of any other linear layer its one role, of a norm none.
    """

    path: str
    kind: Literal["norm", "linear"]
    roles: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerParts:
    """layers: full name of the list of decoder layers. final_norm: None where the model ends without one."""

    layers: str
    parts: tuple[Part, ...]
    final_norm: Part | None


def layer_parts(model: nn.Module, facts: ModelFacts) -> LayerParts:
    """What there is to see in this model's layers, in the order of the family's row or of the module tree."""
    base, layers = causal_model(model), decoder_layers(model)
    names = {id(module): name for name, module in base.named_modules()}
    family = facts.family
    if family is None:
        last = [module for module in base.get_decoder().children() if _is_norm(module)]
        final = Part(names[id(last[-1])], "norm") if last else None
        return LayerParts(names[id(layers)], tuple(_shown_parts(layers[0])), final)
    linears = [
        Part(row.path, "linear", tuple(row.roles), tuple(facts.size(part) for part in row.outputs))
        for row in family.linears
    ]
    norms = [Part(row.path, "norm") for row in family.layer_norms]
    path = family.final_norm.path
    final = Part(path, "norm") if path in {*names.values()} else None
    return LayerParts(names[id(layers)], (*norms, *linears), final)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and not any(module.children())


def _shown_parts(layer: nn.Module) -> Iterator[Part]:
    """Of a family without a row: its norms and linear layers, each called by the last word of its name."""
    inside_adapter: tuple[str, ...] = ()
    for path, module in layer.named_modules():
        if path.startswith(inside_adapter or ("\0",)):
            continue
        if isinstance(module, LoraLayer):
            inside_adapter += (f"{path}.",)
        if isinstance(module, nn.Linear | Conv1D | LoraLayer):
            yield Part(path, "linear", (path.rpartition(".")[2],))
        elif _is_norm(module):
            yield Part(path, "norm")
