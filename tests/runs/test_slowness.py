"""A run that slows down: one caution that names the cause by its numbers, none without one, and the same results."""

import dataclasses
import json

import pytest

from helpers.faults import gives
from helpers.plans import run_plan
from helpers.tiny_models import tiny_llama
from helpers.toy_model import toy_batches, toy_examples
from surefoot.families.model_facts import read_model_facts
from surefoot.runs import slowness as pace_module
from surefoot.runs.profiling import Arithmetic
from surefoot.runs.slowness import Moment, PaceObserver, causes, slow_sentence
from surefoot.system.counters import Counters, busiest_others, read_counters
from surefoot.training.report import StepReport
from surefoot.training.state import RunState

BATCHES = toy_batches(toy_examples(8), 4)


@dataclasses.dataclass
class OnlyBatches:
    """What the guard changes of a job."""

    batches: object


class Diary:
    def __init__(self):
        self.steps = []

    def step(self, report, state):
        self.steps.append(report.step)


@pytest.fixture
def guard(tmp_path, monkeypatch):
    readings = iter(range(10**6))
    monkeypatch.setattr(pace_module, "read_counters", lambda device: Counters(seconds=float(next(readings))))
    monkeypatch.setattr(pace_module, "busiest_others", lambda seconds, siblings: [("ffmpeg", 7, 1.5)])
    arithmetic = Arithmetic(read_model_facts(tiny_llama(tmp_path)), run_plan(trainable=1, parameters=1), "sft")
    said = []
    observer = PaceObserver(Diary(), arithmetic, said.append, rollouts=False, alone=True)
    return observer, said


def steps(observer, seconds):
    job = observer.watched(OnlyBatches(lambda step: BATCHES))
    for number, one in enumerate(seconds, start=1):
        job.batches(number)
        tokens = sum(batch.tokens for batch in BATCHES)
        report = StepReport(number, 1.0, 1.0, 1e-3, 9, tokens, (), "stepped", None, one)
        observer.step(report, RunState())


def test_a_run_that_slows_down_is_told_once_with_its_cause(guard):
    observer, said = guard
    steps(observer, [1.0] * 60 + [2.0] * 30)
    assert len(said) == 1
    assert "50%" in said[0]
    assert all(gives(said[0], value) for value in ("ffmpeg", 7, 1.5))
    assert observer._observer.steps == list(range(1, 91))


def test_twin_a_steady_run_is_told_nothing(guard):
    observer, said = guard
    steps(observer, [1.0] * 90)
    assert said == []


def test_work_counts_padding_and_attention(guard):
    observer, _ = guard
    effort = observer._arithmetic.effort
    assert effort(BATCHES) == pytest.approx(sum(effort([batch]) for batch in BATCHES))
    longer = dataclasses.replace(BATCHES[0], lengths=tuple(2 * one for one in BATCHES[0].lengths))
    assert effort([longer]) > effort([BATCHES[0]])
    assert json.dumps(effort(BATCHES))


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
