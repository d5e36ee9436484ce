"""Groups of answers to the same prompt (GRPO): episodes, batches of them, and their form in checkpoints.

A rollout answers each of its prompts `group` times. A step learns from whole groups, so batch.size, which counts
answers, is a multiple of the group size. `Cycles` decides which prompts a rollout and a step have.

An episode is one answer with its advantage. Checkpoints inside a cycle store the episodes as a few flat tensors.

Shapes: N drawn tokens of a batch, B answers of a batch, n drawn tokens of one answer, M candidate tokens in total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from surefoot.data.batching.batch import Batch, RecordName, RowsBatch
from surefoot.data.batching.loader import Layout, batch_of, filled, grouped
from surefoot.data.batching.rollouts import answered_example, drawn_count
from surefoot.data.tokenize.dataset import TokenizedDataset


@dataclass(frozen=True)
class GroupEpisode:
    """A prompt with one of its answers and the answer's values.

    place: index of its prompt in the rollout.
    member: index of the answer in its group.
    prompt, response: token ids; the response ends with its stop token if it has one.
    number: name of the prompt's record.
    advantage: the same for all tokens of the answer.
    counted: whether it is learned from; if not, it counts only in the denominator of a mean over answers.
    logprobs: [n] fp32 on the CPU, log-probabilities under the policy before the update.
    reference: [n] fp32, log-probabilities under the reference model; None without one.
    weights: [n] fp32, factor of each token's loss; None: 1.
    kept: for each position, the candidate tokens that sampling (top-k, top-p) allowed, over which probabilities are
        normalized; None: the whole vocabulary.
    pieces: which stretches of the response an environment gave, as in `drawn_mask`.
    source: index of its prompt in the data, by which its pictures are found.
    """

    place: int
    member: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    number: RecordName
    advantage: float
    counted: bool
    logprobs: torch.Tensor
    reference: torch.Tensor | None
    weights: torch.Tensor | None = None
    kept: tuple[tuple[int, ...], ...] | None = None
    pieces: tuple[int, ...] = ()
    source: int = 0

    @property
    def drawn(self) -> int:
        """n, the number of tokens that are learned from."""
        return drawn_count(self.response, self.pieces)


@dataclass(frozen=True)
class GroupBatch(RowsBatch):
    """B answers of one forward pass.

    rows: prompts with their answers, padded on the right; targets are the answers' tokens.
    old_logprobs, advantages: [N] fp32, in the order of the supervised positions of `rows`.
    counted: [B] fp32, 1 for an answer that is learned from, else 0.
    weight: denominator of the loss: number of answers, or tokens of those that are learned from.
    reference: [N] fp32, log-probabilities under the reference model; None without one.
    weights: [N] fp32, factor of each token's loss; None: 1.
    kept: [2, M], (token index, candidate token) pairs as in `kept_index`; None: the whole vocabulary.
    """

    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    counted: torch.Tensor
    weight: int
    reference: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    kept: torch.Tensor | None = None


def group_batches(
    episodes: Sequence[GroupEpisode], layout: Layout, *, of_tokens: bool, data: TokenizedDataset | None = None
) -> list[GroupBatch]:
    """Build the batches of a step; answers of equal length keep their order.

    of_tokens: the loss is a mean over tokens, not over answers.
    data: with the prompts' pictures; None: they have none.
    """
    processor = None if data is None else data.processor
    examples = [
        answered_example(one.prompt, one.response, one.number, one.pieces, data.shown(one.source) if data else ())
        for one in episodes
    ]

    def made(group: Sequence[int]) -> GroupBatch:
        rows = batch_of([examples[place] for place in group], layout, processor)
        return _batch([episodes[place] for place in group], rows, of_tokens)

    return list(filled(map(made, grouped(examples, layout, processor)), layout))


def _batch(episodes: Sequence[GroupEpisode], rows: Batch, of_tokens: bool) -> GroupBatch:
    weight = sum(one.counted * one.drawn for one in episodes) if of_tokens else len(episodes)
    return GroupBatch(
        rows,
        torch.cat([one.logprobs for one in episodes]),
        torch.cat([torch.full((one.drawn,), one.advantage) for one in episodes]),
        torch.tensor([float(one.counted) for one in episodes]),
        weight,
        _joined([one.reference for one in episodes]),
        _joined([one.weights for one in episodes]),
        kept_index([one.kept for one in episodes]),
    )


def kept_index(kept: Sequence[tuple[tuple[int, ...], ...] | None]) -> torch.Tensor | None:
    """Flatten the candidate tokens of all answers: [2, M], index of the response token in the batch, and a candidate at
    its position. None if the whole vocabulary was allowed.

    kept: the candidates of each answer, as in `GroupEpisode`.
    """
    every = [place for one in kept for place in one or ()]
    if not every:
        return None
    tokens = torch.repeat_interleave(torch.arange(len(every)), torch.tensor([len(place) for place in every]))
    return torch.stack((tokens, torch.tensor([token for place in every for token in place])))


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    known = [one for one in parts if one is not None]
    return torch.cat(known) if known else None


def groups_to_tensors(episodes: Sequence[GroupEpisode]) -> dict[str, torch.Tensor]:
    """Convert episodes to named flat tensors; {} for no episodes. The caller stores the names of the records."""
    if not episodes:
        return {}
    optional = {
        "reference": _joined([one.reference for one in episodes]),
        "weights": _joined([one.weights for one in episodes]),
    }
    if any(one.kept for one in episodes):
        kept = [place for one in episodes for place in one.kept or ()]
        optional["kept_sizes"] = torch.tensor([len(place) for place in kept])
        optional["kept"] = torch.tensor([token for place in kept for token in place], dtype=torch.int32)
    if any(one.pieces for one in episodes):
        optional["piece_counts"] = torch.tensor([len(one.pieces) for one in episodes])
        optional["pieces"] = torch.tensor([length for one in episodes for length in one.pieces])
    return {
        "places": torch.tensor([(one.place, one.member) for one in episodes]),
        "prompts": torch.tensor([token for one in episodes for token in one.prompt]),
        "prompt_lengths": torch.tensor([len(one.prompt) for one in episodes]),
        "responses": torch.tensor([token for one in episodes for token in one.response]),
        "response_lengths": torch.tensor([len(one.response) for one in episodes]),
        "advantages": torch.tensor([one.advantage for one in episodes], dtype=torch.float64),
        "counted": torch.tensor([one.counted for one in episodes]),
        "sources": torch.tensor([one.source for one in episodes]),
        "logprobs": torch.cat([one.logprobs for one in episodes]),
        **{name: one for name, one in optional.items() if one is not None},
    }


def groups_from_tensors(tensors: Mapping[str, torch.Tensor], numbers: Sequence[RecordName]) -> tuple[GroupEpisode, ...]:
    """Rebuild the episodes from the tensors of `groups_to_tensors`.

    numbers: name of each episode's record, in order.
    """
    if not numbers:
        return ()
    responses = [tuple(one.tolist()) for one in tensors["responses"].split(tensors["response_lengths"].tolist())]
    pieces = [()] * len(numbers)
    if "pieces" in tensors:
        pieces = [tuple(one.tolist()) for one in tensors["pieces"].split(tensors["piece_counts"].tolist())]
    lengths = [drawn_count(*one) for one in zip(responses, pieces, strict=True)]
    prompts = tensors["prompts"].split(tensors["prompt_lengths"].tolist())
    nothing = [None] * len(numbers)
    references, weights = (
        [part.clone() for part in tensors[name].split(lengths)] if name in tensors else nothing
        for name in ("reference", "weights")
    )
    kept = nothing
    if "kept" in tensors:
        places = iter(tensors["kept"].split(tensors["kept_sizes"].tolist()))
        kept = [tuple(tuple(next(places).tolist()) for _ in range(length)) for length in lengths]
    return tuple(
        GroupEpisode(place, member, tuple(prompt.tolist()), response, number, *own)
        for (place, member), prompt, response, number, *own in zip(
            tensors["places"].tolist(),
            prompts,
            responses,
            numbers,
            tensors["advantages"].tolist(),
            tensors["counted"].tolist(),
            [one.clone() for one in tensors["logprobs"].split(lengths)],
            references,
            weights,
            kept,
            pieces,
            tensors["sources"].tolist() if "sources" in tensors else [0] * len(numbers),  # of earlier versions
            strict=True,
        )
    )
