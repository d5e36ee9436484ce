"""What surefoot changes in a DeepSpeed engine: when layers are gathered, when gradients are reduced, and what a step
does that the guard has rejected. By private names of DeepSpeed, as all of `surefoot.training.engine.deepspeed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from surefoot.models.decoder import decoder_layers
from surefoot.models.forward import language_models


@contextmanager
def overflown(zero: Any, stage: int) -> Iterator[None]:
    """Context in which DeepSpeed's step takes the gradients for overflown and only clears its buffers. A step without
    an update would overwrite the model with DeepSpeed's fp32 weights, also while a comparison of two passes has other
    weights in it."""

    def overflow(*_: bool, **__: bool) -> None:
        zero.overflow = True

    check = "_overflow_check_and_loss_scale_update" if stage == 3 else "check_overflow"
    setattr(zero, check, overflow)
    before = getattr(zero, "check_grad_overflow", None)  # of stages 1 and 2: whether they look
    zero.check_grad_overflow = True
    try:
        yield
    finally:
        zero.check_grad_overflow = before
        delattr(zero, check)


def fetch_by_layer(deepspeed: Any, model: nn.Module) -> None:
    """Make stage 3 gather a decoder layer as one unit. Otherwise a weight is empty outside of its module's forward, but
    PEFT's DoRA computes norms from weights of several modules of a layer, and torch's multi-head attention, the pooling
    head of SigLIP, multiplies with the weight of a module in it."""
    units = {type(layer) for inner in language_models(model) for layer in decoder_layers(inner)}
    units |= {type(one) for one in model.modules() if isinstance(one, nn.MultiheadAttention)}
    if units:
        deepspeed.utils.set_z3_leaf_modules(model, list(units))
    for inner in language_models(model):
        inner.get_input_embeddings().register_forward_hook(_with_gradient)


def reduce_by_parameter(zero: Any) -> list[RemovableHandle]:
    """Reduce each parameter's gradient when it is complete; returns the hooks. DeepSpeed would reduce a unit's
    gradients when the unit's backward ends. A layer used several times, such as by an actor and a critic on one
    backbone, ends once per use, before all its gradients are complete. The order of reductions is that of the autograd
    graph, which is the same on all ranks."""
    for hook in zero._leaf_module_hooks:
        hook.remove()
    zero._leaf_module_hooks.clear()
    return [
        parameter.register_post_accumulate_grad_hook(zero.reduce_ready_partitions_and_remove_grads)
        for parameters in zero.leaf_parameters.values()
        for parameter in parameters
        if parameter.requires_grad
    ]


def reduce_in_order(zero: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Make stage 2 reduce gradients from the last parameter's to the first's, about as the backward pass completes
    them. DeepSpeed would reduce each as soon as it is complete, and so add up different ones if two ranks complete them
    in different orders. In a layer with fast paths the order depends on the rank's own batch."""
    places = {id(one): place for place, one in enumerate(reversed(parameters))}
    reduce, finish = zero.reduce_ready_partitions_and_remove_grads, zero.overlapping_partition_gradients_reduce_epilogue
    waiting: dict[int, tuple[nn.Parameter, int]] = {}  # place -> complete gradient: its parameter and group
    following = 0  # the place of the next one

    def reduce_following(parameter: nn.Parameter, group: int) -> None:
        nonlocal following
        waiting[places[id(parameter)]] = parameter, group
        while following in waiting:
            reduce(*waiting.pop(following))
            following += 1

    def reduce_others_and_finish() -> None:
        """At the end of a backward pass, which may have left parameters out."""
        nonlocal following
        for place in sorted(waiting):
            reduce(*waiting.pop(place))
        following = 0
        finish()

    zero.reduce_ready_partitions_and_remove_grads = reduce_following
    zero.overlapping_partition_gradients_reduce_epilogue = reduce_others_and_finish


def _with_gradient(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Make the output of a frozen embedding require a gradient. DeepSpeed considers a layer's backward finished when
    its input has a gradient; without one, it would finish before the layer's weights have theirs."""
    return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf else output
