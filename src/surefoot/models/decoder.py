"""What stands inside the decoder layers, whatever a family calls them."""

from __future__ import annotations

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
