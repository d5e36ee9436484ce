"""Find the decoder layers of a model, and the attention inside the last one, without knowing the architecture.

`decoder_layers` uses the module tree. `last_layer` runs a small forward pass and records which tensor each module gets
and returns; for an unsupported structure it raises an error with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefoot.models.forward import causal_model, language_models, short_pass
from surefoot.models.modes import eval_mode
from surefoot.models.peft import LoraLayer
from surefoot.system.errors import Fault, InputError


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers: the first ModuleList of transformers' decoder. Raises InputError if it has none."""
    decoder = decoder_of(causal_model(model))
    found = next((module for module in decoder.children() if isinstance(module, nn.ModuleList)), None)
    if found is None:
        what = f"{type(decoder).__name__} has no list of decoder layers"
        raise InputError(Fault("model.path", what, "take a decoder", code="SF-MODEL-KIND"))
    return found


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the decoder (everything between ids and output head), also inside wrappers. transformers' own
    `get_decoder` returns the whole model for Llama 4."""
    if any(isinstance(child, nn.ModuleList) for child in model.children()):
        return model
    found = model.get_decoder()
    inner = language_models(next(model.children())) if found is model else [found]
    return decoder_of(inner[0]) if inner else model


def decoder_matrices(model: nn.Module) -> frozenset[str]:
    """Return the names, as in `model.named_parameters()`, of the two-dimensional parameters inside the decoder layers
    of all language models in `model`, including adapters. Embeddings, output and value heads, norms and biases are not
    among them."""
    layers = [decoder_layers(inner) for inner in language_models(model)]
    inside = {id(parameter) for one in layers for parameter in one.parameters() if parameter.ndim == 2}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in inside)


def decoder_linears(model: nn.Module) -> frozenset[str]:
    """Return the names, as in `model.named_parameters()`, of the weights of linear layers inside the decoder layers."""
    layers = [layer for inner in language_models(model) for layer in decoder_layers(inner)]
    inside = {id(one.weight) for layer in layers for one in layer.modules() if isinstance(one, (nn.Linear, Conv1D))}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in inside)


@contextmanager
def few_layers(model: nn.Module) -> Iterator[None]:
    """Context in which every decoder in `model` has only the first layer of each kind and its last layer. Layers are of
    the same kind if they have the same modules, shapes and layer type."""
    lists = [decoder_layers(inner) for inner in language_models(model)]
    kept = [dict(one.named_children()) for one in lists]
    types = [getattr(inner.config.get_text_config(), "layer_types", None) for inner in language_models(model)]
    try:
        for layers, own, names in zip(lists, kept, types, strict=True):
            few = _of_each_make(list(own.values()), names)
            layers._modules.clear()
            layers._modules.update({str(place): layer for place, layer in enumerate(few)})
        yield
    finally:
        for layers, own in zip(lists, kept, strict=True):
            layers._modules.clear()
            layers._modules.update(own)


def _of_each_make(layers: Sequence[nn.Module], types: Sequence[str] | None) -> list[nn.Module]:
    first: dict[object, int] = {}
    for place, layer in enumerate(layers):
        modules = tuple((name, type(module)) for name, module in layer.named_modules())
        shapes = tuple((name, one.shape) for name, one in layer.named_parameters())
        first.setdefault((modules, shapes, types[place] if types else ""), place)
    return [layers[place] for place in sorted({*first.values(), len(layers) - 1})]


_LINEAR = (nn.Linear, Conv1D, LoraLayer)


@dataclass(frozen=True)
class LastLayer:
    """The parts of the last decoder layer that `fast.last_block` needs.

    norm: the norm before attention; None if attention reads the layer's input.
    projection: the output projection of attention.
    final: the norm that reads the layer's output; None if another kind of module does.
    """

    layer: nn.Module
    norm: nn.Module | None
    attention: nn.Module
    projection: nn.Module
    final: nn.Module | None


def last_layer(model: nn.Module) -> LastLayer:
    """Find the parts of the last layer of the language model in `model`. Raises ValueError with the reason if the
    attention cannot be identified or the layer has an unsupported structure."""
    base, layer = causal_model(model), decoder_layers(model)[-1]
    calls = _calls(base, layer)
    begin, *inside = calls
    if not isinstance(begin.output, torch.Tensor):
        raise ValueError("its last layer returns more than hidden states")
    attention = next((one for one in inside if one.parent is layer and isinstance(one.output, tuple)), None)
    if attention is None or not isinstance(attention.output[0], torch.Tensor):
        raise ValueError("the attention of its last layer cannot be identified")
    norm = None
    if attention.given is not begin.given:
        norms = [one for one in inside if one.given is begin.given and one.output is attention.given]
        if not norms:
            raise ValueError("the attention of its last layer reads neither the layer's input nor its norm")
        norm = norms[-1].module  # the wrapper that chooses among the norms of adapters, where there is one
    own = {id(module) for module in attention.module.modules()}
    linears = [one for one in inside if id(one.module) in own and isinstance(one.module, _LINEAR)]
    if not linears or linears[-1].output.shape != attention.output[0].shape:
        raise ValueError("the attention of its last layer does not end with a linear layer")
    # The call of an adapter layer ends after that of the layer it wraps.
    final = [one.module for one in calls if one.given is begin.output and is_norm(one.module)]
    return LastLayer(layer, norm, attention.module, linears[-1].module, final[0] if final else None)


@dataclass(frozen=True)
class _Call:
    """A recorded module call. given: its first argument."""

    module: nn.Module
    parent: nn.Module | None
    given: torch.Tensor | None
    output: Any


def _calls(base: PreTrainedModel, layer: nn.Module) -> list[_Call]:
    """Record the calls of the layer, its submodules and the decoder's other children; the layer first, the others in
    the order in which they ended. All tensors are kept alive, so that identity comparisons are reliable."""
    decoder = decoder_of(base)
    parents = {child: parent for parent in layer.modules() for child in parent.children()}
    watched = dict.fromkeys(
        [layer, *parents, *(one for one in decoder.children() if not isinstance(one, nn.ModuleList))]
    )
    seen: list[_Call] = []

    def see(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        seen.append(_Call(module, parents.get(module), _first(inputs, named), output))

    with ExitStack() as stack:
        for module in watched:
            stack.callback(module.register_forward_hook(see, with_kwargs=True).remove)
        stack.enter_context(eval_mode(base))
        short_pass(base)
    own = [one for one in seen if one.module is layer]
    if len(own) != 1:
        raise ValueError("its last layer is called more than once")
    return [*own, *(one for one in seen if one.module is not layer)]


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm: a module without children whose class name ends with Norm."""
    return not any(module.children()) and type(module).__name__.endswith("Norm")


def _first(inputs: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor | None:
    given = inputs[0] if inputs else named.get("hidden_states")
    return given if isinstance(given, torch.Tensor) else None
