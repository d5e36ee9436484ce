"""How much of a run's attention is timed: all of it on a GPU where it has room, what is quick on a CPU."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from helpers.faults import gives
from surefoot.kernels.packed_attention import FORMS, documents_of
from surefoot.planning.measurements import MEMORY_TAKEN, PADDED, times_of
from surefoot.planning.probes import attention
from surefoot.planning.probes import documents as documents_module
from surefoot.planning.probes.attention import attention_trials
from surefoot.planning.probes.documents import DocumentsRequest, document_trials
from surefoot.planning.probes.sizes import (
    AttentionRequest,
    Room,
    Size,
    no_room,
    padded_halves,
    room_on,
    timed_documents,
    timed_lengths,
    timed_size,
    with_scores,
)
from surefoot.planning.probes.timing import LIMITS, NO_ROOM
from surefoot.system import hardware

GIB = 2**30
H200 = Room(LIMITS["cuda"], 139 * GIB)
SMALL = Room(LIMITS["cuda"], 7 * GIB)
CPU = Room(LIMITS["cpu"], None)
LLAMA_8B = AttentionRequest(("flash",), 32, 8, 128, 4096, "bf16", "cuda", rows=4)
# Operations in a second that a forward and backward pass reaches at the least, by type: a T4 has about 20 and 4
# TFLOP/s. Five forms go through once to warm up and once on the clock.
SLOWEST = {"bf16": 2e13, "fp16": 2e13, "fp32": 4e12}
PASSES = 2 * 5


def operations(size: Size, head_dim: int) -> float:
    """Of a causal pass: two products forward and five backward, of half a square each."""
    return 7 * size.rows * size.groups * size.kv_heads * size.tokens**2 * head_dim


def test_an_8b_model_is_timed_as_it_runs():
    assert timed_size(LLAMA_8B, H200) == Size(rows=4, groups=4, kv_heads=8, tokens=4096)
    assert timed_size(LLAMA_8B, H200).less_than(LLAMA_8B) == ""


def test_on_a_cpu_it_is_cut_to_what_takes_tenths_of_a_second():
    size = timed_size(replace(LLAMA_8B, device="cpu", rows=1), CPU)
    assert size == Size(rows=1, groups=4, kv_heads=1, tokens=1024)
    assert timed_size(replace(LLAMA_8B, length=100, device="cpu", rows=1), CPU).rows == 10  # short ones are many


HEADS = [(8, 8), (32, 8), (71, 1), (128, 128)]
WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a number


def test_no_request_takes_more_seconds_or_memory_than_there_are():
    """Of any length; by operations and bytes, counted here once more."""
    for length in [64, 2048, 4096, 32768, 131072]:
        for heads, dtype, free in product(HEADS, WIDTH, [1, 7, 22, 139]):
            asked = f"{heads} heads, {dtype}, {free} GiB"
            room = Room(LIMITS["cuda"], free * GIB)
            request = AttentionRequest(("flash",), *heads, 128, length, dtype, "cuda", rows=8)
            size = timed_size(request, room)
            assert PASSES * operations(size, 128) / SLOWEST[dtype] < LIMITS["cuda"].seconds / 3, asked
            numbers = size.rows * size.groups * size.kv_heads * size.tokens * 128
            beside = 18 if dtype == "fp32" else 12  # bytes for each number of the inputs
            assert numbers * (4 * WIDTH[dtype] + beside) <= room.free / 4, asked
            if part := with_scores(size, room):
                assert 14 * part.rows * part.groups * part.kv_heads * part.tokens**2 <= room.free / 2, asked


def test_what_has_no_room_goes_rows_first_then_heads_then_tokens():
    long = replace(LLAMA_8B, length=32768)
    size = timed_size(long, H200)
    assert (size.rows, size.tokens) == (1, 32768)
    assert 1 <= size.kv_heads < 8
    less = size.less_than(long)
    assert [f"{4 * size.kv_heads} of 32" in less, "1 of 4" in less, "32768" in less] == [True, True, False]
    longer = timed_size(replace(LLAMA_8B, length=131072), H200)
    assert (longer.rows, longer.kv_heads) == (1, 1)
    assert 16384 < longer.tokens < 131072


def test_scores_are_kept_in_part_or_not_at_all():
    whole = timed_size(LLAMA_8B, SMALL)
    part = with_scores(whole, SMALL)
    assert part is not None
    assert (part.rows, part.tokens) == (1, 4096)
    assert part.share_of(whole) < 1
    assert with_scores(whole, H200) == whole  # 34 GiB of scores fit there
    assert with_scores(replace(whole, tokens=32768), SMALL) is None
    said = no_room(replace(whole, tokens=32768), SMALL)
    assert said.startswith(NO_ROOM)
    assert re.findall(r"[\d.]+", said) == ["64.0", "4", "32768", "7.0"]  # GiB of 4 heads and so many tokens; GiB free


def test_memory_is_asked_for_only_where_it_counts(monkeypatch):
    monkeypatch.setattr(hardware, "detect", lambda: pytest.fail("asked"))
    assert room_on(torch.device("cpu")).free is None
    monkeypatch.setattr(hardware, "detect", lambda: replace(hardware.preset("h100"), free=5 * GIB))
    assert room_on(torch.device("cuda")).free == 5 * GIB


def shapes_of(monkeypatch, module):
    """What goes through the passes, told apart from the checks by its length."""
    seen = set()
    real = attention.forward_backward
    monkeypatch.setattr(
        module, "forward_backward", lambda form, given: seen.add(tuple(given[0].shape)) or real(form, given)
    )
    return seen


@pytest.mark.parametrize("free", [GIB, 16 * 2**20, 8 * 2**20])
def test_the_way_of_a_gpu_computes_what_it_says(monkeypatch, free):
    """The very code of a GPU's probe, with its limits, on the CPU. Scores of a head of 640 tokens are
    taken for 6.3 MiB: in half of 16 MiB one has room, and in half of 8 none."""
    seen = shapes_of(monkeypatch, attention)
    request = AttentionRequest(("flash", "math"), 4, 4, 8, 640, "fp32", "cpu", rows=2)
    flash, math = attention_trials(request, limits=LIMITS["cuda"], free=free, budget=0.0)
    timed = {shape for shape in seen if shape[2] not in (333, 704)}
    assert flash.passed
    assert flash.timed == ""
    assert math.failure == ""
    assert set(math.errors) == set(flash.errors)  # it was checked all the same
    whole, part = (2, 4, 640, 8), (1, 1, 640, 8)
    if free == GIB:
        assert timed == {whole}
        assert math.passed
        assert math.timed == ""
    elif free == 16 * 2**20:
        assert timed == {whole, part}
        assert gives(math.timed, "12%")
        assert times_of([flash, math]).endswith(f"({math.timed})")
    else:
        assert timed == {whole}
        assert math.untimed.startswith(NO_ROOM)
        assert (math.passed, math.seconds) == (False, 0.0)


def test_a_part_stands_for_the_whole(monkeypatch):
    """Twin: without the scale the form that was given an eighth of the work would look the fastest."""
    monkeypatch.setattr(attention, "seconds_or_failures", lambda runs, device, **how: (dict.fromkeys(runs, 1.0), {}))
    request = AttentionRequest(("flash", "math"), 4, 4, 8, 640, "fp32", "cpu", rows=2)
    flash, math = attention_trials(request, limits=LIMITS["cuda"], free=16 * 2**20)
    assert (flash.seconds, math.seconds) == (1.0, 8.0)


def of(mix, room, tokens=16384, heads=(4, 8)):
    return timed_documents(mix, *heads, 128, "bf16", tokens, room)


def test_documents_of_a_gpu_are_the_runs_own_in_a_row_as_long_as_its():
    mix = tuple(range(100, 3300, 100))
    taken = of(mix, H200)
    assert taken.kv_heads == 8
    assert max(taken.lengths) > 1024
    assert taken.longest == 3200
    assert 0.8 * 16384 < sum(taken.lengths) < 1.2 * 16384
    assert of(mix, H200, tokens=4096).lengths != taken.lengths
    assert of((200_000,), H200).longest < 200_000  # no pass that takes a second
    assert of((16384,), Room(LIMITS["cuda"], GIB)).kv_heads < 8  # fewer heads where memory is short


LONG_AND_SHORT = (32768,) * 4 + (100,) * 28


@pytest.mark.parametrize("mix", [LONG_AND_SHORT, (131072,) * 32, (40,) * 32, tuple(range(1000, 33000, 1000))])
def test_no_documents_take_more_than_there_is_packed_or_padded(mix):
    grid = product([1, 8, 64], [(4, 8), (71, 1), (1, 128)], ["bf16", "fp32"], [1, 7, 22, 139])
    for micro, heads, dtype, free in grid:
        asked = f"{micro} rows, {heads} heads, {dtype}, {free} GiB"
        room = Room(LIMITS["cuda"], free * GIB)
        taken = timed_documents(mix, *heads, 128, dtype, micro * max(mix), room)
        middle = (len(taken.lengths) + 1) // 2
        halves = [half for half in (taken.lengths[:middle], taken.lengths[middle:]) if half]
        rows = [max(half) for half in halves for _ in half]  # padded
        for lengths in (taken.lengths, rows):
            work = sum(operations(Size(1, heads[0], taken.kv_heads, one), 128) for one in lengths)
            assert work <= LIMITS["cuda"].attention_operations / (4 if dtype == "fp32" else 1), asked
            numbers = heads[0] * taken.kv_heads * sum(lengths) * 128
            beside = 18 if dtype == "fp32" else 12
            assert numbers * (4 * WIDTH[dtype] + beside) <= room.free / 4, asked


@pytest.mark.parametrize("free", [7, 139])
def test_documents_that_are_too_many_keep_what_packing_saves(free):
    """A long one for each seven short ones: rows padded to it are four times as long. Twin: fewer and fewer documents
    of full length end in short ones alone, of which there is nothing to save."""
    taken = timed_documents(LONG_AND_SHORT, 4, 8, 128, "bf16", 8 * 32768, Room(LIMITS["cuda"], free * GIB))
    assert taken.kv_heads >= 1
    assert taken.longest < 32768
    padded = sum(rows * tokens for rows, tokens in padded_halves(taken.lengths))
    assert padded > 3 * sum(taken.lengths)


def test_no_memory_at_all_is_no_endless_search():
    assert timed_documents(LONG_AND_SHORT, 4, 8, 128, "bf16", 4096, Room(LIMITS["cuda"], 0)).lengths == (1,)


def test_documents_of_a_cpu_stay_about_a_thousand_tokens():
    taken = of(tuple(range(100, 3300, 100)), CPU)
    assert taken.kv_heads == 1
    assert max(taken.lengths) <= 1024
    assert sum(taken.lengths) < 2048


def test_the_way_of_a_gpu_times_packed_documents_beside_padded_ones(monkeypatch):
    def sdpa(lengths):
        found = documents_of(lengths, torch.device("cpu"))
        return lambda q, k, v: FORMS["sdpa"](q, k, v, found, 8**-0.5)

    seen = shapes_of(monkeypatch, documents_module)
    request = DocumentsRequest(("sdpa", PADDED), (60, 40, 20), 8, 4, 8, "fp32", "cpu", tokens=120)
    packed, padded = document_trials(request, {"sdpa": sdpa}, limits=LIMITS["cuda"], free=GIB, budget=0.0)
    assert packed.passed
    assert padded.passed
    assert packed.timed == ""
    assert {shape for shape in seen if shape[1] == 8} == {(1, 8, 120, 8), (2, 8, 60, 8), (1, 8, 20, 8)}


def test_lengths_are_taken_from_all_of_the_mix():
    assert timed_lengths((10, 20), 1024, 1024) == (20,) * 34 + (10,) * 34  # about a thousand tokens, as many of each
    assert timed_lengths((5000, 3000), 1024, 1024) == (1024,)
    found = timed_lengths(tuple(range(100, 132)), 1024, 1024)
    assert 7 <= len(found) <= 10
    assert found == tuple(sorted(found, reverse=True))


@pytest.mark.parametrize(("times", "padded"), [(1, 8_000 + 500), (2, 12_000 + 4_500), (3, 20_000 + 6_000)])
def test_a_mix_that_is_taken_again_and_again_is_padded_by_its_halves(times, padded):
    """Twin: side by side as in the mix, each half would have a longest one, and rows as long as it."""
    mix = (4000, 1500, 500)
    lengths = timed_lengths(mix, 4000, times * sum(mix))
    assert lengths == tuple(sorted(mix * times, reverse=True))
    assert sum(rows * tokens for rows, tokens in padded_halves(lengths)) == padded
    wrong = sum(rows * tokens for rows, tokens in padded_halves(mix * times))
    assert (wrong > padded) is (times > 1)


def crowded(monkeypatch, free, memory):
    """A GPU of which others hold what is not free."""
    monkeypatch.setattr(hardware, "detect", lambda: replace(hardware.preset("h100"), free=free, memory=memory))


SMALL_REQUEST = AttentionRequest(("flash", "math"), 4, 4, 8, 640, "fp32", "cpu", rows=2)


@pytest.mark.parametrize(
    ("free", "memory", "says"),
    [
        (16 * 2**20, GIB, ["", f"scaled from 12% of it, {MEMORY_TAKEN}"]),
        (16 * 2**20, 16 * 2**20, ["", "scaled from 12% of it"]),  # it is as small as that
        (
            2**20,
            GIB,
            [f"at 1 of 4 heads and 1 of 2 rows, {MEMORY_TAKEN}", f"at 1 of 4 heads and 1 of 2 rows, {MEMORY_TAKEN}"],
        ),
        (GIB, 80 * GIB, ["", ""]),  # others hold nearly all, and there is room all the same
    ],
)
def test_a_trial_says_that_others_held_the_memory(monkeypatch, free, memory, says):
    crowded(monkeypatch, free, memory)
    trials = attention_trials(SMALL_REQUEST, limits=LIMITS["cuda"], budget=0.0)
    assert [trial.timed for trial in trials] == says
    if free == 2**20:
        assert trials[1].untimed.endswith(MEMORY_TAKEN)


@pytest.mark.parametrize(("memory", "held"), [(GIB, True), (2**17, False)])
def test_so_do_documents(monkeypatch, memory, held):
    crowded(monkeypatch, 2**17, memory)
    request = DocumentsRequest((PADDED,), (60, 40, 20), 8, 4, 8, "fp32", "cpu", tokens=120)
    (padded,) = document_trials(request, {}, limits=LIMITS["cuda"], budget=0.0)
    assert padded.passed
    assert padded.timed.startswith("at ")
    assert (MEMORY_TAKEN in padded.timed) is held
