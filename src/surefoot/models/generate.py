"""Answers from a model: batched, with a key-value cache, repeatable, without a trace in training.

No generator of torch is used or moved: sampling draws from its own stream per prompt, so an answer depends on
(seed, place in the list), not on what else is in the batch. Settings that come with a model (`generation_config.json`)
are not consulted: what is asked for is what runs. `transformers.generate` can do more (beams, constraints).

Shapes: B prompts, S tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedTokenizerBase

from surefoot.models.attention import decoding_context
from surefoot.models.forward import causal_model, narrowed_logits, positions_from_mask

_INCOMPLETE = "\ufffd"  # what tokenizers put for bytes that are no character yet


@dataclass(frozen=True)
class Generated:
    """ids: without the stop token. text: without special tokens. stopped: by a stop token, not by the limit."""

    ids: tuple[int, ...]
    text: str
    stopped: bool


@dataclass(frozen=True)
class Decoding:
    """stop_ids: each ends an answer. pad_id: fills the columns before a shorter prompt; masked, so any id will do.
    temperature: 0 takes the likeliest token. top_p: draw from the fewest likeliest tokens that add up to it."""

    max_new_tokens: int
    stop_ids: Collection[int]
    pad_id: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def generate_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    pad_id: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[Generated]:
    """One answer per prompt (token ids, at least one each), see `Decoding`. The model's mode is restored."""
    decoding = Decoding(max_new_tokens, stop_ids, pad_id, temperature, top_p, seed)
    answers: list[list[int]] = [[] for _ in prompts]
    was_training = model.training
    model.eval()
    try:
        for tokens in decode(model, prompts, decoding):
            for answer, token in zip(answers, tokens, strict=True):
                if token is not None:
                    answer.append(token)
    finally:
        model.train(was_training)
    return [finish(answer, tokenizer, stop_ids) for answer in answers]


def decode(model: nn.Module, prompts: Sequence[Sequence[int]], decoding: Decoding) -> Iterator[list[int | None]]:
    """The next token of every prompt, step by step; a stop token is the last, then None. The model is in eval mode.

    Nothing of the caller's state changes between steps, so the steps can be shown as they come.
    """
    if not all(prompts):
        raise ValueError("a prompt needs at least one token")
    device = next(model.parameters()).device
    ids, mask = left_padded(prompts, decoding.pad_id, device)
    cache = DynamicCache(config=causal_model(model).config)
    streams = [np.random.default_rng((decoding.seed, place)) for place in range(len(prompts))]
    running = [True] * len(prompts)
    for _ in range(decoding.max_new_tokens):
        if not any(running):
            return
        chosen = _choose(next_logits(model, ids, mask, cache), decoding, streams)
        yield [token if alive else None for token, alive in zip(chosen, running, strict=True)]
        running = [alive and token not in decoding.stop_ids for token, alive in zip(chosen, running, strict=True)]
        ids = torch.tensor(chosen, device=device).unsqueeze(1)
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)


def stream_text(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], decoding: Decoding
) -> Iterator[str]:
    """The answer to one prompt in pieces, each as soon as its characters are complete: one can take several tokens."""
    ids: list[int] = []
    shown = ""
    for (token,) in decode(model, [prompt], decoding):
        if token is None or token in decoding.stop_ids:
            break
        ids.append(token)
        text = _text(tokenizer, ids)
        if not text.endswith(_INCOMPLETE):
            yield text[len(shown) :]
            shown = text
    yield _text(tokenizer, ids)[len(shown) :]


@torch.no_grad()
def next_logits(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, cache: Cache) -> torch.Tensor:
    """[B, V] in fp32, after the new ids[B, n]. mask: [B, S] over everything so far; the cache grows by n."""
    positions = positions_from_mask(mask)[:, -ids.shape[1] :]
    rows, new = ids.shape
    last = torch.arange(1, rows + 1, device=ids.device) * new - 1
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with decoding_context():
        return narrowed_logits(model, last, **inputs, past_key_values=cache, use_cache=True).float()


def left_padded(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask, [B, longest]: every prompt ends in the last column, where the answers begin."""
    longest = max(map(len, prompts))
    ids = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _choose(logits: torch.Tensor, decoding: Decoding, streams: Sequence[np.random.Generator]) -> list[int]:
    if decoding.temperature == 0:
        return logits.argmax(dim=-1).tolist()
    rows = logits.double().cpu() / decoding.temperature
    return [sample(row, decoding.top_p, float(stream.random())) for row, stream in zip(rows, streams, strict=True)]


def sample(logits: torch.Tensor, top_p: float, draw: float) -> int:
    """The token at `draw` (0 ≤ draw < 1) on the scale of probabilities, likeliest first, cut where top_p is reached."""
    probabilities, order = logits.softmax(dim=-1).sort(descending=True, stable=True)
    reached = probabilities.cumsum(dim=-1)
    kept = max(1, int((reached - probabilities < top_p).sum()))
    place = int(torch.searchsorted(reached[:kept], draw * reached[kept - 1], right=True))
    return int(order[min(place, kept - 1)])


def finish(answer: list[int], tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> Generated:
    stopped = bool(answer) and answer[-1] in stop_ids
    ids = answer[:-1] if stopped else answer
    return Generated(tuple(ids), _text(tokenizer, ids), stopped)


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text
