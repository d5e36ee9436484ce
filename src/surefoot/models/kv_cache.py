"""What a model keeps between two tokens that it generates.

For most it is a preallocated key-value cache: new tokens are written into spare memory, without copying the others.
transformers' `DynamicCache` concatenates all keys and values again for every token, which takes a fifth of the time of
decoding a batch on a CPU. The numbers are the same; the tensors are views of larger ones. Costs at most half of the
cache in additional memory. Only for use without gradients.

Models that cannot be given a cache (GPT, RWKV), or keep states that rows cannot be chosen from (RecurrentGemma, xLSTM),
compute all tokens again for each new one.

Shapes: B rows, h heads, S tokens so far, d head size, n new tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import typing
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from surefoot.models.forward import causal_model, narrowed_logits

_LEAST = 32  # smallest spare capacity, in tokens


_OF_STATES = "cache_params"  # argument for the cache of Mamba, Mamba 2 and FalconMamba


class PreallocatedLayer(DynamicLayer):
    """A cache layer whose keys and values [B, h, S, d] are views of the beginning of larger buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = self.get_seq_length()
        wanted = held + key_states.shape[-2]
        # If rows were dropped or reordered, keys and values are copies and no longer views of the buffers.
        if self._room is None or self._room[0].shape[-2] < wanted or not self._is_in(self._room[0]):
            room = wanted + max(_LEAST, wanted // 2)
            made = tuple(new.new_empty((*new.shape[:-2], room, new.shape[-1])) for new in (key_states, value_states))
            if held:
                for one, old in zip(made, (self.keys, self.values), strict=True):
                    assert old is not None
                    one[..., :held, :] = old
            self._room = (made[0], made[1])
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        for one, new in zip(self._room, (key_states, value_states), strict=True):
            one[..., held:wanted, :] = new
        self.keys, self.values = (one[..., :wanted, :] for one in self._room)
        return self.keys, self.values

    def _is_in(self, room: torch.Tensor) -> bool:
        return self.keys is not None and self.keys.data_ptr() == room.data_ptr()


class AllTokens:
    """The tokens so far, [B, S], of a model that computes all of them again for each new one."""

    def __init__(self) -> None:
        self._ids: torch.Tensor | None = None

    def reorder_cache(self, rows: torch.Tensor) -> None:
        """Choose rows of the batch, as `transformers.Cache` does."""
        assert self._ids is not None
        self._ids = self._ids.index_select(0, rows)

    def logits(
        self, model: nn.Module, places: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """As `cached_logits`. Real tokens come first in each row, so that no mask is needed: a model that reads a row
        from left to right does not see the padding."""
        width = input_ids.shape[1]
        self._ids = input_ids if self._ids is None else torch.cat((self._ids, input_ids), dim=1)
        mask = torch.ones_like(self._ids) if attention_mask is None else attention_mask
        order = mask.argsort(dim=1, descending=True, stable=True)
        new = (mask.cumsum(dim=1)[:, -width:] - 1).clamp(min=0).flatten()[places]
        rows = places // width
        return narrowed_logits(model, rows * mask.shape[1] + new, input_ids=self._ids.gather(1, order), use_cache=False)


DecodingCache = DynamicCache | AllTokens


def decoding_cache(model: nn.Module) -> DecodingCache:
    """Return an empty cache for the model; layers of other kinds (sliding windows) are transformers' own."""
    causal = causal_model(model)
    if _cache_argument(type(causal)) is None or _keeps_states(causal):
        return AllTokens()
    cache = DynamicCache(config=causal.config)
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cached_logits(
    model: nn.Module,
    places: torch.Tensor,
    cache: DecodingCache,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **inputs: Any,
) -> torch.Tensor:
    """Return the logits [N, V] at `places`, indices into the B * n positions of the new tokens, and add these to the
    cache.

    input_ids: [B, n].
    attention_mask: [B, S] over all tokens, these included; None if there is no padding.
    """
    if isinstance(cache, AllTokens):
        return cache.logits(model, places, input_ids, attention_mask)
    word = _cache_argument(type(causal_model(model)))
    assert word is not None, "such models get AllTokens"
    if word == _OF_STATES and attention_mask is not None:
        attention_mask = attention_mask[:, -input_ids.shape[1] :]  # their layers multiply the new tokens by it
    given = {word: cache, "use_cache": True, "attention_mask": attention_mask}
    return narrowed_logits(model, places, input_ids=input_ids, **given, **inputs)


def _keeps_states(model: nn.Module) -> bool:
    """Whether layers keep states themselves, as RecurrentGemma's do."""
    return any("recurrent_states" in vars(module) for module in model.modules())


@functools.cache
def _cache_argument(kind: type[nn.Module]) -> str | None:
    """Return the name of the argument of the model's forward that takes a `Cache`; None if there is none. A model takes
    a cache under another name without a word, and sees each new token alone then."""
    arguments = inspect.signature(kind.forward).parameters.items()
    kinds = {name: (argument.annotation, *typing.get_args(argument.annotation)) for name, argument in arguments}
    return next((name for name, own in kinds.items() if Cache in own), None)
