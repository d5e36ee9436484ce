"""Gradient checkpointing: keep the input of a decoder layer, compute the layer again in the backward pass.

In all layers it costs about one more forward pass, and saves all activations but one layer's. Gradients are the same,
bit for bit where kernels repeat, dropout included: the random state is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from surefoot.models.decoder import decoder_layers
from surefoot.models.forward import causal_model

_SWITCH = "gradient_checkpointing"  # transformers' own, on each decoder layer


def enable_gradient_checkpointing(
    model: nn.Module,
    layers: int | None = None,
    recompute_in: Callable[[], AbstractContextManager[None]] | None = None,
) -> None:
    """Turn it on, non-reentrant: that form works with a frozen base, whose inputs need no gradient.

    layers: how many, from the first on; None: all. The first ones go backward last, when what the others kept is free
    again, so that the layer that is computed again takes no room of its own.
    It acts only in training mode. The backward pass must run under the same attention kernels as the forward pass,
    because it runs attention again. recompute_in: called in each layer's forward pass for a context, in which the layer
    is computed again, once for every backward pass.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if recompute_in is not None:
        settings["context_fn"] = lambda: (nullcontext(), recompute_in())
    causal_model(model).activation_checkpointing_enable(settings)
    leave_inputs_constant(model)
    for layer in decoder_layers(model)[layers:] if layers is not None else ():
        setattr(layer, _SWITCH, False)


def leave_inputs_constant(model: nn.Module) -> None:
    """Frozen embeddings come out without a gradient, so that the first layer's products compute none for its input.

    Where activations are computed again, transformers and PEFT let every embedding ask for one: the reentrant form of
    checkpointing, which is not ours, finds no gradient otherwise.
    """
    causal_model(model).disable_input_require_grads()


def has_gradient_checkpointing(model: nn.Module) -> bool:
    return causal_model(model).is_activation_checkpointing


def checkpointed_layers(model: nn.Module) -> int:
    """How many of the decoder layers are computed again."""
    return sum(bool(getattr(layer, _SWITCH)) for layer in decoder_layers(model) if hasattr(layer, _SWITCH))


def recomputes(layer: nn.Module) -> bool:
    """Whether this decoder layer will be computed again for the backward pass, were it called now."""
    return layer.training and bool(getattr(layer, _SWITCH, False))


@contextmanager
def computed_once(layer: nn.Module) -> Iterator[None]:
    """Inside, the layer keeps its activations: for a caller that has all of it computed again itself."""
    if not recomputes(layer):
        yield
        return
    setattr(layer, _SWITCH, False)
    try:
        yield
    finally:
        setattr(layer, _SWITCH, True)
