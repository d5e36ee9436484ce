"""Temporary changes of how a model runs: evaluation mode, without torch.compile, without dropout.

    with eval_mode(model): ...          # every module's training flag comes back as it was
    with eager_mode(model): ...         # compiled parts run uncompiled

Each restores exactly what it found, because modules of one model need not agree on their training flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


def eager_mode(model: nn.Module) -> AbstractContextManager[object]:
    """Inside, compiled parts run eagerly: for passes that are taken once and need not wait for a compiler."""
    if not is_compiled(model):
        return nullcontext()  # the stance imports the compiler, which takes a second
    return torch.compiler.set_stance("force_eager")


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model goes through torch.compile."""
    return any(module._compiled_call_impl is not None for module in model.modules())


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; on exit each module's own training flag is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def inference_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradients. Tensors made inside may take part in a later backward pass as constants, which
    those of `torch.inference_mode` may not."""
    with eval_mode(model), torch.no_grad():
        yield


# Attributes of transformers' decoder and attention layers that are passed to functional dropout.
_NAMES = ("dropout", "attention_dropout", "activation_dropout")


def _dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Module and attribute of every dropout probability in the model."""
    places = [(module, "p") for module in model.modules() if isinstance(module, nn.Dropout)]
    functions = [(module, name) for module in model.modules() for name in _NAMES]
    return places + [place for place in functions if isinstance(getattr(*place, None), float)]


def set_dropout(model: nn.Module, share: float) -> None:
    """Set every dropout probability of the model, of modules and of functional calls.

    share: probability, 0 to 1. Layerdrop and config.json stay as they are, as with DeepSpeed-Chat's --dropout.
    """
    for place in _dropouts(model):
        setattr(*place, share)


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """Every dropout probability is 0 inside and restored on exit; training mode is otherwise untouched."""
    before = [(place, getattr(*place)) for place in _dropouts(model)]
    set_dropout(model, 0.0)
    try:
        yield
    finally:
        for place, share in before:
            setattr(*place, share)


def highest_dropout(model: nn.Module) -> float:
    """The largest dropout probability of any module, adapters included."""
    return max((getattr(*place) for place in _dropouts(model)), default=0.0)


@contextmanager
def without_randomness(model: nn.Module) -> Iterator[None]:
    """Inside, a forward pass draws no random numbers: no dropout, no NEFTune noise.

    NEFTune asks the outermost module's training flag, so that one is cleared. Layers keep theirs: gradient
    checkpointing recomputes only in layers that train.
    """
    training, model.training = model.training, False
    try:
        with no_dropout(model):
            yield
    finally:
        model.training = training
