"""The fast path "last_block": behind the attention of the last decoder layer, only rows that are read go on.

    undo = last_block_path().install(model)
    logits = logits_at(model, batch, places)     # `surefoot.models.forward` says which rows are read

Keys and values of the last layer come from all rows, but what its output projection, residual sums, norms and MLP and
the final norm compute, they compute row by row, and rows that the output head does not need end there. The layer's
own forward runs, on the rows that are read alone; only its attention is given all of them, and narrows what enters its
output projection. So nothing here depends on how a family adds up its parts: norms in front, behind or both, MLP behind
attention or beside it.

What leaves the final norm has its old shape, with zeros in the rows that were left out: what a model does with it from
there on, it can do: the zeros are not read.

Queries are computed for all rows. Without them another 1 / (2 + 2 k / q + 3 i / h) or so of the layer would go (8 % of
it in a 125 M Llama), for a mask in place of every causal kernel.

Where the rows matter to someone else, the pass is the plain one: while a layer drops (its masks would be others), where
hooks look on, where nothing or nearly everything is read.

Shapes: B rows of T tokens, N of these B * T positions read, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from surefoot.kernels.operands import operand_type, round_up_rows
from surefoot.models.checkpointing import computed_once, recomputes
from surefoot.models.decoder import LastLayer, last_layer
from surefoot.models.fast import FastPath, Undo
from surefoot.models.forward import language_models, rows_read
from surefoot.models.modes import highest_dropout

NAME = "last_block"
WORTH_IT = 0.9  # of all rows; where more are read, there is next to nothing to leave out


def last_block_path() -> FastPath:
    return FastPath(NAME, install, obstacle)


def install(model: nn.Module) -> Undo:
    """Into every language model in `model`. Raises ValueError where there is an obstacle."""
    installed = [_Pruned(last_layer(one)) for one in language_models(model)]

    def undo() -> None:
        for one in installed:
            one.remove()

    return undo


def obstacle(model: nn.Module) -> str:
    """Why rows cannot be left out of this model's last layer; empty where they can."""
    for one in language_models(model):
        if getattr(one.config, "output_router_logits", False):
            return "its loss counts how the last layer's experts were chosen, for all rows"
        try:
            block = last_layer(one)
        except ValueError as error:
            return str(error)
        if _watchers(block):
            return "something looks at the rows of its last layer"
    return ""


class _Pruned:
    """The layer with another forward. Bound to modules as methods of this object, a copy of the model gets copies."""

    def __init__(self, block: LastLayer):
        self.block = block
        self.plain = block.layer.forward
        self._full: torch.Tensor | None = None  # what attention reads, [B, T, H], while the layer computes
        self._places: torch.Tensor | None = None
        self._left: tuple[torch.Tensor, torch.Tensor, torch.Size] | None = None  # the layer's rows, places, B T H
        block.layer.forward = self.forward
        self._handles = [
            block.attention.register_forward_pre_hook(self._give_all, with_kwargs=True),
            block.projection.register_forward_pre_hook(self._narrow),
        ]
        if block.final is not None:
            self._handles.append(block.final.register_forward_hook(self._put_back))
        self._watching = _watchers(block)

    def remove(self) -> None:
        del self.block.layer.forward
        for handle in self._handles:
            handle.remove()

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[B, T, H] -> the layer's output, or [1, N, H] of it where the final norm puts them back."""
        places, layer = self._read(hidden_states, kwargs), self.block.layer
        if places is None:
            return self.plain(hidden_states, *args, **kwargs)
        rows = partial(self._rows, places, **kwargs)
        if recomputes(layer):
            # Of the whole of it, so that it is computed again as it was, whoever asks for rows then.
            rows = partial(layer._gradient_checkpointing_func, rows)  # pyright: ignore[reportArgumentType]
        found = rows(hidden_states, *args)
        if self.block.final is None:
            return _spread(found, places, hidden_states.shape)
        self._left = (found, places, hidden_states.shape)
        return found

    def _read(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The places that are read, None for a plain pass."""
        places, layer = rows_read(), self.block.layer
        if places is None or not 0 < len(places) <= WORTH_IT * hidden.shape[0] * hidden.shape[1]:
            return None
        if recomputes(layer) and kwargs.get("past_key_values") is not None:
            return None  # transformers drops the cache there
        drops = layer.training and highest_dropout(layer) > 0
        return None if drops or _watchers(self.block) > self._watching else _evened(places, hidden)

    def _rows(self, places: torch.Tensor, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[1, N, H]."""
        norm, layer = self.block.norm, self.block.layer
        with self._computing(hidden if norm is None else norm(hidden), places), computed_once(layer):
            return self.plain(_at(hidden, places), *args, **kwargs)

    @contextmanager
    def _computing(self, full: torch.Tensor, places: torch.Tensor) -> Iterator[None]:
        self._full, self._places = full, places
        try:
            yield
        finally:
            self._full = self._places = None

    def _give_all(
        self, attention: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._full is None:
            return None
        if inputs:
            return (self._full, *inputs[1:]), named
        return inputs, named | {"hidden_states": self._full}

    def _narrow(self, projection: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return None if self._places is None else (_at(inputs[0], self._places), *inputs[1:])

    def _put_back(self, norm: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        if self._left is None:
            return None
        (found, places, shape), self._left = self._left, None
        return _spread(output, places, shape) if inputs[0] is found else None


def _evened(places: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """With some more of the places in hidden [B, T, H], so that products of these rows find their kernels. They are
    computed as in a plain pass, and not read either."""
    rows = hidden.shape[0] * hidden.shape[1]
    count = min(round_up_rows(len(places), operand_type(hidden.dtype, hidden.device), hidden.device), rows)
    if count == len(places):
        return places
    unread = torch.ones(rows, dtype=torch.bool, device=hidden.device).index_fill_(0, places, False)
    return torch.cat([places, unread.nonzero().squeeze(1)[: count - len(places)]])


def _at(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[B, T, …] -> [1, N, …]."""
    return hidden.flatten(0, 1).index_select(0, places).unsqueeze(0)


def _spread(rows: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[1, N, H] -> [B, T, H] with zeros elsewhere."""
    empty = rows.new_zeros(shape[0] * shape[1], rows.shape[-1])
    return empty.index_copy(0, places, rows.squeeze(0)).view(*shape[:2], -1)


def _watchers(block: LastLayer) -> int:
    """How many hooks there are on the layer, on what is in it and on the final norm."""
    modules = [*block.layer.modules(), *([] if block.final is None else [block.final])]
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)
