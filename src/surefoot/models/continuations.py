"""Log-likelihoods of given continuations of a prompt.

    log p(option | prompt) = sum over its tokens t of log softmax(logits_t)[option_t]

They are not divided by the length: options of one question differ by a digit, so their lengths are nearly equal. The
common prefix of a prompt's options is computed once, with the prompt; only the rest is computed per option, with a copy
of the prompt's cache.

Shapes: B prompts, N options of all of them, S tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from surefoot.models.attention import decoding_context
from surefoot.models.forward import narrowed_logits, positions_from_mask
from surefoot.models.generate import left_padded
from surefoot.models.kv_cache import DecodingCache, cached_logits, decoding_cache


@torch.no_grad()
def log_likelihoods(
    model: nn.Module, prompts: Sequence[Sequence[int]], options: Sequence[Sequence[Sequence[int]]], *, pad_id: int
) -> list[list[float]]:
    """Return, for each prompt, the log-likelihood of each of its options in nats. Prompts and options are token ids, at
    least one each. The model must be in eval mode."""
    if not all(prompts) or not all(option for several in options for option in several):
        raise ValueError("a prompt and an option need at least one token")
    shared = [_shared(several) for several in options]
    # The logits after a prefix predict the token that follows it.
    prefixes = [[*prompt, *several[0][:count]] for prompt, several, count in zip(prompts, options, shared, strict=True)]
    device = next(model.parameters()).device
    ids, mask = left_padded(prefixes, pad_id, device)
    tails = [[list(option[count:]) for option in several] for several, count in zip(options, shared, strict=True)]
    needs_cache = any(len(tail) > 1 for several in tails for tail in several)
    cache = decoding_cache(model) if needs_cache else None
    wanted = [count + 1 for count in shared]  # number of last positions of each row whose logits are needed
    logits = _last_logits(model, ids, mask, wanted, cache)
    scores_so_far: list[list[float]] = []
    for row, several, count in zip(logits, options, shared, strict=True):
        scores = row.log_softmax(dim=-1)
        # Python floats: fp32 sums of many log-probabilities would lose the small differences between options.
        start = sum(float(scores[place, several[0][place]]) for place in range(count))
        scores_so_far.append([start + float(scores[count, option[count]]) for option in several])
    if cache is None:
        return scores_so_far
    return _with_tails(model, scores_so_far, tails, mask, cache, pad_id)


@torch.no_grad()
def continuation_scores(
    model: nn.Module, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, pad_id: int
) -> list[tuple[float, bool]]:
    """Return, for each (prompt, continuation), the continuation's log-likelihood in nats and whether greedy decoding
    would produce it. Token ids, at least one each. One forward pass; the model must be in eval mode."""
    device = next(model.parameters()).device
    ids, mask = left_padded([[*prompt, *continuation[:-1]] for prompt, continuation in pairs], pad_id, device)
    logits = _last_logits(model, ids, mask, [len(continuation) for _, continuation in pairs], None)
    scores = []
    for row, (_, continuation) in zip(logits, pairs, strict=True):
        tokens = torch.tensor(list(continuation), device=device)
        likely = row.log_softmax(dim=-1).gather(1, tokens[:, None])
        scores.append((float(likely.double().sum()), bool((row.argmax(dim=-1) == tokens).all())))
    return scores


def _shared(options: Sequence[Sequence[int]]) -> int:
    """Return the length of the options' common prefix, leaving at least one token of each."""
    alike = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*options, strict=False))
    return min(sum(1 for _ in alike), min(map(len, options)) - 1)


def _with_tails(
    model: nn.Module,
    scores_so_far: list[list[float]],
    tails: Sequence[Sequence[Sequence[int]]],
    mask: torch.Tensor,
    cache: DecodingCache,
    pad_id: int,
) -> list[list[float]]:
    """Add the scores of the tokens after the first differing one, for all options at once: [N, longest],
    right-padded."""
    device = mask.device
    owners = [place for place, several in enumerate(tails) for _ in several]
    flat = [tail for several in tails for tail in several]
    longest = max(map(len, flat))
    chosen = torch.tensor(owners, device=device)
    cache.reorder_cache(chosen)  # pyright: ignore[reportArgumentType]  # any integer index will do
    ids = torch.tensor([[*tail, *[pad_id] * (longest - len(tail))] for tail in flat], device=device)
    real = torch.tensor([[1] * len(tail) + [0] * (longest - len(tail)) for tail in flat], device=device)
    mask = torch.cat((mask.index_select(0, chosen), real), dim=1)
    logits = _last_logits(model, ids, mask, [longest] * len(flat), cache)
    more = [
        sum(float(value) for value in row.log_softmax(dim=-1)[range(len(tail) - 1), tail[1:]])
        for row, tail in zip(logits, flat, strict=True)
    ]
    rest = iter(more)
    return [[score + next(rest) for score in several] for several in scores_so_far]


def _last_logits(
    model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, wanted: Sequence[int], cache: DecodingCache | None
) -> list[torch.Tensor]:
    """Return, for each row of ids [B, T], the logits of its last `wanted` positions, [wanted, V] in fp32.

    mask: [B, S].
    """
    rows, width = ids.shape
    places = [
        row * width + width - count + step
        for row, count in zip(range(rows), wanted, strict=True)
        for step in range(count)
    ]
    positions = positions_from_mask(mask)[:, -width:]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    wanted_places = torch.tensor(places, device=ids.device)
    with decoding_context():
        if cache is None:
            logits = narrowed_logits(model, wanted_places, **inputs, use_cache=False)
        else:
            logits = cached_logits(model, wanted_places, cache, **inputs)
    return list(logits.float().split(list(wanted)))
