"""Which prompts a rollout answers, and which of its answers a step learns from: functions of seed and step alone.

A cycle is one rollout and the steps that learn from it: `batches` times `size` prompts are answered, then `epochs`
passes are made over the answers, `size` at a time, each pass in an order of its own. The last rollout of an epoch takes
the prompts that are left, so an epoch answers every prompt once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from surefoot.data.mixture import Mixture
from surefoot.data.order import MINIBATCHES, permutation, step_examples, steps_per_epoch


@dataclass(frozen=True)
class Cycles:
    """size: episodes of an optimizer step. batches: of a rollout. epochs: passes over its answers. data_step: which
    step's place a step has: its own, but after a rollback."""

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

    def episodes(self, seed: int, place: Place) -> np.ndarray:
        """Which of the rollout's episodes the step learns from."""
        count = len(self.prompts(seed, place.rollout))
        passed, batch = divmod(place.number, steps_per_epoch(count, self.size))
        order = permutation(seed, (MINIBATCHES, place.rollout, passed), count)
        return order[batch * self.size : (batch + 1) * self.size]


@dataclass(frozen=True)
class Place:
    """rollout: its number over all epochs, from 0. number: of the step in its cycle, from 0. steps: of the cycle."""

    rollout: int
    number: int
    steps: int

    @property
    def begins(self) -> bool:
        return self.number == 0

    @property
    def ends(self) -> bool:
        return self.number + 1 == self.steps
