"""Rollouts of PPO: which prompts a rollout answers, its episodes, and the batches to learn from.

A cycle is one rollout and the steps that learn from it: `batches` times `size` prompts are answered, then `epochs`
passes are made over the answers, `size` at a time, each pass in its own random order. The last rollout of an epoch
takes the remaining prompts, so an epoch answers every prompt once. Everything is a function of seed and step.

An episode is a prompt with one answer. Its per-token values are in the order of the answer's tokens, so a batch stores
them flat, in the order of its supervised positions. Checkpoints inside a cycle store episodes as a few flat tensors.

Shapes: N response tokens of a batch, n of one episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from surefoot.data.batching.batch import Batch, Example, RecordName, RowsBatch, collate
from surefoot.data.batching.order import (
    MINIBATCHES,
    REDRAWS,
    Mixture,
    epoch_order,
    permutation,
    step_examples,
    steps_per_epoch,
)
from surefoot.data.formats.conversation import Picture


@dataclass(frozen=True)
class Cycles:
    """The schedule of rollouts and the steps that learn from them.

    size: episodes per optimizer step.
    batches: steps' worth of episodes per rollout.
    epochs: passes over the answers of a rollout.
    data_step: optimizer step -> step whose data it uses; they differ only after a rollback.
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
        """Optimizer steps until every prompt has been answered once."""
        return self.epochs * steps_per_epoch(self.mixture.epoch_size, self.size)

    def place(self, step: int) -> Place:
        """Return the position of optimizer step `step` (from 1) in its cycle."""
        epoch, inside = divmod(self.data_step(step) - 1, self.steps_per_epoch)
        cycle, number = divmod(inside, self.batches * self.epochs)
        rollouts = steps_per_epoch(self.mixture.epoch_size, self.rollout_size)
        left = self.mixture.epoch_size - cycle * self.rollout_size
        steps = self.epochs * steps_per_epoch(min(left, self.rollout_size), self.size)
        return Place(epoch * rollouts + cycle, number, steps)

    def begins_at(self, step: int) -> int:
        """Return the first step, not before `step`, that begins a cycle."""
        place = self.place(step)
        return step if place.begins else step + place.steps - place.number

    def prompts(self, seed: int, rollout: int) -> np.ndarray:
        """Return the data indices of the rollout's prompts, in the order of its episodes."""
        return step_examples(seed, rollout, self.mixture, self.rollout_size)[1]

    def others(self, seed: int, rollout: int, attempt: int, count: int) -> np.ndarray:
        """Return the data indices of `count` replacement prompts from the rollout's epoch; each attempt draws anew."""
        epoch = rollout // steps_per_epoch(self.mixture.epoch_size, self.rollout_size)
        chosen = permutation(seed, (REDRAWS, rollout, attempt), self.mixture.epoch_size)[:count]
        return epoch_order(seed, epoch, self.mixture)[chosen]

    def episodes(self, seed: int, place: Place) -> np.ndarray:
        """Return the indices of the rollout's episodes that the step learns from."""
        count = len(self.prompts(seed, place.rollout))
        passed, batch = divmod(place.number, steps_per_epoch(count, self.size))
        order = permutation(seed, (MINIBATCHES, place.rollout, passed), count)
        return order[batch * self.size : (batch + 1) * self.size]


@dataclass(frozen=True)
class Place:
    """The position of an optimizer step in its cycle.

    rollout: number of the rollout over all epochs, from 0.
    number: number of the step in the cycle, from 0.
    steps: number of steps of the cycle.
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
    """A prompt, the policy's response, and its per-token values, each [n] fp32 on the CPU.

    place: index in its rollout.
    prompt, response: token ids; the response ends with its stop token if it has one.
    number: name of the prompt's record.
    logprobs: log-probabilities of the response's tokens under the policy before the update.
    values: value estimates of the state before each token.
    advantages, returns: of each token.
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
class PpoBatch(RowsBatch):
    """Episodes of one forward pass of PPO.

    rows: prompts with their answers, padded on the right; targets are the answers' tokens.
    old_logprobs, advantages, returns, old_values: [N] fp32, in the order of the supervised positions of `rows`.
    text: examples whose language-modeling loss is added.
    text_share: response tokens of the whole step / supervised tokens of its texts; a sum over the latter times it
        becomes a mean over them when it is added to a sum over response tokens. 0 for a blank text.
    """

    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    old_values: torch.Tensor
    text: Batch | None = None
    text_share: float = 0.0

    @property
    def weight(self) -> int:
        """Number of response tokens."""
        return self.rows.weight

    @property
    def tokens(self) -> int:
        return self.rows.tokens + (0 if self.text is None else self.text.tokens)

    def blank(self) -> PpoBatch:
        return replace(self, rows=self.rows.blank(), text=None if self.text is None else self.text.blank())


def answered_example(
    prompt: Sequence[int],
    response: Sequence[int],
    number: RecordName,
    pieces: Sequence[int] = (),
    pictures: tuple[Picture, ...] = (),
) -> Example:
    """Return a prompt with its answer as an example, of which the drawn tokens are learned.

    number: the record's name.
    pieces: as in `drawn_mask`.
    pictures: of the prompt.
    """
    ids = np.array([*prompt, *response], dtype=np.int64)
    learned = np.append(np.zeros(len(prompt), dtype=bool), drawn_mask(response, pieces))
    return Example(ids, learned, number, pictures)


def drawn_mask(response: Sequence[int], pieces: Sequence[int]) -> np.ndarray:
    """[R] bool, whether a token of the response was drawn by the policy.

    pieces: lengths of its stretches, in turns drawn and given by an environment; () if all was drawn.
    """
    lengths = pieces or [len(response)]
    return np.repeat(np.arange(len(lengths)) % 2 == 0, lengths)


def drawn_count(response: Sequence[int], pieces: Sequence[int]) -> int:
    """Number of drawn tokens of a response."""
    return sum(pieces[::2]) if pieces else len(response)


def episode_batches(episodes: Sequence[Episode], micro: int, pad_id: int) -> list[PpoBatch]:
    """Build batches of at most `micro` episodes, longest first; episodes of equal length keep their order."""
    by_length = sorted(episodes, key=lambda one: len(one.prompt) + len(one.response), reverse=True)
    return [_batch(by_length[start : start + micro], pad_id) for start in range(0, len(by_length), micro)]


def with_texts(batches: Sequence[PpoBatch], texts: Sequence[Batch]) -> list[PpoBatch]:
    """Add one text batch to each of a step's batches; there are at most as many texts as batches. Batches without a
    text get a blank copy of the last one: ranks that share weights wait for each other in every forward pass, so all
    must run equally many."""
    supervised = sum(text.weight for text in texts)
    if not supervised:
        return list(batches)
    share = sum(batch.weight for batch in batches) / supervised
    added = [(text, share) for text in texts]
    added += [(texts[-1].blank(), 0.0)] * (len(batches) - len(texts))
    return [replace(batch, text=text, text_share=share) for batch, (text, share) in zip(batches, added, strict=True)]


def _batch(episodes: Sequence[Episode], pad_id: int) -> PpoBatch:
    return PpoBatch(
        collate([answered_example(one.prompt, one.response, one.number) for one in episodes], pad_id),
        torch.cat([one.logprobs for one in episodes]),
        torch.cat([one.advantages for one in episodes]),
        torch.cat([one.returns for one in episodes]),
        torch.cat([one.values for one in episodes]),
    )


_NUMBERS = ("logprobs", "values", "advantages", "returns")


def episodes_to_tensors(episodes: Sequence[Episode]) -> dict[str, torch.Tensor]:
    """Convert episodes to named flat tensors; {} for no episodes. The caller stores the names of the records."""
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
    """Rebuild the episodes from the tensors of `episodes_to_tensors`.

    numbers: name of each episode's record, in order.
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
