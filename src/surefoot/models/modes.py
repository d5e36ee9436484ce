"""Contexts that temporarily change how a model runs: evaluation mode, without torch.compile, without dropout.

    with eval_mode(model): ...          # every module's training flag is restored
    with eager_mode(model): ...         # compiled parts run uncompiled

Each restores the exact previous state, because the modules of one model may have different training flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


def eager_mode(model: nn.Module) -> AbstractContextManager[object]:
    """Context in which compiled parts run eagerly, for passes that run once and should not wait for compilation."""
    if not is_compiled(model):
        return nullcontext()  # set_stance imports the compiler, which takes a second
    return torch.compiler.set_stance("force_eager")


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model is compiled with torch.compile."""
    return any(module._compiled_call_impl is not None for module in model.modules())


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context of evaluation mode; on exit each module's own training flag is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def inference_mode(model: nn.Module) -> Iterator[None]:
    """Context of evaluation mode without gradients. Unlike with `torch.inference_mode`, tensors made inside may be used
    as constants in a later backward pass."""
    with eval_mode(model), torch.no_grad():
        yield


# Attributes of transformers' decoder and attention layers that are passed to functional dropout.
_NAMES = ("dropout", "attention_dropout", "activation_dropout")


def _dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """List (module, attribute) of every dropout probability in the model."""
    places = [(module, "p") for module in model.modules() if isinstance(module, nn.Dropout)]
    functions = [(module, name) for module in model.modules() for name in _NAMES]
    return places + [place for place in functions if isinstance(getattr(*place, None), float)]


def set_dropout(model: nn.Module, share: float) -> None:
    """Set every dropout probability of the model, of modules and of functional calls.

    share: probability, 0 to 1. Layerdrop and config.json do not change, as with DeepSpeed-Chat's --dropout.
    """
    for place in _dropouts(model):
        setattr(*place, share)


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """Context in which every dropout probability is 0; the training mode does not change."""
    before = [(place, getattr(*place)) for place in _dropouts(model)]
    set_dropout(model, 0.0)
    try:
        yield
    finally:
        for place, share in before:
            setattr(*place, share)


def highest_dropout(model: nn.Module) -> float:
    """Return the largest dropout probability of any module, including adapters."""
    return max((getattr(*place) for place in _dropouts(model)), default=0.0)


@contextmanager
def without_randomness(model: nn.Module) -> Iterator[None]:
    """Context in which a forward pass draws no random numbers: no dropout, no NEFTune noise.

    NEFTune checks the outermost module's training flag, so that one is cleared. Layers keep theirs, because gradient
    checkpointing works only in training mode.
    """
    training, model.training = model.training, False
    try:
        with no_dropout(model):
            yield
    finally:
        model.training = training
