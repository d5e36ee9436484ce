"""Compute the common prefix of a pair of rows once: both answers to a prompt attend to its keys and values.

The prefixes go through the decoder as separate rows and leave their keys and values in a cache; then the rest of each
row follows, at its own positions. Gradients flow through the cache, so the result equals that of whole rows up to
rounding. This does not hold with sliding windows (which drop keys), dropout (drawn once for two rows) or gradient
checkpointing (which keeps no cache); the plan decides (`surefoot.planning.reward`).

Shapes: P pairs, 2P rows of T tokens: row i and row P + i begin with the same prefixes[i] tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import DynamicCache

from surefoot.data.batching.batch import Batch, numbers_on
from surefoot.models.decoder import decoder_of
from surefoot.models.forward import causal_model

# Largest fraction of the padded tokens of whole rows; above it, the second pass and its mask cost more than is saved.
# Measured on a CPU: 0.75 was 1.1 to 1.2 times as fast, 0.6 was 1.4 to 1.7 times.
WORTH_IT = 0.8


def shared_prefixes(rows: Batch, common: Sequence[int]) -> tuple[int, ...] | None:
    """Return the prefix length to compute once per pair, leaving at least one token of each row. None if a pair has no
    common prefix, too few tokens would be saved, or the rows are packed. Depends only on the batch's shape."""
    if not rows.lengths or rows.documents:
        return None
    prefixes = _prefixes(rows.lengths, common)
    return prefixes if _worth_it(rows.lengths, prefixes) else None


def tokens_with_shared(lengths: Sequence[int], common: Sequence[int]) -> int:
    """Return the number of tokens, including padding, that the decoder computes for 2P rows, with shared prefixes if
    that is worth it.

    lengths, common: as in `PairBatch`.
    """
    prefixes = _prefixes(lengths, common)
    return _tokens(lengths, prefixes) if _worth_it(lengths, prefixes) else len(lengths) * max(lengths)


def _prefixes(lengths: Sequence[int], common: Sequence[int]) -> tuple[int, ...]:
    count = len(common)
    shorter = [min(lengths[pair], lengths[count + pair]) for pair in range(count)]
    return tuple(min(same, short - 1) for same, short in zip(common, shorter, strict=True))


def _worth_it(lengths: Sequence[int], prefixes: Sequence[int]) -> bool:
    return min(prefixes) >= 1 and _tokens(lengths, prefixes) <= WORTH_IT * len(lengths) * max(lengths)


def _tokens(lengths: Sequence[int], prefixes: Sequence[int]) -> int:
    count = len(prefixes)
    rest = max(length - prefixes[row % count] for row, length in enumerate(lengths))
    return count * max(prefixes) + 2 * count * rest


def states_behind(model: nn.Module, rows: Batch, prefixes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states [2P, R, H] after the prefixes, with R the longest rest, and their positions [2P, R] in
    the rows; positions of T and above are padding."""
    device, count, longest = rows.input_ids.device, len(prefixes), max(prefixes)
    begin = numbers_on(device, [*prefixes, *prefixes]).unsqueeze(1)  # [2P, 1]
    width = max(length - prefixes[row % count] for row, length in enumerate(rows.lengths))
    places = begin + torch.arange(width, device=device)  # [2P, R]
    # Places beyond a row read its last token: padding, whose values are never used.
    rest = rows.input_ids.gather(1, places.clamp(max=rows.input_ids.shape[1] - 1))
    seen = torch.arange(longest, device=device) < begin  # [2P, longest]: the cache of a shorter prefix ends in padding
    mask = torch.cat([seen, torch.ones_like(places, dtype=torch.bool)], dim=1).long()
    inner = causal_model(model)
    decoder, cache = decoder_of(inner), DynamicCache(config=inner.config)
    decoder(input_ids=rows.input_ids[:count, :longest], past_key_values=cache, use_cache=True)
    cache.batch_select_indices(torch.arange(count, device=device).repeat(2))
    found = decoder(
        input_ids=rest, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
    ).last_hidden_state
    return found, places
