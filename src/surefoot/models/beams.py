"""Beam search: keep the K most likely partial answers at every step, and return the best finished one.

    score of a finished beam = sum of its log probabilities / its number of tokens, including the stop token

This is the algorithm of `transformers.generate(num_beams=K, do_sample=False)` with default settings (length penalty 1,
no early stopping), and tests compare the two token by token. `generate` is not used because it computes every prompt K
times and keeps finished prompts in the batch (1.7 times the CPU time for the published protocol of commonsense tasks
with 4 beams, whose prompts are longer than its answers), and because it uses a model's generation config. Equal weights
and equal batches give equal answers.

Shapes: B prompts, K beams, V vocabulary, S tokens so far.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from surefoot.models.generate import Generated, finish, left_padded, next_logits
from surefoot.models.kv_cache import decoding_cache
from surefoot.models.modes import eval_mode


@dataclass(frozen=True)
class Beam:
    """A partial or finished answer.

    tokens: ids so far, including the stop token.
    score: sum of their log-probabilities; the mean if it is finished.
    """

    tokens: tuple[int, ...]
    score: float


@dataclass
class _Search:
    """State of the search for one prompt.

    place: index of the prompt.
    running: K unfinished beams, most likely first.
    finished: the best K finished beams so far.
    """

    place: int
    running: list[Beam]
    finished: list[Beam] = field(default_factory=list)


def beam_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    beams: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
    pad_id: int,
) -> list[Generated]:
    """Generate one answer per prompt (token ids, at least one each). The model's mode is restored.

    beams: K.
    max_new_tokens: length at which a beam counts as finished.
    stop_ids: token ids that end an answer.
    pad_id: token id for left padding.
    """
    if not all(prompts):
        raise ValueError("a prompt needs at least one token")
    with torch.no_grad(), eval_mode(model):
        found = _search(model, prompts, beams, max_new_tokens, frozenset(stop_ids), pad_id)
    return [finish(list(beam.tokens), tokenizer, stop_ids) for beam in found]


def _search(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    beams: int,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    pad_id: int,
) -> list[Beam]:
    """Return the best finished beam of each prompt."""
    device = next(model.parameters()).device
    ids, mask = left_padded(prompts, pad_id, device)
    cache = decoding_cache(model)
    # Start with one beam instead of K, otherwise all K would be the same.
    searches = [_Search(place, [Beam((), 0.0)]) for place in range(len(prompts))]
    best: list[Beam] = [Beam((), 0.0)] * len(prompts)
    keep = max(2, 1 + len(stop_ids)) * beams  # K can go on even if all stop tokens are among them
    for step in range(1, max_new_tokens + 1):
        candidates = _candidates(next_logits(model, ids, mask, cache), searches, keep)
        rows: list[int] = []  # batch row of each unfinished beam's parent
        going_on: list[_Search] = []
        start = 0
        for search, found in zip(searches, candidates, strict=True):
            width = len(search.running)
            parents = _advance(search, found, beams, stop_ids, last=step == max_new_tokens)
            if step == max_new_tokens or _is_over(search, beams, step):
                best[search.place] = search.finished[0]
            else:
                going_on.append(search)
                rows += [start + parent for parent in parents]
            start += width
        searches = going_on
        if not searches:
            break
        chosen = torch.tensor(rows, device=device)
        cache.reorder_cache(chosen)  # pyright: ignore[reportArgumentType]  # any integer index will do
        mask = mask.index_select(0, chosen)
        ids = torch.tensor([[beam.tokens[-1]] for search in searches for beam in search.running], device=device)
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
    return best


def _candidates(logits: torch.Tensor, searches: Sequence[_Search], keep: int) -> list[list[tuple[int, int, float]]]:
    """Return, per prompt, the most likely continuations of its beams as (beam, token, score), best first.

    logits: [rows, V], the beams of all prompts in order.
    """
    scores = logits.log_softmax(dim=-1)
    before = torch.tensor([beam.score for search in searches for beam in search.running], device=logits.device)
    scores = scores + before[:, None]
    vocabulary, width = logits.shape[1], len(searches[0].running)
    flat = scores.view(len(searches), width * vocabulary)
    values, places = flat.topk(min(keep, flat.shape[1]))
    return [
        [(place // vocabulary, place % vocabulary, value) for value, place in zip(*row, strict=True)]
        for row in zip(values.tolist(), places.tolist(), strict=True)
    ]


def _advance(
    search: _Search, candidates: Sequence[tuple[int, int, float]], beams: int, stop_ids: frozenset[int], *, last: bool
) -> list[int]:
    """Advance a search by one token; return the parent beam of each unfinished beam.

    Only the first K candidates may finish; the others replace them as unfinished beams.

    last: whether this is the last token.
    """
    parents: list[int] = []
    running: list[Beam] = []
    for rank, (parent, token, score) in enumerate(candidates):
        tokens = (*search.running[parent].tokens, token)
        if token in stop_ids or last:
            if rank < beams:
                search.finished.append(Beam(tokens, score / len(tokens)))
        elif len(running) < beams:
            running.append(Beam(tokens, score))
            parents.append(parent)
    search.finished = sorted(search.finished, key=lambda beam: -beam.score)[:beams]
    search.running = running
    return parents


def _is_over(search: _Search, beams: int, step: int) -> bool:
    """Whether K beams are finished and the best unfinished one, at its current length, is no better than any of them.
    Its mean could still rise; not waiting for that is the usual rule, also of the published results."""
    return len(search.finished) == beams and search.running[0].score / step <= search.finished[-1].score
