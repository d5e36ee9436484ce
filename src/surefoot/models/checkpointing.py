"""Gradient checkpointing: save only the input of a decoder layer and recompute the layer in the backward pass.

In all layers it costs about one more forward pass and saves all activations but one layer's. Gradients are the same,
bit-identical if kernels are deterministic, also with dropout: the random state is restored for the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from surefoot.models.decoder import decoder_layers
from surefoot.models.forward import causal_model

_SWITCH = "gradient_checkpointing"  # transformers' attribute of each decoder layer


def enable_gradient_checkpointing(
    model: nn.Module,
    layers: int | None = None,
    recompute_in: Callable[[], AbstractContextManager[None]] | None = None,
) -> None:
    """Turn on non-reentrant gradient checkpointing, which supports a frozen base whose inputs need no gradient.

    layers: number of layers, from the first; None for all. The first layers' backward comes last, when the activations
        of the others are free, so the recomputed layer needs no extra memory.
    recompute_in: called in each layer's forward pass; returns the context in which the layer is recomputed.

    It is active only in training mode. The backward pass must run under the same attention kernels as the forward pass,
    because it recomputes attention.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if recompute_in is not None:
        settings["context_fn"] = lambda: (nullcontext(), recompute_in())
    causal_model(model).activation_checkpointing_enable(settings)
    leave_inputs_constant(model)
    for layer in decoder_layers(model)[layers:] if layers is not None else ():
        setattr(layer, _SWITCH, False)


def leave_inputs_constant(model: nn.Module) -> None:
    """Do not require gradients of frozen embeddings' outputs, so that the first layer computes no input gradient.

    transformers and PEFT require them with checkpointing, because reentrant checkpointing, not used here, needs them.
    """
    causal_model(model).disable_input_require_grads()


def has_gradient_checkpointing(model: nn.Module) -> bool:
    return causal_model(model).is_activation_checkpointing


def checkpointed_layers(model: nn.Module) -> int:
    """Return the number of decoder layers with gradient checkpointing."""
    return sum(bool(getattr(layer, _SWITCH)) for layer in decoder_layers(model) if hasattr(layer, _SWITCH))


def recomputes(layer: nn.Module) -> bool:
    """Whether this decoder layer, if called now, will be recomputed in the backward pass."""
    return layer.training and bool(getattr(layer, _SWITCH, False))


@contextmanager
def computed_once(layer: nn.Module) -> Iterator[None]:
    """Context in which the layer does not use checkpointing, for a caller that checkpoints it as part of more."""
    if not recomputes(layer):
        yield
        return
    setattr(layer, _SWITCH, False)
    try:
        yield
    finally:
        setattr(layer, _SWITCH, True)
