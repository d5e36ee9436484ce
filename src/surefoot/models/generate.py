"""Text generation: batched, with a key-value cache, reproducible, and without side effects on training.

torch's generators are neither used nor changed: sampling draws from a separate stream per prompt, so an answer depends
on (seed, index of the prompt), not on the rest of the batch. A model's `generation_config.json` is not used; only the
arguments count. `transformers.generate` has more features (beams, constraints).

Equal prompts go through the model once. Rows of finished answers are dropped from the batch, a batch without padding
needs no mask, logits are computed at the last position only, and DoRA's norms once for all steps.

Shapes: B prompts, S tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from surefoot.data.batching.batch import Pixels
from surefoot.models.adapters import CachedNorms
from surefoot.models.attention import decoding_context
from surefoot.models.forward import picture_inputs, positions_from_mask
from surefoot.models.kv_cache import DecodingCache, cached_logits, decoding_cache
from surefoot.models.modes import eval_mode

Pictures = Mapping[str, torch.Tensor]  # the result of `surefoot.models.forward.picture_inputs`

_FINISHED = 1 / 8  # fraction of finished rows at which they are dropped, which copies the cache of the others
_INCOMPLETE = "\ufffd"  # tokenizers decode bytes of an incomplete character to it


@dataclass(frozen=True)
class Generated:
    """A generated answer: ids without the stop token, text without special tokens, and whether a stop token ended
    it."""

    ids: tuple[int, ...]
    text: str
    stopped: bool


@dataclass(frozen=True)
class Decoding:
    """Decoding parameters.

    max_new_tokens: limit of an answer's tokens.
    stop_ids: token ids that end an answer.
    pad_id: token id for left padding; it is masked, so any id will do.
    temperature: 0 takes the most likely token.
    top_p: sample from the smallest set of most likely tokens whose probabilities sum to at least this.
    seed: seed of the sampling streams.
    top_k: sample from this many most likely tokens; 0 for all. It is applied before top_p.
    among_kept: whether log-probabilities are normalized over the tokens that top_p and top_k keep; these tokens are
        then returned too.
    never: token ids that are not drawn. Log-probabilities are as if they could be.
    """

    max_new_tokens: int
    stop_ids: Collection[int]
    pad_id: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    among_kept: bool = False
    never: tuple[int, ...] = ()

    @property
    def cuts(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


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
    pictures: Pictures | None = None,
) -> list[Generated]:
    """Generate one answer per prompt (token ids, at least one each), see `Decoding`. The model's mode is restored.

    pictures: image inputs of the prompt; there must be only one prompt then.
    """
    decoding = Decoding(max_new_tokens, stop_ids, pad_id, temperature, top_p, seed)
    answers: list[list[int]] = [[] for _ in prompts]
    with eval_mode(model):
        for tokens in decode(model, prompts, decoding, pictures):
            for answer, token in zip(answers, tokens, strict=True):
                if token is not None:
                    answer.append(token)
    return [finish(answer, tokenizer, stop_ids) for answer in answers]


def decode(
    model: nn.Module, prompts: Sequence[Sequence[int]], decoding: Decoding, pictures: Pictures | None = None
) -> Iterator[list[int | None]]:
    """Yield the next token of every prompt per step; after its stop token a prompt yields None. The model must be in
    eval mode.

    No global state changes between steps, so the caller may do other work in between.
    """
    for drawn in draw_steps(model, prompts, decoding, pictures=pictures):
        tokens: list[int | None] = [None] * len(prompts)
        for row, token in zip(drawn.rows, drawn.tokens, strict=True):
            tokens[row] = token
        yield tokens


@dataclass(frozen=True)
class Drawn:
    """The next token of each unfinished answer.

    rows: indices of the prompts.
    tokens: the token drawn for each.
    logprobs: log-probability of each at the temperature (1 if that is 0), over all tokens or over `kept`.
    kept: tokens that could be drawn, per answer; None if not requested, or if all could.
    """

    rows: list[int]
    tokens: list[int]
    logprobs: list[float]
    kept: list[list[int]] | None = None


def draw_steps(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    places: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    keep_going: Callable[[bool], bool] = bool,
    pictures: Pictures | None = None,
    idle: Sequence[int] | None = None,
) -> Iterator[Drawn]:
    """Like `decode`, but yield the tokens with their log-probabilities.

    places: index of each prompt's sampling stream; None for its row.
    limits: most tokens of each answer; None: decoding.max_new_tokens.
    keep_going: called before every step with whether this rank has unfinished answers. If the forward pass has
        collectives, it returns whether any rank has, and all ranks take the step, even those without prompts.
    pictures: image inputs of the prompt; all prompts must be equal then. The model computes its positions itself.
    idle: prompt for the passes of a rank that has none of its own; None: PAD alone.
    """
    if not all(prompts):
        raise ValueError("a prompt needs at least one token")
    device = next(model.parameters()).device
    running = set(range(len(prompts)))
    prompts = prompts or [idle or [decoding.pad_id]]
    different = {tuple(prompt): number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    if pictures is not None and len(different) != 1:
        raise ValueError("a prompt with pictures must be the only one")
    ids, mask = left_padded(list(different), decoding.pad_id, device)
    cache = decoding_cache(model)
    norms = CachedNorms(model)
    longest = ids.shape[1]
    streams = [np.random.default_rng((decoding.seed, place)) for place in places or range(len(prompts))]
    rows = list(range(len(prompts)))  # row of the batch -> index of the prompt
    for count in range(1, decoding.max_new_tokens + 1):
        if not keep_going(bool(running)):
            return
        padded = any(len(prompts[row]) < longest for row in rows)
        with norms.held():
            past = mask.shape[1] - ids.shape[1]
            logits = next_logits(model, ids, mask if padded else None, cache, past, pictures)
        if len(logits) < len(rows):  # equal prompts were computed once; from here on each has its own row
            chosen_rows = torch.tensor([different[tuple(prompts[row])] for row in rows], device=device)
            cache.reorder_cache(chosen_rows)  # pyright: ignore[reportArgumentType]  # any integer index will do
            logits, mask = logits.index_select(0, chosen_rows), mask.index_select(0, chosen_rows)
        pictures = None if pictures is None else _after_prompt(pictures)
        # From the prompt's own stream, on the host, so that it does not depend on the batch or the device.
        draws = [streams[row].random() if decoding.temperature and row in running else 0.0 for row in rows]
        how = decoding.temperature, decoding.top_p, draws, decoding.top_k, decoding.never
        chosen, logprobs, cut = draw_tokens(logits, *how)
        going = [place for place, row in enumerate(rows) if row in running]
        told = cut if decoding.among_kept else None
        tokens, likely = chosen.tolist(), (logprobs if told is None else logprobs - told.share).tolist()
        if going:
            kept = None if told is None else told.tokens(going)
            yield Drawn([rows[i] for i in going], [tokens[i] for i in going], [likely[i] for i in going], kept)
        running -= {rows[place] for place in going if tokens[place] in decoding.stop_ids}
        running -= {row for row in running if limits is not None and count >= limits[row]}
        ids = chosen.unsqueeze(1)
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
        if running and len(rows) - len(running) >= len(rows) * _FINISHED:
            kept = [place for place, row in enumerate(rows) if row in running]
            chosen_rows = torch.tensor(kept, device=device)
            cache.reorder_cache(chosen_rows)  # pyright: ignore[reportArgumentType]  # any integer index will do
            ids, mask = ids.index_select(0, chosen_rows), mask.index_select(0, chosen_rows)
            rows = [rows[place] for place in kept]


def stream_text(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    decoding: Decoding,
    pictures: Pictures | None = None,
) -> Iterator[str]:
    """Yield the answer to one prompt in pieces of complete characters (one character can take several tokens)."""
    ids: list[int] = []
    shown = ""
    for (token,) in decode(model, [prompt], decoding, pictures):
        if token is None or token in decoding.stop_ids:
            break
        ids.append(token)
        text = _text(tokenizer, ids)
        if not text.endswith(_INCOMPLETE):
            yield text[len(shown) :]
            shown = text
    yield _text(tokenizer, ids)[len(shown) :]


@torch.no_grad()
def next_logits(
    model: nn.Module,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    cache: DecodingCache,
    past: int = 0,
    pictures: Pictures | None = None,
) -> torch.Tensor:
    """Return logits [B, V] in fp32 after the new ids [B, n]; the cache grows by n.

    mask: [B, S] over all tokens so far; None if there is no padding.
    past: number of tokens in the cache, used if mask is None.
    pictures: inputs of the images for `ids` (after the prompt see `_after_prompt`); None for a text-only prompt.
    """
    rows, new = ids.shape
    if pictures is not None:
        positions = None
    elif mask is None:
        positions = torch.arange(past, past + new, device=ids.device).expand(rows, new)
    else:
        positions = positions_from_mask(mask)[:, -new:]
    last = torch.arange(1, rows + 1, device=ids.device) * new - 1
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **(pictures or {})}
    with decoding_context():
        return cached_logits(model, last, cache, **inputs).float()


def _after_prompt(pictures: Pictures) -> Pictures:
    """Return the inputs of the tokens behind a prompt: its pictures are in the cache, and cross-attention reads those
    that the prompt's last token reads."""
    return {name: read[:, -1:] for name, read in pictures.items() if name == "cross_attention_mask"}


def pictures_of(model: nn.Module, ids: Sequence[int], pixels: Pixels, token_id: int) -> Pictures:
    """Return the image inputs of a prompt on the model's device. token_id: id of the image placeholder token."""
    device = next(model.parameters()).device
    seen = (torch.tensor([ids], device=device) == token_id).int()
    return picture_inputs(model, [tuple((name, tensor.to(device)) for name, tensor in pixels)], seen)


def left_padded(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return left-padded ids and mask, [B, longest]; every prompt ends in the last column."""
    longest = max(map(len, prompts))
    ids = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@dataclass(frozen=True)
class Cut:
    """The tokens that top_p and top_k keep.

    order: [B, V], the tokens of each row, most likely first.
    last: [B, 1], index in `order` of the last token that is kept.
    share: [B] fp32, log of the total probability of the kept tokens.
    """

    order: torch.Tensor
    last: torch.Tensor
    share: torch.Tensor

    def tokens(self, rows: Sequence[int]) -> list[list[int]]:
        last = self.last.squeeze(1).tolist()
        return [self.order[row, : last[row] + 1].tolist() for row in rows]


def draw_tokens(
    logits: torch.Tensor,
    temperature: float,
    top_p: float,
    draws: Sequence[float],
    top_k: int = 0,
    never: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, Cut | None]:
    """Draw a token per row of logits [B, V]. Returns the tokens [B], their log-probabilities [B] fp32 at the
    temperature over all tokens, and the kept tokens (None if all are kept).

    temperature: 0 takes the most likely token, with its log-probability at temperature 1.
    draws: [B], uniform in [0, 1), inverted through the cumulative probabilities; these are in the order of the
        vocabulary, or sorted if top_p or top_k applies.
    never: as in `Decoding`.
    """
    # Computed as in the losses, so that equal logits give equal bits.
    log_p = (logits / temperature if temperature not in (0, 1) else logits).log_softmax(dim=-1)
    cut, out = None, [token for token in never if token < logits.shape[1]]  # Llama 3.2 Vision's head lacks its own

    def drawable(values: torch.Tensor) -> torch.Tensor:
        return values.index_fill(1, torch.tensor(out, device=values.device), -torch.inf) if out else values

    if temperature == 0:
        tokens = drawable(logits).argmax(dim=-1)
    else:
        probabilities = drawable(log_p).exp()
        aims = torch.tensor(draws, dtype=torch.float64, device=logits.device).unsqueeze(1)
        if top_p >= 1 and not top_k:
            tokens = _among_all(probabilities, aims)
        else:
            tokens, cut = _among_likeliest(probabilities, aims, top_p, top_k)
    return tokens, log_p.gather(1, tokens.unsqueeze(1)).squeeze(1), cut


def _among_all(probabilities: torch.Tensor, aims: torch.Tensor) -> torch.Tensor:
    # float64: in fp32 the sum over a large vocabulary would miss 1 by more than the rarest tokens' probabilities.
    reached = probabilities.cumsum(dim=-1, dtype=torch.float64)
    return _reached_at(reached, aims * reached[:, -1:])


def _among_likeliest(
    probabilities: torch.Tensor, aims: torch.Tensor, top_p: float, top_k: int
) -> tuple[torch.Tensor, Cut]:
    """Draw from the smallest set of the top_k most likely tokens (0: all) with a share of top_p; at least one token."""
    # Stable, so that of equal probabilities the same tokens are kept on every device.
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(dim=-1, dtype=torch.float64)
    # The sum before a token, not with it: the one that reaches top_p is still inside.
    inside = reached - ordered < top_p
    if 0 < top_k < reached.shape[1]:
        inside = (reached - ordered < top_p * reached[:, top_k - 1 : top_k])[:, :top_k]
    last = (inside.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    whole = reached.gather(1, last)
    found = torch.minimum(_reached_at(reached, aims * whole).unsqueeze(1), last)
    return order.gather(1, found).squeeze(1), Cut(order, last, whole.squeeze(1).log().float())


def _reached_at(reached: torch.Tensor, aims: torch.Tensor) -> torch.Tensor:
    """Return [B], the first index per row at which the cumulative sums [B, V] exceed the aims [B, 1]."""
    # right: an aim that equals a sum belongs to the next token, so one of probability 0 is never drawn. clamp: an aim
    # may round up to the last sum.
    return torch.searchsorted(reached, aims, right=True).clamp(max=reached.shape[1] - 1).squeeze(1)


def finish(answer: list[int], tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> Generated:
    stopped = bool(answer) and answer[-1] in stop_ids
    ids = answer[:-1] if stopped else answer
    return Generated(tuple(ids), _text(tokenizer, ids), stopped)


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text
