"""The guard of pace in a run: one caution with a cause, and the same numbers."""

import dataclasses
import json

import pytest

from helpers.faults import gives
from helpers.plans import run_plan
from helpers.tiny_models import tiny_llama
from helpers.toy_model import toy_batches, toy_examples
from surefoot.families.model_facts import read_model_facts
from surefoot.runs import pace as pace_module
from surefoot.runs.pace import PaceObserver
from surefoot.runs.profiling import Arithmetic
from surefoot.system.counters import Counters
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
