"""Rollouts of PPO: which prompts a rollout answers, the episodes that come of it, and batches of them to learn from.

A cycle is one rollout and the steps that learn from it: `batches` times `size` prompts are answered, then `epochs`
passes are made over the answers, `size` at a time, each pass in an order of its own. The last rollout of an epoch takes
the prompts that are left, so an epoch answers every prompt once. All of it is a function of seed and step alone.

An episode is a prompt with one answer. Its numbers stand beside the answer's tokens, in their order, so a batch holds
them flat in the order of its supervised positions. Checkpoints inside a cycle hold the episodes as a few flat tensors.

Shapes: N response tokens of a batch, n of one episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from surefoot.data.batching.batch import Batch, Example, OfRows, RecordName, collate
from surefoot.data.batching.order import (
    MINIBATCHES,
    REDRAWS,
    Mixture,
    epoch_order,
    permutation,
    step_examples,
    steps_per_epoch,
)


@dataclass(frozen=True)
class Cycles:
    """How rollouts and the steps that learn from them follow each other.

    size: episodes of an optimizer step.
    batches: of a rollout.
    epochs: passes over its answers.
    data_step: which step's place a step has: its own, but after a rollback.
    """

    mixture: Mixture
    size: int
    batches: int
    epochs: int
    data_step: Callable[[int], int] = lambda step: step

    @property
    def rollout_size(self) -> int:
        return self.size * self.batches

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps until every prompt was answered once."""
        return self.epochs * steps_per_epoch(self.mixture.epoch_size, self.size)

    def place(self, step: int) -> Place:
        """Where optimizer step `step` (from 1) stands."""
        epoch, inside = divmod(self.data_step(step) - 1, self.steps_per_epoch)
        cycle, number = divmod(inside, self.batches * self.epochs)
        rollouts = steps_per_epoch(self.mixture.epoch_size, self.rollout_size)
        left = self.mixture.epoch_size - cycle * self.rollout_size
        steps = self.epochs * steps_per_epoch(min(left, self.rollout_size), self.size)
        return Place(epoch * rollouts + cycle, number, steps)

    def begins_at(self, step: int) -> int:
        """The first step from `step` on with which a cycle begins."""
        place = self.place(step)
        return step if place.begins else step + place.steps - place.number

    def prompts(self, seed: int, rollout: int) -> np.ndarray:
        """Places of the rollout's prompts in the data, in the order of its episodes."""
        return step_examples(seed, rollout, self.mixture, self.rollout_size)[1]

    def others(self, seed: int, rollout: int, attempt: int, count: int) -> np.ndarray:
        """Places of `count` prompts of the rollout's epoch, to be answered in place of as many of its own; others for
        each attempt."""
        epoch = rollout // steps_per_epoch(self.mixture.epoch_size, self.rollout_size)
        chosen = permutation(seed, (REDRAWS, rollout, attempt), self.mixture.epoch_size)[:count]
        return epoch_order(seed, epoch, self.mixture)[chosen]

    def episodes(self, seed: int, place: Place) -> np.ndarray:
        """Which of the rollout's episodes the step learns from."""
        count = len(self.prompts(seed, place.rollout))
        passed, batch = divmod(place.number, steps_per_epoch(count, self.size))
        order = permutation(seed, (MINIBATCHES, place.rollout, passed), count)
        return order[batch * self.size : (batch + 1) * self.size]


@dataclass(frozen=True)
class Place:
    """Where an optimizer step stands in its cycle.

    rollout: its number over all epochs, from 0.
    number: of the step in its cycle, from 0.
    steps: of the cycle.
    """

    rollout: int
    number: int
    steps: int

    @property
    def begins(self) -> bool:
        return self.number == 0

    @property
    def ends(self) -> bool:
        return self.number + 1 == self.steps


@dataclass(frozen=True)
class Episode:
    """A prompt, the policy's response, and its numbers: all [n] fp32 on the CPU.

    place: in its rollout.
    prompt, response: token ids; the response ends with its stop token, where it has one.
    logprobs: of the response's tokens under the policy that is about to learn.
    values: of the state before each.
    advantages, returns: of each token.
    number: the prompt's record.
    """

    place: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    number: RecordName
    logprobs: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


@dataclass(frozen=True)
class PpoBatch(OfRows):
    """Episodes that a forward pass of PPO learns from.

    rows: prompts with their answers, padded on the right; targets are the answers' tokens.
    old_logprobs, advantages, returns, old_values: [N] fp32, in the order of the supervised places of `rows`.
    text: examples whose language-modelling loss is mixed in.
    text_share: response tokens of the whole step / supervised tokens of its texts, by which a sum over the latter
        becomes a mean over them where it stands beside a sum over response tokens; 0 beside a blank text.
    """

    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    old_values: torch.Tensor
    text: Batch | None = None
    text_share: float = 0.0

    @property
    def weight(self) -> int:
        """Response tokens."""
        return self.rows.weight

    @property
    def tokens(self) -> int:
        return self.rows.tokens + (0 if self.text is None else self.text.tokens)

    def blank(self) -> PpoBatch:
        return replace(self, rows=self.rows.blank(), text=None if self.text is None else self.text.blank())


def answered_rows(answers: Sequence[tuple[Sequence[int], Sequence[int], RecordName]], pad_id: int) -> Batch:
    """Prompt, response and record of each -> rows whose targets are the responses' tokens."""
    return collate([_example(prompt, response, number) for prompt, response, number in answers], pad_id)


def episode_batches(episodes: Sequence[Episode], micro: int, pad_id: int) -> list[PpoBatch]:
    """Batches of at most `micro` episodes each, longest first; episodes of one length keep their order."""
    by_length = sorted(episodes, key=lambda one: len(one.prompt) + len(one.response), reverse=True)
    return [_batch(by_length[start : start + micro], pad_id) for start in range(0, len(by_length), micro)]


def with_texts(batches: Sequence[PpoBatch], texts: Sequence[Batch]) -> list[PpoBatch]:
    """The batches of one step, each with its share of the texts, of which there are at most as many. Batches beyond the
    last text have a blank copy of it that counts nothing: ranks that share weights wait for each other in every forward
    pass, so all of them must have as many."""
    supervised = sum(text.weight for text in texts)
    if not supervised:
        return list(batches)
    share = sum(batch.weight for batch in batches) / supervised
    beside = [(text, share) for text in texts]
    beside += [(texts[-1].blank(), 0.0)] * (len(batches) - len(texts))
    return [replace(batch, text=text, text_share=share) for batch, (text, share) in zip(batches, beside, strict=True)]


def _example(prompt: Sequence[int], response: Sequence[int], number: RecordName) -> Example:
    ids = np.array([*prompt, *response], dtype=np.int64)
    return Example(ids, np.arange(len(ids)) >= len(prompt), number)


def _batch(episodes: Sequence[Episode], pad_id: int) -> PpoBatch:
    return PpoBatch(
        answered_rows([(one.prompt, one.response, one.number) for one in episodes], pad_id),
        torch.cat([one.logprobs for one in episodes]),
        torch.cat([one.advantages for one in episodes]),
        torch.cat([one.returns for one in episodes]),
        torch.cat([one.values for one in episodes]),
    )


_NUMBERS = ("logprobs", "values", "advantages", "returns")


def episodes_to_tensors(episodes: Sequence[Episode]) -> dict[str, torch.Tensor]:
    """By name; nothing for no episodes. What the records are called stays with the caller: names are no tensors."""
    if not episodes:
        return {}
    return {
        "places": torch.tensor([one.place for one in episodes]),
        "prompts": torch.tensor([token for one in episodes for token in one.prompt]),
        "prompt_lengths": torch.tensor([len(one.prompt) for one in episodes]),
        "responses": torch.tensor([token for one in episodes for token in one.response]),
        "response_lengths": torch.tensor([len(one.response) for one in episodes]),
        **{name: torch.cat([getattr(one, name) for one in episodes]) for name in _NUMBERS},
    }


def episodes_from_tensors(tensors: Mapping[str, torch.Tensor], numbers: Sequence[RecordName]) -> tuple[Episode, ...]:
    """Episodes as `episodes_to_tensors` has written them.

    numbers: of each episode's record, in order.
    """
    if not numbers:
        return ()
    prompts = tensors["prompts"].split(tensors["prompt_lengths"].tolist())
    lengths = tensors["response_lengths"].tolist()
    responses = tensors["responses"].split(lengths)
    tables = [tensors[name].split(lengths) for name in _NUMBERS]
    return tuple(
        Episode(place, tuple(prompt.tolist()), tuple(response.tolist()), number, *(table.clone() for table in own))
        for place, prompt, response, number, *own in zip(
            tensors["places"].tolist(), prompts, responses, numbers, *tables, strict=True
        )
    )
