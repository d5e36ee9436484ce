"""Gradient checkpointing: keep the input of each decoder layer, compute the layer again in the backward pass.

Costs about one more forward pass; saves all activations but one layer's. Gradients are the same, dropout included:
the random state is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from surefoot.models.forward import causal_model


def enable_gradient_checkpointing(
    model: nn.Module, recompute_in: Callable[[], AbstractContextManager[None]] | None = None
) -> None:
    """Turn it on, non-reentrant: that form works with a frozen base, whose inputs need no gradient.

    It acts only in training mode. The backward pass must run under the same attention kernels as the forward pass,
    because it runs attention again. recompute_in: asked in each layer's forward pass for a context, in which the layer
    is computed again, once for every backward pass.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if recompute_in is not None:
        settings["context_fn"] = lambda: (nullcontext(), recompute_in())
    causal_model(model).activation_checkpointing_enable(settings)


def has_gradient_checkpointing(model: nn.Module) -> bool:
    return causal_model(model).is_activation_checkpointing
