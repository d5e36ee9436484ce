"""Each cause of a slow run is named by its numbers, and none is named where nothing is seen."""

import dataclasses

import pytest

from surefoot.report.slowness import Moment, causes, slow_sentence
from surefoot.system.counters import Counters, busiest_others, read_counters

SOUND = Moment(
    before=Counters(seconds=100.0, own=190.0, busy=195.0),
    slow=Counters(seconds=10.0, own=19.0, busy=19.5),
    cores=2,
    threads=2,
    planned=2,
    memory=16 * 10**9,
    used=8 * 10**9,
)


def slow(**changes):
    return {"slow": dataclasses.replace(SOUND.slow, **changes)}


PLANTED = [
    (slow(major_faults=4000), "400 major page faults per second"),
    (slow(swapped=int(5e9)), "swaps 477 MiB per second"),
    (slow(throttled=5.0), "held back by its own processor limit 50% of the time"),
    (slow(steal=8.0), "gives 40% of the processor to other machines (steal)"),
    ({"others": [("ffmpeg", 77, 1.6), ("cc1", 78, 0.3)]}, "other processes take 1.9 of 2 cores: ffmpeg (pid 77) 1.6"),
    ({"threads": 1}, "computes on 1 threads, planned were 2"),
    ({"wait": 0.6, "waited": 0.05}, "60% of a step is spent waiting for data"),
    (slow(recompiles=3), "compiled 3 more graphs"),
    (slow(alloc_retries=2), "was full 2 times"),
    ({"clock": 0.5}, "clock is at 50%"),
    ({"used": int(15.5e9)}, "memory is nearly full: 14.4 GiB of 14.9 GiB"),
]


@pytest.mark.parametrize(("changes", "said"), PLANTED)
def test_a_planted_cause_is_named_and_no_other(changes, said):
    (found,) = causes(dataclasses.replace(SOUND, **changes))
    assert said in found


def test_a_sound_machine_has_no_cause():
    assert list(causes(SOUND)) == []
    assert "no cause was seen" in slow_sentence(9, 0.6, 500.0, [])


def test_the_sentence_is_one_line_with_the_likeliest_causes():
    moment = dataclasses.replace(SOUND, threads=1, others=[("cc1", 3, 1.0)], used=SOUND.memory)
    line = slow_sentence(120, 0.58, 812.4, list(causes(moment)))
    assert line.startswith(
        "step 120: the run has slowed down to 58% of its own median pace for the same work (812 tok/s)"
    )
    assert "other processes" in line
    assert "threads" in line
    assert "nearly full" not in line
    assert "\n" not in line


def test_a_data_wait_that_was_always_there_is_no_cause():
    assert list(causes(dataclasses.replace(SOUND, wait=0.6, waited=0.5))) == []


def test_counters_of_this_machine():
    first = read_counters()
    sum(range(10**6))
    added = read_counters().since(first)
    assert added.seconds > 0
    assert added.own >= 0
    assert added.major_faults >= 0
    assert all(cores >= 0.1 for _, _, cores in busiest_others(0.01))
