"""Which examples a step sees follows from seed and step alone, on every machine and in every release."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.faults import raises_fault
from surefoot.data.batching import order
from surefoot.data.batching.order import (
    Mixture,
    Part,
    apportion,
    epoch_order,
    filled_rows,
    mix,
    split,
    step_examples,
    steps_per_epoch,
    whole,
)


def philox_words(key: tuple[int, int], counter: int) -> list[int]:
    """Philox4x64-10 (Salmon et al., 2011) by hand: the four words of one block."""
    mask = 2**64 - 1
    c, k = [counter & mask, counter >> 64 & mask, 0, 0], list(key)
    for _ in range(10):
        low0, low1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(low1 >> 64) ^ c[1] ^ k[0], low1 & mask, (low0 >> 64) ^ c[3] ^ k[1], low0 & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_the_order_is_that_of_philox_words_by_hand():
    key = np.random.SeedSequence(42, spawn_key=(0, 3)).generate_state(2, np.uint64).tolist()
    words = [word for block in range(1, 4) for word in philox_words((key[0], key[1]), block)]
    assert epoch_order(42, 3, whole(12)).tolist() == sorted(range(12), key=lambda place: words[place])


def test_stored_orders_stay():
    """These numbers must never change: they are the order of runs that may be resumed years later."""
    assert epoch_order(42, 0, whole(10)).tolist() == [2, 3, 5, 9, 0, 1, 6, 7, 8, 4]
    assert epoch_order(42, 1, whole(10)).tolist() == [0, 8, 2, 5, 3, 4, 1, 6, 9, 7]
    assert epoch_order(2**32 - 1, 10**6, whole(5)).tolist() == [2, 4, 3, 1, 0]
    assert split([10], 3, seed=42)[0][1].tolist() == [2, 5, 9]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(1, 200), st.integers(1, 40))
def test_an_epoch_holds_every_example_once(seed, epoch, count, batch):
    steps = steps_per_epoch(count, batch)
    seen = [step_examples(seed, epoch * steps + step, whole(count), batch) for step in range(steps)]
    assert {found for found, _ in seen} == {epoch}
    assert [len(indices) for _, indices in seen] == [batch] * (count // batch) + [count % batch] * (count % batch > 0)
    assert np.concatenate([indices for _, indices in seen]).tolist() == epoch_order(seed, epoch, whole(count)).tolist()
    assert sorted(epoch_order(seed, epoch, whole(count))) == list(range(count))


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(seed, epoch, whole(50))) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert tuple(order.permutation(1, (order.HELD_OUT,), 50)) not in orders


def test_a_step_needs_no_step_before_it():
    epoch_order.cache_clear()
    late = step_examples(7, 23, whole(11), 4)
    epoch_order.cache_clear()
    walked = [step_examples(7, step, whole(11), 4) for step in range(24)][23]
    assert (late[0], late[1].tolist()) == (walked[0], walked[1].tolist()) == (7, late[1].tolist())


def test_another_process_gets_the_same():
    code = (
        "from surefoot.data.batching.order import whole; from surefoot.data.batching.order import epoch_order; "
        "print(epoch_order(5, 2, whole(40)).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(epoch_order(5, 2, whole(40)).tolist())


def test_nobody_can_disturb_the_order():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(1, 0, whole(5))[0] = 3


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300), st.integers(0, 9), st.data())
def test_a_split_is_a_partition(count, seed, data):
    held_out = data.draw(st.integers(1, count - 1) | st.floats(0.001, 0.4))
    ((train, evaluation),) = split([count], held_out, seed)
    assert sorted([*train, *evaluation]) == list(range(count))
    assert list(train) == sorted(train)
    assert list(evaluation) == sorted(evaluation)
    assert len(evaluation) == (held_out if isinstance(held_out, int) else max(1, round(held_out * count)))
    assert split([count], held_out, seed)[0][1].tolist() == evaluation.tolist()


@pytest.mark.parametrize(("count", "held_out"), [(10, 10), (10, 1000), (1, 0.5), (3, 0.99)])
def test_a_split_that_leaves_nothing_is_refused(count, held_out):
    with raises_fault("SF-DATA-SHARES", "data.eval", held_out, count):
        split([count], held_out, 0)


mixtures = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4).map(
    lambda sources: Mixture(tuple(count for count, _ in sources), tuple(max(1, quota) for _, quota in sources))
)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 99), mixtures)
def test_a_source_is_seen_whole_before_anything_of_it_comes_again(seed, mixture):
    """Over all epochs, in the order of training: any `count` examples of a source that begin a pass are all of it."""
    row = np.concatenate([epoch_order(seed, epoch, mixture) for epoch in range(5)])
    first = 0
    for count, quota in zip(mixture.counts, mixture.quotas, strict=True):
        own = row[(row >= first) & (row < first + count)] - first
        assert len(own) == 5 * quota
        for start in range(0, len(own) - count + 1, count):
            assert sorted(own[start : start + count]) == list(range(count))
        rest = own[len(own) // count * count :]
        assert len(set(rest)) == len(rest)
        first += count


def test_an_epoch_holds_so_many_of_each_source_and_mixes_them():
    mixture = Mixture((30, 50), (60, 25))
    epochs = [epoch_order(4, epoch, mixture) for epoch in range(3)]
    assert [(int((one < 30).sum()), int((one >= 30).sum())) for one in epochs] == [(60, 25)] * 3
    turns = ["".join("ab"[int(place >= 30)] for place in one) for one in epochs]
    assert len(set(turns)) == 3
    assert all("ab" in turn[:20] and "ba" in turn[-20:] for turn in turns)
    steps = [step_examples(4, step, mixture, 20)[1] for step in range(5)]
    assert np.concatenate(steps).tolist() == epochs[0].tolist()
    assert [len(step) for step in steps] == [20, 20, 20, 20, 5]


def test_mixtures_by_epochs_and_by_weight():
    assert mix([Part("a", 10), Part("b", 30)]) == Mixture((10, 30), (10, 30))
    assert mix([Part("a", 10, epochs=2), Part("b", 30, epochs=0.25), Part("c", 5)]).quotas == (20, 8, 5)
    assert mix([Part("a", 1000, epochs=0.0001)]).quotas == (1,)
    assert mix([Part("a", 10, weight=3), Part("b", 30, weight=1)]) == Mixture((10, 30), (30, 10))
    assert mix([Part("a", 10, weight=1), Part("b", 10, weight=1), Part("c", 2, weight=1)]).quotas == (8, 7, 7)
    for second in (Part("b", 30), Part("b", 30, epochs=1)):
        with raises_fault("SF-DATA-SHARES", "data.train"):
            mix([Part("a", 10, weight=1), second])
    with raises_fault("SF-DATA-SHARES", "data.train"):
        mix([Part("a", 10, weight=1), Part("b", 1, weight=0.001)])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=6), st.data())
def test_whole_numbers_in_proportion(weights, data):
    most = [data.draw(st.integers(0, 30)) for _ in weights]
    total = data.draw(st.integers(0, sum(most)))
    found = apportion(total, weights, most)
    assert sum(found) == total
    assert all(0 <= one <= bound for one, bound in zip(found, most, strict=True))
    free = apportion(100, weights)
    exact = [100 * weight / sum(weights) for weight in weights]
    assert sum(free) == 100
    assert all(abs(one - share) < 1 for one, share in zip(free, exact, strict=True))


def test_a_split_takes_of_every_source_in_proportion():
    halves = split([10, 30, 60], 0.1, seed=3)
    assert [len(taken) for _, taken in halves] == [1, 3, 6]
    assert [sorted([*train, *taken]) for train, taken in halves] == [list(range(count)) for count in (10, 30, 60)]
    assert [len(taken) for _, taken in split([1, 1, 10], 0.5, seed=3)] == [0, 0, 6]  # one of each stays
    assert halves[0][1].tolist() == split([10], 1, seed=3)[0][1].tolist()
    with raises_fault("SF-DATA-SHARES", "data.eval"):
        split([2, 2], 3, seed=3)


# --- the checks above have teeth -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _nothing_remembered():
    epoch_order.cache_clear()
    yield
    epoch_order.cache_clear()


def test_twin_with_one_order_for_all_epochs(monkeypatch):
    honest = order.permutation
    monkeypatch.setattr(order, "permutation", lambda seed, stream, count: honest(seed, stream[:1], count))
    with pytest.raises(AssertionError):
        test_epochs_and_seeds_differ()


def test_twin_with_another_generator_is_seen(monkeypatch):
    monkeypatch.setattr(
        order, "permutation", lambda seed, stream, count: np.random.default_rng((seed, *stream)).permutation(count)
    )
    with pytest.raises(AssertionError):
        test_stored_orders_stay()


def test_twin_that_starts_every_epoch_with_the_same_examples(monkeypatch):
    monkeypatch.setattr(order, "_walk", lambda seed, source, count, start, length: np.arange(length) % count)
    with pytest.raises(AssertionError):
        test_a_source_is_seen_whole_before_anything_of_it_comes_again.hypothesis.inner_test(0, Mixture((5,), (3,)))


def first_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Axolotl's `pack_group` (067b021) without its limit of examples: in turn, each to the first bin with room."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index, length in enumerate(lengths):
        place = next((place for place, left in enumerate(free) if left >= length), None)
        if place is None:
            place = len(bins)
            bins.append([])
            free.append(room)
        bins[place].append(index)
        free[place] -= length
    return bins


@settings(max_examples=50)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=120), st.integers(20, 100), st.integers(0, 3))
def test_rows_are_filled_as_axolotl_fills_them(lengths: list[int], room: int, seed: int):
    turn = order.permutation(seed, (order.ROWS,), len(lengths))
    expected = [turn[row].tolist() for row in first_fit([min(lengths[place], room) for place in turn], room)]
    assert [row.tolist() for row in filled_rows(seed, whole(len(lengths)), np.array(lengths), room)] == expected


def test_rows_depend_on_room_and_seed():
    lengths = np.arange(1, 40)
    found = {tuple(map(tuple, filled_rows(seed, whole(39), lengths, room))) for seed in (0, 1) for room in (64, 80)}
    assert len(found) == 4


def test_rows_refuse_sources_with_weights_of_their_own():
    with raises_fault("SF-DATA-SHARES", "batch.row_tokens"):
        filled_rows(0, Mixture((3, 3), (3, 1)), np.ones(6), 8)


def next_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Axolotl's `allocate_sequentially` (067b021) of one process; torchtune's `PackedDataset` closes rows alike."""
    bins: list[list[int]] = []
    current: list[int] = []
    left = room
    for index, length in enumerate(lengths):
        if length <= left:
            current.append(index)
            left -= length
        else:
            if current:
                bins.append(current)
            current, left = [index], room - length
    return [*bins, current] if current else bins


@settings(max_examples=50)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=120), st.integers(20, 100))
def test_rows_in_the_order_of_the_files_are_filled_in_turn(lengths: list[int], room: int):
    found = filled_rows(3, whole(len(lengths), shuffled=False), np.array(lengths), room)
    assert [row.tolist() for row in found] == next_fit(lengths, room)


def test_the_order_of_the_files_is_that_of_every_epoch():
    mixture = Mixture((3, 2), (3, 5), shuffled=False)
    assert [order.epoch_order(1, epoch, mixture).tolist() for epoch in (0, 1)] == [[0, 1, 2, 3, 4, 3, 4, 3]] * 2
    assert order.epoch_order(1, 0, Mixture((3, 2), (3, 5))).tolist() != [0, 1, 2, 3, 4, 3, 4, 3]  # twin
