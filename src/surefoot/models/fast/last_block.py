"""The fast path "last_block": after the attention of the last decoder layer, compute only positions that are used.

    undo = last_block_path().install(model)
    logits = logits_at(model, batch, places)     # `surefoot.models.forward` tells it the positions

The last layer needs keys and values of all positions, but its output projection, residual sums, norms and MLP and the
final norm work position by position, so positions that the output head does not need can be skipped. The layer's own
forward runs on the used positions alone; only its attention gets all of them and reduces the input of its output
projection. So this works for any arrangement of a layer: pre-norm, post-norm or both, MLP after attention or parallel.

The output of the final norm has the original shape, with zeros at skipped positions, so the model's later code works
unchanged; the zeros are not used.

Queries are computed for all positions. Skipping them would save about another 1 / (2 + 2 k / q + 3 i / h) of the layer
(8 % in a 125 M Llama), but would require a mask instead of a causal kernel.

The plain pass is used if the skipped positions matter: with dropout in the layer (its masks would differ), if hooks
observe the layer, or if no or nearly all positions are used.

Shapes: B rows of T tokens, N of these B * T positions used, H hidden size.
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
WORTH_IT = 0.9  # fraction of positions; if more are used, skipping saves next to nothing


def last_block_path() -> FastPath:
    return FastPath(NAME, install, obstacle)


def install(model: nn.Module) -> Undo:
    """Install the path in every language model in `model`. Raises ValueError if there is an obstacle."""
    installed = [_Pruned(last_layer(one)) for one in language_models(model)]

    def undo() -> None:
        for one in installed:
            one.remove()

    return undo


def obstacle(model: nn.Module) -> str:
    """Return why positions of this model's last layer cannot be skipped; "" if they can."""
    for one in language_models(model):
        if getattr(one.config, "output_router_logits", False):
            return "its loss uses the router logits of all positions of the last layer"
        try:
            block = last_layer(one)
        except ValueError as error:
            return str(error)
        if _watchers(block):
            return "its last layer has hooks"
    return ""


class _Pruned:
    """A layer with the reduced forward, a bound method of this object, so that copying a model copies it too."""

    def __init__(self, block: LastLayer):
        self.block = block
        self.plain = block.layer.forward
        self._full: torch.Tensor | None = None  # input of attention, [B, T, H], while the layer runs
        self._places: torch.Tensor | None = None
        self._left: tuple[torch.Tensor, torch.Tensor, torch.Size] | None = None  # layer output, places, full shape
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
        """Run the layer on [B, T, H]; return its output, or only [1, N, H] if the final norm's hook restores the
        shape."""
        places, layer = self._read(hidden_states, kwargs), self.block.layer
        if places is None:
            return self.plain(hidden_states, *args, **kwargs)
        rows = partial(self._rows, places, **kwargs)
        if recomputes(layer):
            # Checkpoint the reduced layer as a whole, so that it is recomputed with the same positions.
            rows = partial(layer._gradient_checkpointing_func, rows)  # pyright: ignore[reportArgumentType]
        found = rows(hidden_states, *args)
        if self.block.final is None:
            return _spread(found, places, hidden_states.shape)
        self._left = (found, places, hidden_states.shape)
        return found

    def _read(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the used positions; None for a plain pass."""
        places, layer = rows_read(), self.block.layer
        if places is None or not 0 < len(places) <= WORTH_IT * hidden.shape[0] * hidden.shape[1]:
            return None
        if recomputes(layer) and kwargs.get("past_key_values") is not None:
            return None  # transformers drops the cache in this case
        drops = layer.training and highest_dropout(layer) > 0
        return None if drops or _watchers(self.block) > self._watching else _evened(places, hidden)

    def _rows(self, places: torch.Tensor, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the layer at `places`, [1, N, H]."""
        norm, layer = self.block.norm, self.block.layer
        with self._computing(hidden if norm is None else norm(hidden), places), computed_once(layer):
            # Gemma 4's layers get more than hidden states for each position.
            args = tuple(_at(one, places) if _is_by_position(one, hidden) else one for one in args)
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
    """Add unused positions of hidden [B, T, H] to `places`, so that the number of rows has cached kernels. They are
    computed as in a plain pass, and not used."""
    rows = hidden.shape[0] * hidden.shape[1]
    count = min(round_up_rows(len(places), operand_type(hidden.dtype, hidden.device), hidden.device), rows)
    if count == len(places):
        return places
    unread = torch.ones(rows, dtype=torch.bool, device=hidden.device).index_fill_(0, places, False)
    return torch.cat([places, unread.nonzero().squeeze(1)[: count - len(places)]])


def _is_by_position(value: Any, hidden: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 2 and value.shape[:2] == hidden.shape[:2]


def _at(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Select positions: [B, T, …] -> [1, N, …]."""
    return hidden.flatten(0, 1).index_select(0, places).unsqueeze(0)


def _spread(rows: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scatter positions back: [1, N, H] -> [B, T, H] with zeros elsewhere."""
    empty = rows.new_zeros(shape[0] * shape[1], rows.shape[-1])
    return empty.index_copy(0, places, rows.squeeze(0)).view(*shape[:2], -1)


def _watchers(block: LastLayer) -> int:
    """Count the hooks on the layer, its submodules and the final norm."""
    modules = [*block.layer.modules(), *([] if block.final is None else [block.final])]
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)
