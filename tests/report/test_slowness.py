"""Each cause of a slow run is named by its numbers, and none is named where nothing is seen."""

import dataclasses

import pytest

from helpers.faults import gives
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


# Changes of a sound machine, of which each makes one cause, and a figure that its sentence has to give.
PLANTED = [
    (slow(major_faults=4000), [400]),
    (slow(swapped=int(5e9)), [477]),
    (slow(throttled=5.0), ["50%"]),
    (slow(steal=8.0), ["40%"]),
    ({"others": [("ffmpeg", 77, 1.6), ("cc1", 78, 0.3)]}, ["ffmpeg", 77, 1.6]),
    ({"threads": 1}, [1]),
    ({"wait": 0.6, "waited": 0.05}, ["60%"]),
    (slow(recompiles=3), [3]),
    (slow(alloc_retries=2), [2]),
    ({"clock": 0.5}, ["50%"]),
    ({"used": int(15.5e9)}, [14.4, 14.9]),
]


@pytest.mark.parametrize(("changes", "figures"), PLANTED)
def test_a_planted_cause_is_named_and_no_other(changes, figures):
    (found,) = causes(dataclasses.replace(SOUND, **changes))
    assert all(gives(found, figure) for figure in figures)


def test_a_sound_machine_has_no_cause():
    assert list(causes(SOUND)) == []


def test_the_sentence_is_one_line_with_the_two_likeliest_causes():
    moment = dataclasses.replace(SOUND, threads=1, others=[("cc1", 3, 1.0)], used=SOUND.memory)
    first, second, third = causes(moment)
    line = slow_sentence(120, 0.58, 812.4, [first, second, third])
    assert [part in line for part in ("step 120", "58%", "812 tok/s", first, second, third)] == [True] * 5 + [False]
    assert "\n" not in line
    assert slow_sentence(9, 0.6, 500.0, [])


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
