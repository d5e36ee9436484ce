"""A trial's numbers are the run's, and it ends early where it is hopeless, and only there."""

import json
from dataclasses import replace

import pytest

from helpers import zoo
from surefoot.config.load import check_config
from surefoot.runs import steps
from surefoot.runs.trial import Rival, held_up, ready, run_trial

STEPS, WARM_UP = 2, 2


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
    zoo.llama3(folder / "llama3")
    rows = [{"instruction": f"say {n}", "output": f"it is {n}"} for n in range(9)]
    (folder / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    return check_config(
        {
            "stage": "sft",
            "model": {"path": str(folder / "llama3")},
            "data": {"train": str(folder / "train.json"), "max_length": 64},
            "adapter": {"kind": "lora", "rank": 4, "dropout": 0.1},
            "batch": {"size": 2},
            "duration": "5 steps",
            "output": str(folder / "run"),
        }
    )


def test_all_steps_are_taken_where_nobody_is_faster(config):
    trial = run_trial(config, steps=STEPS, warm_up=WARM_UP, rival=Rival((1e9,) * (STEPS + 1), 1.0))
    assert (len(trial.losses), len(trial.seconds), len(trial.tokens)) == (WARM_UP, STEPS, STEPS)
    assert trial.beside is None
    assert trial.spread >= 1
    assert 0 <= trial.held_up < 1
    assert trial.paced == (trial.last, *trial.seconds)


def test_what_is_hopeless_is_given_up_with_the_numbers_that_the_gate_wants(config):
    alone = run_trial(config, steps=STEPS, warm_up=WARM_UP, rounds=1)
    beaten = run_trial(config, steps=STEPS, warm_up=WARM_UP, rival=Rival((1e-9,) * (STEPS + 1), 2.0))
    assert (beaten.losses, beaten.grad_norms) == (alone.losses, alone.grad_norms)
    assert beaten.seconds == ()
    assert beaten.beside == pytest.approx(1e-9 / beaten.last)


@pytest.mark.parametrize(
    ("wall", "cpu", "device", "threads", "share"),
    [
        (10.0, 6.0, "cpu", 1, 0.4),
        (10.0, 10.1, "cpu", 1, 0.0),  # a thread that prepares batches
        (10.0, 6.0, "cpu", 2, 0.0),  # the second one waits where work cannot be shared
        (10.0, 6.0, "cuda", 1, 0.0),  # the processor waits for the GPU
    ],
)
def test_others_are_seen_on_one_thread_of_a_cpu_alone(wall, cpu, device, threads, share):
    assert held_up(wall, cpu, device, threads) == pytest.approx(share)


def test_without_a_step_to_time_there_are_the_first_losses(config):
    trial = run_trial(config, steps=0, rounds=1, warm_up=WARM_UP)
    assert (len(trial.losses), trial.seconds, trial.beside) == (WARM_UP, (), None)


def test_processor_time_is_a_clock_too(config):
    trial = run_trial(config, steps=1, rounds=1, warm_up=1, clock="cpu")
    assert trial.seconds[0] > 0
    assert trial.waiting[0] <= trial.seconds[0]


@pytest.mark.parametrize(
    ("seconds", "beaten"),
    [((1.4,), False), ((1.6,), True), ((1.6, 2.8), False), ((1.6, 3.0), True)],
)
def test_steps_are_compared_in_sum_with_as_many_of_the_rivals(seconds, beaten):
    assert Rival((1.0, 2.0, 4.0), 1.5).beats(seconds) is beaten


def test_steps_are_those_of_the_plan_that_set_up_has_settled(config, monkeypatch):
    """As where the device has less room than was planned with."""

    def halved(run, plan, *_):
        return replace(plan, batch=replace(plan.batch, micro=replace(plan.batch.micro, value=1), tokens=None))

    with ready(config, 1) as one:
        assert (one.plan.batch.micro.value, len(one.batches(1))) == (2, 1)
    monkeypatch.setattr(steps, "refit_micro_batches", halved)
    with ready(config, 1) as one:
        assert (one.plan.batch.micro.value, len(one.batches(1))) == (1, 2)
        assert one.loaded.plan == one.plan
