"""A model whose decoder goes through torch.compile, for a while as it is written.

Whether a model trains or is asked: every module has a mode of its own, and gets it back.

Dropout of a model's own layers, set to one share: the modules read it, and config.json keeps what it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


def as_written(model: nn.Module) -> AbstractContextManager[object]:
    """Inside, nothing of the model is compiled: for passes that are taken once and need not wait for a compiler."""
    if not is_compiled(model):
        return nullcontext()  # the stance imports the compiler, which takes a second
    return torch.compiler.set_stance("force_eager")


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model goes through torch.compile."""
    return any(module._compiled_call_impl is not None for module in model.modules())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode inside; afterwards every module is in its own mode again, which need not be one for all."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# What decoder layers and attentions of transformers call the share that they pass to a function.
_NAMES = ("dropout", "attention_dropout", "activation_dropout")


def set_dropout(model: nn.Module, share: float) -> None:
    """Every dropout of the model, of modules and of functions, becomes `share`; layers that are left out as a whole
    (layerdrop) stay as they are, as with DeepSpeed-Chat's --dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = share
        for name in _NAMES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, share)


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """Nothing is dropped inside, and everything as before afterwards; what else training mode does, goes on."""
    drops = [(module, "p") for module in model.modules() if isinstance(module, nn.Dropout)]
    functions = [(module, name) for module in model.modules() for name in _NAMES]
    drops += [place for place in functions if isinstance(getattr(*place, None), float)]
    before = [getattr(*place) for place in drops]
    for module, name in drops:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for (module, name), share in zip(drops, before, strict=True):
            setattr(module, name, share)


def highest_dropout(model: nn.Module) -> float:
    """The largest share that any module drops while the model trains; adapters count."""
    shares = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    shares += [
        share
        for module in model.modules()
        for name in _NAMES
        if isinstance(share := getattr(module, name, None), float)
    ]
    return max(shares, default=0.0)


@contextmanager
def without_draws(model: nn.Module) -> Iterator[None]:
    """Nothing is drawn in the block: no dropout; and the model as a whole says that it does not train, which ends
    NEFTune's noise, while its layers go on to: whether they recompute activations hangs on it."""
    training, model.training = model.training, False
    try:
        with no_dropout(model):
            yield
    finally:
        model.training = training
