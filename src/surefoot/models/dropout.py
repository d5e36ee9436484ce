"""Dropout of a model's own layers, set to one share: the modules read it, and config.json keeps what it had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

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
