"""Observe the decoder layers of a running model: norms, projections, residual stream, attention maps.

`layer_parts` lists what can be observed, from the family's known structure or else from the module tree. `watched`
installs hooks that pass every tensor to the caller and report when a layer is finished, and removes them afterwards.
The caller must copy tensors that it keeps.

    parts = layer_parts(model, facts)
    with torch.no_grad(), watched(model, parts, [0, 1], see, through):
        narrowed_logits(model, places, input_ids=ids)

Attention maps exist only with eager attention, to which the model is switched for the time.
Shapes: B texts, T tokens, H hidden size, h heads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefoot.families.model_facts import ModelFacts
from surefoot.models.adapter_targets import is_linear
from surefoot.models.decoder import decoder_layers, decoder_of, is_norm
from surefoot.models.forward import causal_model
from surefoot.models.peft import LoraLayer
from surefoot.system.errors import EnvironmentFault, Fault


@dataclass(frozen=True)
class Part:
    """A module inside every decoder layer, or the final norm.

    path: name within the layer; full name for the final norm.
    roles: roles of a linear layer, several in order if it is fused; empty for a norm.
    sizes: number of outputs of each role.
    """

    path: str
    kind: Literal["norm", "linear"]
    roles: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerParts:
    """The observable parts of a model; if layers differ, the union of theirs.

    layers: full name of the list of decoder layers.
    final_norm: None if the model has none.
    """

    layers: str
    parts: tuple[Part, ...]
    final_norm: Part | None

    def of_layer(self, base: nn.Module, layer: int) -> list[Part]:
        """Return the parts that a layer has. base: the transformers model."""
        own = {name for name, _ in base.get_submodule(f"{self.layers}.{layer}").named_modules()}
        return [part for part in self.parts if part.path in own]


def layer_parts(model: nn.Module, facts: ModelFacts) -> LayerParts:
    """Return the observable parts of this model's layers, in the order of the family's row or of the module tree."""
    base, layers = causal_model(model), decoder_layers(model)
    names = {id(module): name for name, module in base.named_modules()}
    structure = facts.structure
    if structure is None:
        last = [module for module in decoder_of(base).children() if is_norm(module)]
        final = Part(names[id(last[-1])], "norm") if last else None
        shown = {part.path: part for layer in layers for part in _shown_parts(layer)}
        return LayerParts(names[id(layers)], tuple(shown.values()), final)
    linears = [
        Part(row.path, "linear", tuple(row.roles), tuple(facts.size(part) for part in row.outputs))
        for row in structure.linears
    ]
    norms = [Part(row.path, "norm") for row in structure.layer_norms]
    path = structure.final_norm.path
    final = Part(path, "norm") if path in {*names.values()} else None
    return LayerParts(names[id(layers)], (*norms, *linears), final)


def _shown_parts(layer: nn.Module) -> Iterator[Part]:
    """Yield norms and linear layers of a family without known structure, with the last name component as role."""
    inside_adapter: tuple[str, ...] = ()
    for path, module in layer.named_modules():
        if path.startswith(inside_adapter or ("\0",)):
            continue
        if isinstance(module, LoraLayer):
            inside_adapter += (f"{path}.",)
        if isinstance(module, nn.Linear | Conv1D) or (isinstance(module, LoraLayer) and is_linear(module)):
            yield Part(path, "linear", (path.rpartition(".")[2],))
        elif not isinstance(module, LoraLayer) and is_norm(module):
            yield Part(path, "norm")


Kind = Literal["residual_in", "residual_out", "input", "output", "attention"]


@dataclass(frozen=True)
class Place:
    """Identifies an observed tensor.

    layer: layer index; None for the final norm.
    module: full name in the transformers model.
    part: the part, for kinds input and output.
    kind: residual_in and residual_out are a decoder layer's input and output, [B, T, H]; input and output are a part's,
        [B, T, …] or [B, h, T, …]; attention is the attention probabilities, [B, h, T, T].
    """

    layer: int | None
    module: str
    part: Part | None
    kind: Kind


See = Callable[[Place, torch.Tensor], None]


@contextmanager
def watched(
    model: nn.Module,
    parts: LayerParts,
    layers: Collection[int],
    see: See,
    through: Callable[[int | None], None] = lambda layer: None,
    *,
    attention: bool = False,
) -> Iterator[None]:
    """Context in which a forward pass calls see(place, tensor) for all `parts` in `layers`, and through(layer) after
    each layer and, with None, after the final norm.

    attention: whether to observe attention maps too; the model then runs eager attention. Raises EnvironmentFault if
        its layers return none.
    """
    base = causal_model(model)
    with ExitStack() as stack:
        if attention:
            stack.enter_context(_eager(base))
        for number in layers:
            layer = base.get_submodule(f"{parts.layers}.{number}")
            name = f"{parts.layers}.{number}"
            if attention and _attends(base, number):
                stack.enter_context(_attention_seen(layer, number, name, see))
            stack.callback(layer.register_forward_pre_hook(_entering(number, name, see), with_kwargs=True).remove)
            for part in parts.of_layer(base, number):
                hook = _around(Place(number, f"{name}.{part.path}", part, "input"), see)
                stack.callback(layer.get_submodule(part.path).register_forward_hook(hook, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(_leaving(number, name, see, through)).remove)
        if parts.final_norm is not None:
            norm = base.get_submodule(parts.final_norm.path)
            hook = _around(Place(None, parts.final_norm.path, parts.final_norm, "input"), see)
            stack.callback(norm.register_forward_hook(hook, with_kwargs=True).remove)
            stack.callback(norm.register_forward_hook(lambda *_: through(None)).remove)
        yield


def by_token(tensor: torch.Tensor, texts: int, tokens: int) -> torch.Tensor:
    """Reshape [B, T, …], [B, h, T, d] or [B * T, width] to [B, T, width], for B texts of T tokens.

    If h equals T, the strides decide: a token's stride is larger than a head's. Raises ValueError for other shapes.
    """
    if tensor.ndim == 2 and len(tensor) == texts * tokens:
        return tensor.unflatten(0, (texts, tokens))
    axes = [axis for axis in range(1, max(2, tensor.ndim - 1)) if tensor.shape[axis] == tokens]
    if not axes:
        raise ValueError(f"no axis of {list(tensor.shape)} counts {tokens} tokens")
    axis = max(axes, key=tensor.stride)
    return tensor.movedim(axis, 1).flatten(2)


def _entering(layer: int, name: str, see: See) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        see(Place(layer, name, None, "residual_in"), _first(inputs, named))

    return hook


def _leaving(layer: int, name: str, see: See, through: Callable[[int | None], None]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        see(Place(layer, name, None, "residual_out"), output[0] if isinstance(output, tuple) else output)
        through(layer)

    return hook


def _around(place: Place, see: See) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor) -> None:
        see(place, _first(inputs, named))
        see(Place(place.layer, place.module, place.part, "output"), output)

    return hook


def _first(inputs: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    """Return a module's first tensor argument, positional or by keyword."""
    return inputs[0] if inputs else next(value for value in named.values() if isinstance(value, torch.Tensor))


def _attends(base: PreTrainedModel, layer: int) -> bool:
    """Whether the layer has attention probabilities, according to the config's layer_types."""
    types = getattr(base.config.get_text_config(), "layer_types", None)
    return types is None or (types[layer].endswith("attention") and types[layer] != "linear_attention")


@contextmanager
def _attention_seen(layer: nn.Module, number: int, name: str, see: See) -> Iterator[None]:
    """Context that observes attention modules, that is, modules that return a tuple with a tensor [B, h, T, T]."""
    found: list[str] = []

    def seen(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            for item in output if isinstance(output, tuple) else ():
                if isinstance(item, torch.Tensor) and item.ndim == 4 and item.shape[2] == item.shape[3]:
                    found.append(path)
                    see(Place(number, f"{name}.{path}", None, "attention"), item)
                    return

        return hook

    def check(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not found:
            what = f"{name} returns no attention probabilities, even with eager attention"
            raise EnvironmentFault(Fault("attention maps", what, "leave them out", code="SF-MODEL-KIND"))
        found.clear()

    with ExitStack() as stack:
        for path, module in layer.named_modules():
            if path and any(module.children()):
                stack.callback(module.register_forward_hook(seen(path)).remove)
        stack.callback(layer.register_forward_hook(check).remove)
        yield


@contextmanager
def _eager(base: Any) -> Iterator[None]:
    before = base.config._attn_implementation
    base.set_attn_implementation("eager")
    try:
        yield
    finally:
        base.set_attn_implementation(before)
