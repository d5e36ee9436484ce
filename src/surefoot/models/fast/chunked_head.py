"""The fast path "loss": a model whose output head and cross entropy are computed a few positions at a time.

    undo = loss_path(rows=256).install(model)
    head = chunked_head(model)        # None where the model takes the plain path
    if head is not None:
        loss = summed_loss(hidden_at(model, batch, places), head, targets)

Only a head that is a plain linear layer, and whose output is the model's logits as it is, can be computed outside of
the model: `head_obstacle` says what is in the way. Gemma 2 caps its logits, Granite and Cohere scale them; an adapter
on the head, or a copy of it that PEFT trains, is a module of another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from surefoot.kernels.chunked_loss import Head
from surefoot.models.fast import FastPath, Undo
from surefoot.models.forward import language_models, output_head, short_pass
from surefoot.models.modes import eval_mode

_ROWS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # by output head; a copy of a model is not in it
_SEERS: WeakKeyDictionary[nn.Module, Callable[[torch.Tensor], None]] = WeakKeyDictionary()
_FAR = 64.0  # far from 0, where a cap would show


def loss_path(rows: int) -> FastPath:
    """rows: positions whose logits exist at once."""

    def install(model: nn.Module) -> Undo:
        heads = [output_head(one) for one in language_models(model)]
        for head in heads:
            _ROWS[head] = rows

        def undo() -> None:
            for head in heads:
                _ROWS.pop(head, None)

        return undo

    def obstacle(model: nn.Module) -> str:
        return next(filter(None, map(head_obstacle, language_models(model))), "")

    return FastPath("loss", install, obstacle)


def chunked_head(model: nn.Module) -> Head | None:
    """The head of the one language model in `model`, where the path is installed."""
    head = output_head(model)
    rows = _ROWS.get(head)
    if rows is None:
        return None
    assert isinstance(head, nn.Linear)
    return Head(head.weight, head.bias, rows, _SEERS.get(head))


@contextmanager
def watched_logits(model: nn.Module, see: Callable[[nn.Module, torch.Tensor], None]) -> Iterator[None]:
    """Inside, `see` is shown the logits of every head in `model` where the path is installed, piece by piece: they do
    not pass through the head's module, so no hook on it sees them."""
    heads = [module for module in model.modules() if module in _ROWS]
    for head in heads:
        _SEERS[head] = partial(see, head)
    try:
        yield
    finally:
        for head in heads:
            del _SEERS[head]


def head_obstacle(model: nn.Module) -> str:
    """Why the head of the one language model in `model` cannot be computed outside of it; empty where it can."""
    head = output_head(model)
    if type(head) is not nn.Linear:
        return f"its output head is a {type(head).__name__}, no plain linear layer"
    if is_parametrized(head) or head._forward_pre_hooks or head._forward_hooks:
        return "its output head does more than multiply"
    (base,) = language_models(model)
    return "" if _logits_are_the_heads(base, head) else "the model caps or scales what its head computes"


def _logits_are_the_heads(model: PreTrainedModel, head: nn.Linear) -> bool:
    """Whether the model returns what its head returns. Tried with numbers of our own, so that it depends neither on the
    weights nor on how small the logits happen to be."""
    shown = torch.linspace(-_FAR, _FAR, head.out_features, device=head.weight.device)

    def show(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return shown.to(output.dtype).expand_as(output)

    hook = head.register_forward_hook(show)
    try:
        with eval_mode(model):
            logits = short_pass(model).logits
    finally:
        hook.remove()
    return torch.equal(logits, shown.to(logits.dtype).expand_as(logits))
