"""Dropout of a model's own layers, set to one share: the modules read it, and config.json keeps what it had."""

from __future__ import annotations

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
