"""The fast path "loss": compute output head and cross entropy a few positions at a time.

    undo = loss_path(rows=256).install(model)
    head = chunked_head(model)        # None if the path is not installed
    if head is not None:
        loss = summed_loss(hidden_at(model, batch, places), head, targets)

The head can be computed outside of the model only if it is a plain linear layer, and the model does no more to its
output than config.json says: Gemma 2 caps its logits, Granite and Cohere scale them. `head_obstacle` says what prevents
it; a head with an adapter or in PEFT's modules_to_save is not a plain linear layer.
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

from surefoot.families.logits import read_logit_change
from surefoot.kernels.chunked_loss import Head
from surefoot.models.fast import FastPath, Undo
from surefoot.models.forward import causal_model, language_models, output_head, short_pass
from surefoot.models.modes import eval_mode

_ROWS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # output head -> rows; a copy of a model has no entry
_SEERS: WeakKeyDictionary[nn.Module, Callable[[torch.Tensor], None]] = WeakKeyDictionary()
_FAR = 64.0  # logits this large would show a cap
_ROUNDINGS = 4  # of a division, a tanh and a product


def loss_path(rows: int) -> FastPath:
    """Make the fast path. rows: positions whose logits exist at once."""

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
    """Return the head of the language model in `model` if the path is installed, else None."""
    rows = _ROWS.get(output_head(model))
    return None if rows is None else own_head(model, rows)


def own_head(model: nn.Module, rows: int) -> Head:
    """Return the head of the language model in `model`, which has no `head_obstacle`. rows: see `Head`."""
    head = output_head(model)
    assert isinstance(head, nn.Linear)
    return Head(head.weight, head.bias, rows, *_change_of(causal_model(model)), _SEERS.get(head))


def changes_logits(model: nn.Module) -> bool:
    """Whether config.json says that the language model in `model` scales or caps its head's output."""
    return _change_of(causal_model(model)) != (1.0, None)


def _change_of(model: PreTrainedModel) -> tuple[float, float | None]:
    config = model.config.get_text_config()
    return read_logit_change(lambda key: getattr(config, key, None))


@contextmanager
def watched_logits(model: nn.Module, see: Callable[[nn.Module, torch.Tensor], None]) -> Iterator[None]:
    """Context in which `see(head, output)` is called with the output of every head with the path installed, chunk by
    chunk. It does not pass through the head's module, so hooks on it would not see them."""
    heads = [module for module in model.modules() if module in _ROWS]
    for head in heads:
        _SEERS[head] = partial(see, head)
    try:
        yield
    finally:
        for head in heads:
            del _SEERS[head]


def head_obstacle(model: nn.Module) -> str:
    """Return why the head of the language model in `model` cannot be computed outside of it; "" if it can."""
    head = output_head(model)
    if type(head) is not nn.Linear:
        return f"its output head is a {type(head).__name__}, not a plain linear layer"
    if is_parametrized(head) or head._forward_pre_hooks or head._forward_hooks:
        return "its output head has hooks or a parametrization"
    (base,) = language_models(model)
    return "" if _changes_as_said(base, own_head(base, 1)) else "the model changes its logits in a way of its own"


def _changes_as_said(model: PreTrainedModel, head: Head) -> bool:
    """Whether the model does to its head's output what config.json says. Tested with fixed numbers in place of the
    head's output, so that the result depends neither on the weights nor on the size of the logits."""
    shown = torch.linspace(-_FAR, _FAR, len(head.weight), device=head.weight.device)

    def show(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return shown.expand_as(output)

    hook = output_head(model).register_forward_hook(show)
    try:
        with eval_mode(model):
            logits = short_pass(model).logits
    finally:
        hook.remove()
    said = head.change(shown.clone()).to(logits.dtype).expand_as(logits)
    return torch.allclose(logits, said, rtol=_ROUNDINGS * torch.finfo(logits.dtype).eps, atol=0)
