"""Micro-batches hold the step whatever their size; preparing them ahead changes nothing but when it happens."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from helpers.token_files import with_columns
from helpers.toy_model import toy_batches, toy_examples
from surefoot.data.batching import prefetch
from surefoot.data.batching.loader import for_rank, micro_batches, with_progress
from surefoot.data.batching.prefetch import prefetched
from surefoot.data.tokenize.dataset import TokenizedDataset, of_files

LENGTHS = (3, 2, 8)
WAIT = 10  # seconds; a thread that is not there by then never comes


@pytest.fixture
def dataset() -> TokenizedDataset:
    """Three examples of records 1, 2 and 4."""
    offsets = np.cumsum([0, *LENGTHS])
    learned = [
        place >= length - count for length, count in zip(LENGTHS, (1, 2, 5), strict=True) for place in range(length)
    ]
    rows = np.array([[number, 10 * number, 0] for number in (1, 2, 4)])
    return of_files([with_columns("d.json", np.arange(offsets[-1]), np.array(learned), offsets, rows)])


@pytest.mark.parametrize("micro", [1, 2, 3, 7])
@pytest.mark.parametrize("side", ["left", "right"])
def test_micro_batches_hold_the_step_whatever_their_size(dataset, micro, side):
    batches = micro_batches(dataset, np.array([0, 2, 1, 2]), micro, pad_id=0, side=side)
    assert [len(batch.examples) for batch in batches[:-1]] == [micro] * (len(batches) - 1)
    assert [number for batch in batches for number in batch.examples] == [4, 4, 1, 2]  # longest first, ties in order
    assert sum(batch.weight for batch in batches) == 5 + 5 + 1 + 1  # the first token of an example is never a target
    assert sum(batch.tokens for batch in batches) == 8 + 8 + 3 + 2


def test_twin_without_sorting_pads_more(dataset):
    sizes = [batch.input_ids.numel() for batch in micro_batches(dataset, [0, 2, 1, 2], 2, pad_id=0)]
    unsorted = [batch.input_ids.numel() for pair in ([0, 2], [1, 2]) for batch in micro_batches(dataset, pair, 2, 0)]
    assert sum(sizes) == 22
    assert sum(unsorted) == 32


def of_step(step: int) -> list[int]:
    """Stands for a step's micro-batches."""
    return [step, step * step]


@pytest.mark.parametrize("workers", [0, 1, 3, 50])
def test_every_step_gets_its_own_batches(workers):
    with prefetched(of_step, workers, last=20) as batches:
        assert [batches(step) for step in range(4, 21)] == [of_step(step) for step in range(4, 21)]
        assert [batches(step) for step in (20, 3, 9, 9)] == [of_step(step) for step in (20, 3, 9, 9)]  # in any order


def test_steps_are_prepared_ahead_so_many_and_none_beyond_the_last():
    asked: list[int] = []
    known = threading.Condition()

    def prepare(step: int) -> list[int]:
        with known:
            asked.append(step)
            known.notify_all()
        return of_step(step)

    def wait_for(count: int) -> list[int]:
        with known:
            assert known.wait_for(lambda: len(asked) >= count, WAIT)
            return sorted(asked)

    with prefetched(prepare, 2, last=6) as batches:
        batches(1)
        assert wait_for(3) == [1, 2, 3]
        batches(2)
        assert wait_for(4) == [1, 2, 3, 4]
        batches(5)
        assert wait_for(6) == [1, 2, 3, 4, 5, 6]
        batches(6)
    assert sorted(asked) == [1, 2, 3, 4, 5, 6]  # each once


def test_a_fault_is_raised_at_its_step():
    def prepare(step: int) -> list[int]:
        if step == 3:
            raise OSError(step)
        return of_step(step)

    with prefetched(prepare, 4, last=9) as batches:
        assert batches(1) == of_step(1)
        assert batches(2) == of_step(2)
        for _ in range(2):  # asked again, it is tried again
            with pytest.raises(OSError, match="3"):
                batches(3)
        assert batches(4) == of_step(4)


def test_an_interrupt_leaves_no_thread_behind():
    def interrupted() -> None:
        with prefetched(of_step, 3, last=10**6) as batches:
            batches(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_twin_that_hands_out_whatever_is_ready(monkeypatch):
    """Batches by arrival, not by step: the classic queue."""
    monkeypatch.setattr(prefetch.Prefetcher, "__call__", lambda self, step: self._batches(step + 1))
    with pytest.raises(AssertionError):
        test_every_step_gets_its_own_batches(2)


def test_counted_batches_are_the_same_ones_and_tell_what_went_before():
    batches, told = toy_batches(toy_examples(5), 2), []
    assert [batch.examples for batch in with_progress(batches, told.append)] == [batch.examples for batch in batches]
    assert told == [0, 2, 4]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_batches_are_dealt_in_turn_and_every_rank_has_as_many(world):
    batches = toy_batches(toy_examples(5), 1)
    hands = [list(for_rank(iter(batches), rank, world)) for rank in range(world)]
    assert len({len(hand) for hand in hands}) == 1
    names = [batch.examples for turn in zip(*hands, strict=True) for batch in turn]
    assert names[: len(batches)] == [batch.examples for batch in batches]
    assert all(batch.weight == 0 and batch.examples == () for hand in hands for batch in hand if not batch.examples)
    assert sum(batch.weight for hand in hands for batch in hand) == sum(batch.weight for batch in batches)


def test_nothing_is_dealt_of_nothing():
    assert list(for_rank([], 1, 2)) == []
