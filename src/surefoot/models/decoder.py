"""What stands inside the decoder layers, whatever a family calls them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from surefoot.models.forward import causal_model, language_models


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers: the first module list of transformers' decoder."""
    decoder = causal_model(model).get_decoder()
    return next(module for module in decoder.children() if isinstance(module, nn.ModuleList))


def decoder_matrices(model: nn.Module) -> frozenset[str]:
    """Names, as in `model.named_parameters()`, of the two-dimensional parameters inside the decoder layers of all
    language models in `model`, those of adapters included. Not among them: embeddings, output and value heads, norms,
    biases."""
    layers = [decoder_layers(inner) for inner in language_models(model)]
    inside = {id(parameter) for one in layers for parameter in one.parameters() if parameter.ndim == 2}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in inside)


@contextmanager
def few_layers(model: nn.Module) -> Iterator[None]:
    """Inside, every decoder in `model` has one layer of each make, the first of it, and its last one. Of one make are
    layers with the same modules and shapes, and of one type where the config has types."""
    lists = [decoder_layers(inner) for inner in language_models(model)]
    kept = [dict(one.named_children()) for one in lists]
    types = [getattr(inner.config, "layer_types", None) for inner in language_models(model)]
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
