"""The loop: what is due happens, in order; what was interrupted continues bit for bit."""

import dataclasses
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.faults import raises_fault
from helpers.toy_model import (
    bits,
    same_bits,
    save_checkpoint,
    settings,
    toy_batches,
    toy_engine,
    toy_examples,
    toy_loss,
)
from surefoot.system.errors import Diverged, EnvironmentFault, Fault
from surefoot.system.posting import GivenUp
from surefoot.training import loop
from surefoot.training.checkpoint import load_state, newest_verified
from surefoot.training.engine import ALL
from surefoot.training.evaluation import evaluate_loss
from surefoot.training.interrupt import StopRequest
from surefoot.training.loop import Job, run_loop
from surefoot.training.objective import LossSum
from surefoot.training.optimizer import Schedule
from surefoot.training.optimizer_state import load_optimizer_tensors
from surefoot.training.report import StepReport
from surefoot.training.state import Goal, RunState

EXAMPLES = toy_examples(20)


class Diary:
    """An observer that keeps everything, and can ask to stop after a step."""

    def __init__(self, stop_after=None):
        self.lines = []
        self.losses = {}
        self.stop = StopRequest()
        self.stop_after = stop_after

    def step(self, report, state):
        self.lines.append(f"step {report.step}")
        self.losses[report.step] = report.loss
        if report.step == self.stop_after:
            self.stop.request("SIGTERM")

    def evaluation(self, report, state, improved):
        self.lines.append(f"eval {report.step}{' best' if improved else ''}")

    def saved(self, folder, state):
        self.lines.append(f"save {state.step}")


class Heard:
    """A recorder that keeps what it is told."""

    def __init__(self):
        self.told = []

    def failed(self, attempt, report, finding):
        raise AssertionError("no step of these is not finite")

    def crashed(self, attempt, error):
        self.told.append((attempt, error))


class Braked:
    """What a stage carries, whose limit is met at step 3."""

    def to_json(self):
        return {}

    def tensors(self):
        return {}

    def metrics(self):
        return {"kl": 9.0}

    def learned(self, report):
        if report.step == 3:
            raise Diverged(Fault("step 3", "kl is 9", code="SF-PPO"))


def make_job(folder, engine, **changes):
    def batches(step):
        rows = [EXAMPLES[(step * 4 + k) % len(EXAMPLES)] for k in range(4)]
        return toy_batches(rows, 2)

    def write_model(target):
        save_file(dict(engine.model.state_dict()), target / "model.safetensors")

    def save(state):
        return save_checkpoint(folder, engine, state, write_model=write_model)

    def evaluate(step):
        return evaluate_loss(
            engine.model, toy_loss, toy_batches(EXAMPLES, 5), step=step, settings=settings(), device=engine.device
        )

    job = Job(
        engine=engine,
        objective=toy_loss,
        batches=batches,
        schedules={ALL: Schedule("cosine", 0.05, total=12, warmup=2)},
        settings=settings(),
        total_steps=12,
        evaluate=evaluate,
        eval_steps=frozenset({5, 12}),
        save=save,
        save_steps=frozenset({4, 8, 12}),
        keep_best=True,
        goal=Goal(),
        max_consecutive=3,
        max_recent=3,
        clip_spikes=True,
        patience=None,
        min_delta=0.0,
    )
    return dataclasses.replace(job, **changes)


def resume(folder, **changes):
    checkpoint, _ = newest_verified(folder)
    state, tensors = load_state(checkpoint)
    engine = toy_engine(dropout=0.3)
    engine.model.load_state_dict(load_file(checkpoint.folder / "model.safetensors"))
    load_optimizer_tensors(engine.optimizer, engine.parameters, tensors)
    return make_job(folder, engine, **changes), state


def test_a_step_that_meets_a_limit_of_its_stage_is_told_before_the_run_ends(tmp_path):
    diary = Diary()
    with raises_fault("SF-PPO", "step 3"):
        run_loop(make_job(tmp_path, toy_engine(), memory=Braked()), RunState(), diary, diary.stop)
    assert diary.lines == ["step 1", "step 2", "step 3"]


def test_order_of_events(tmp_path):
    diary = Diary()
    outcome = run_loop(make_job(tmp_path, toy_engine()), RunState(), diary, diary.stop)
    assert outcome.reason == "finished"
    expected = [f"step {n}" for n in range(1, 13)]
    expected.insert(4, "save 4")
    expected[6:6] = ["eval 5 best", "save 5"]  # a new best is saved although no save is due
    expected.insert(expected.index("step 9"), "save 8")
    assert diary.lines == [*expected, "eval 12 best", "save 12"]


def took(folder, monkeypatch, slow):
    """What a run of the toy took on a clock that only moves where `slow` is at work, a second each time."""
    now = [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    job = make_job(folder, toy_engine())

    def slowed(work):
        def working(*args):
            now[0] += 1.0
            return work(*args)

        return working

    job = dataclasses.replace(job, **{slow: slowed(getattr(job, slow))})
    diary = Diary()
    state = run_loop(job, RunState(), diary, diary.stop).state
    monkeypatch.undo()
    return {what: seconds for what, seconds in state.beside.items() if seconds}, diary.lines


@pytest.mark.parametrize(("slow", "what", "count"), [("batches", "batches", 12), ("evaluate", "evaluation", 2)])
def test_time_goes_to_what_took_it(tmp_path, monkeypatch, slow, what, count):
    assert took(tmp_path, monkeypatch, slow)[0] == {what: float(count)}


def test_saving_is_told_of_apart_and_the_next_checkpoint_knows_of_the_last(tmp_path, monkeypatch):
    found, lines = took(tmp_path, monkeypatch, "save")
    saves = sum(line.startswith("save") for line in lines)
    assert found == {"saving": float(saves)}
    assert load_state(newest_verified(tmp_path)[0])[0].beside["saving"] == saves - 1.0


@pytest.mark.parametrize("stops", [[1], [5], [3, 4, 9], [12], [5, 6, 11]])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path, stops):
    straight, broken = tmp_path / "a", tmp_path / "b"
    whole, diary = toy_engine(dropout=0.3), Diary()
    final = run_loop(make_job(straight, whole), RunState(), diary, diary.stop).state
    losses, lines = {}, []
    job, state = make_job(broken, toy_engine(dropout=0.3)), RunState()
    for stop_after in [*stops, None]:
        part = Diary(stop_after)
        outcome = run_loop(job, state, part, part.stop)
        assert outcome.reason == ("interrupted" if stop_after else "finished")
        losses |= part.losses
        lines += [line for line in part.lines if line.startswith("eval")]
        job, state = resume(broken)
    assert losses == diary.losses
    assert lines == [line for line in diary.lines if line.startswith("eval")]
    assert same_bits(bits(whole), bits(job.engine))
    assert dataclasses.replace(state, seconds=0, beside={}) == dataclasses.replace(final, seconds=0, beside={})


@pytest.mark.parametrize("where", ["evaluate", "save"])
def test_a_signal_while_evaluating_or_saving_ends_the_run_there(tmp_path, where):
    """No further step, no second save; an evaluation that gave up is done again on resume."""
    engine, diary = toy_engine(dropout=0.3), Diary()
    job = make_job(tmp_path / "b", engine, eval_steps=frozenset({4, 12}))
    save = job.save

    def interrupted_evaluation(step):
        diary.stop.request("SIGTERM")

    def interrupted_save(state):
        diary.stop.request("SIGTERM")
        return save(state)

    changes = {"evaluate": interrupted_evaluation} if where == "evaluate" else {"save": interrupted_save}
    outcome = run_loop(dataclasses.replace(job, **changes), RunState(), diary, diary.stop)
    assert (outcome.reason, outcome.state.step) == ("interrupted", 4)
    assert diary.lines.count("save 4") == 1
    assert diary.lines[-1] == "save 4"
    whole, straight = toy_engine(dropout=0.3), Diary()
    run_loop(make_job(tmp_path / "a", whole, eval_steps=frozenset({4, 12})), RunState(), straight, straight.stop)
    job, state = resume(tmp_path / "b", eval_steps=frozenset({4, 12}))
    rest = Diary()
    run_loop(job, state, rest, rest.stop)
    assert same_bits(bits(whole), bits(job.engine))
    evaluations = [line for line in diary.lines + rest.lines if line.startswith("eval")]
    assert evaluations == [line for line in straight.lines if line.startswith("eval")]


@pytest.mark.parametrize("step", [1, 3, 5])
def test_batches_that_are_given_up_end_the_run_with_the_step_before(tmp_path, step):
    """A server was asked for them, and the run is to stop; after step 4 it has been saved already."""
    job = make_job(tmp_path, toy_engine(dropout=0.3), eval_steps=frozenset())

    def batches(number):
        if number == step:
            raise GivenUp(Fault("http://127.0.0.1:9", "was given up", code="SF-SERVER"))
        return job.batches(number)

    diary = Diary()
    outcome = run_loop(dataclasses.replace(job, batches=batches), RunState(), diary, diary.stop)
    assert (outcome.reason, outcome.state.step) == ("interrupted", step - 1)
    assert [line for line in diary.lines if line.startswith("save")] == ([f"save {step - 1}"] if step > 1 else [])


def test_twin_resume_without_moments_differs(tmp_path):
    whole, diary = toy_engine(dropout=0.3), Diary()
    run_loop(make_job(tmp_path / "a", whole), RunState(), diary, diary.stop)
    part = Diary(6)
    run_loop(make_job(tmp_path / "b", toy_engine(dropout=0.3)), RunState(), part, part.stop)
    job, state = resume(tmp_path / "b")
    job.engine.optimizer.state.clear()
    rest = Diary()
    run_loop(job, state, rest, rest.stop)
    assert not same_bits(bits(whole), bits(job.engine))


def test_a_finished_run_does_nothing_more(tmp_path):
    diary = Diary()
    run_loop(make_job(tmp_path, toy_engine(dropout=0.3)), RunState(), diary, diary.stop)
    job, state = resume(tmp_path)
    again = Diary()
    assert run_loop(job, state, again, again.stop).reason == "finished"
    assert again.lines == []


def test_patience_ends_the_run_and_saves(tmp_path):
    engine, diary = toy_engine(), Diary()
    job = make_job(
        tmp_path,
        engine,
        schedules={ALL: Schedule("constant", 1e-12, 12, 0)},
        eval_steps=frozenset(range(1, 13)),
        patience=2,
        min_delta=0.1,
    )
    outcome = run_loop(job, RunState(), diary, diary.stop)
    assert outcome.reason == "early_stopped"
    assert outcome.state.step == 3  # the first evaluation sets the mark, two more do not beat it
    assert diary.lines[-1] == "save 3"


def poisoned_from(step):
    """The loss is NaN from `step` on, counted by calls (two micro-batches a step)."""
    calls = iter(range(2, 10**6))

    def objective(model, batch):
        out = toy_loss(model, batch)
        return LossSum(out.loss * float("nan")) if next(calls) // 2 >= step else out

    return objective


@pytest.mark.parametrize(
    ("origin", "times"),
    [
        ("x was the first non-finite value (examples 0, 1, 2, 3, 4, 5, 6, 7 and 32 more)", 1),
        ("x was the first non-finite value (examples 8, 9)", 2),  # of one micro-batch among several
        ("a replay of it was finite", 1),
    ],
)
def test_the_line_names_a_few_examples_and_each_list_once(origin, times, monkeypatch):
    report = StepReport(8, None, None, 1e-3, 40, 99, tuple(range(40)), "non_finite", "loss", 0.1)
    said = str(loop._diverged(report, RunState(), origin, 3))
    assert said.count("examples 0, 1, 2, 3, 4, 5, 6, 7 and 32 more") == 1
    assert len(re.findall(r"examples \d", said)) == times
    assert len(said) < 330
    monkeypatch.setattr(loop, "example_list", lambda examples: ", ".join(map(str, examples)))
    assert len(str(loop._diverged(report, RunState(), origin, 3))) > 330  # twin: all of them


def test_three_non_finite_steps_end_the_run_with_names_and_nothing_is_lost(tmp_path):
    engine, diary = toy_engine(), Diary()
    job = make_job(tmp_path, engine, objective=poisoned_from(6))
    with pytest.raises(Diverged) as error:
        run_loop(job, RunState(), diary, diary.stop)
    fault = error.value.faults[0]
    assert (error.value.exit_code, fault.code, fault.where) == (5, "SF-DIVERGED", "step 8")
    assert re.search(r"examples \d+, ", fault.what)
    assert [diary.losses[n] for n in (6, 7, 8)] == [None, None, None]
    checkpoint, _ = newest_verified(tmp_path)
    assert checkpoint.step == 5
    saved = load_file(checkpoint.folder / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in engine.model.state_dict().items())


def test_names_the_module_when_the_weights_are_the_cause(tmp_path):
    engine, diary = toy_engine(), Diary()
    with torch.no_grad():
        engine.model.head.weight.fill_(3e38)
    with raises_fault("SF-DIVERGED", "step 3", "head"):
        run_loop(make_job(tmp_path, engine), RunState(), diary, diary.stop)


def test_says_so_when_a_replay_is_finite(tmp_path):
    calls = iter(range(10**6))

    def flaky(model, batch):
        """Non-finite in the first three steps, finite when they are looked at again: a hardware fault."""
        out = toy_loss(model, batch)
        return LossSum(out.loss * float("nan")) if next(calls) < 6 else out

    diary = Diary()
    with raises_fault("SF-DIVERGED", "step 3", "replay"):
        run_loop(make_job(tmp_path, toy_engine(), objective=flaky), RunState(), diary, diary.stop)


def test_two_fresh_runs_are_identical(tmp_path):
    first, second = (toy_engine(dropout=0.3) for _ in range(2))
    for name, engine in (("a", first), ("b", second)):
        diary = Diary()
        run_loop(make_job(tmp_path / name, engine), RunState(), diary, diary.stop)
    assert same_bits(bits(first), bits(second))


class Wishing(StopRequest):
    """Asks for something once, after a step."""

    def __init__(self, wish, diary, after):
        super().__init__()
        self.wish, self.diary, self.after = wish, diary, after

    def take_requests(self):
        return frozenset({self.wish} if self.diary.lines[-1] == f"step {self.after}" else ())


@pytest.mark.parametrize(("wish", "after", "line"), [("save", 2, "save 2"), ("evaluate", 7, "eval 7")])
def test_a_wish_is_granted_after_the_step_and_changes_nothing(tmp_path, wish, after, line):
    plain, asked = Diary(), Diary()
    one, other = toy_engine(dropout=0.3), toy_engine(dropout=0.3)
    usual = run_loop(make_job(tmp_path / "a", one), RunState(), plain, plain.stop).state
    state = run_loop(make_job(tmp_path / "b", other), RunState(), asked, Wishing(wish, asked, after)).state
    assert [entry for entry in asked.lines if entry not in plain.lines] == [line]
    assert asked.lines[asked.lines.index(line) - 1] == f"step {after}"
    assert same_bits(bits(one), bits(other))
    assert dataclasses.replace(state, seconds=0, beside={}) == dataclasses.replace(usual, seconds=0, beside={})


def test_what_is_due_anyway_is_not_done_twice(tmp_path):
    asked = Diary()
    run_loop(make_job(tmp_path, toy_engine()), RunState(), asked, Wishing("evaluate", asked, 5))
    assert [entry for entry in asked.lines if entry.startswith("eval 5")] == ["eval 5 best"]


def test_an_evaluation_before_the_first_step_comes_first_and_can_be_the_best(tmp_path):
    diary = Diary()
    job = make_job(tmp_path, toy_engine(), eval_steps=frozenset({0, 12}))
    run_loop(job, RunState(), diary, diary.stop)
    assert diary.lines[:3] == ["eval 0 best", "save 0", "step 1"]
    twin = Diary()
    run_loop(dataclasses.replace(job, total_steps=1), RunState(evaluated=0), twin, twin.stop)
    assert twin.lines[0] == "step 1"  # step 0 counts as evaluated


def spiking_at(*steps):
    """The loss is a thousand times as large in these steps, counted by calls (two micro-batches a step)."""
    calls = iter(range(2, 10**6))

    def objective(model, batch):
        out = toy_loss(model, batch)
        return LossSum(out.loss * 1000.0) if next(calls) // 2 in steps else out

    return objective


LONG = {
    "total_steps": 48,
    "eval_steps": frozenset(),
    "save_steps": frozenset({36}),
    "settings": settings(max_grad_norm=None),
}


def trained(folder, stop_after=None, **changes):
    engine, diary = toy_engine(dropout=0.3), Diary(stop_after)
    return run_loop(make_job(folder, engine, **LONG | changes), RunState(), diary, diary.stop), engine


def test_a_spike_is_cut_counted_and_told(tmp_path):
    reports = []
    engine, diary = toy_engine(), Diary()
    diary.step = lambda report, state: reports.append(report)
    job = make_job(tmp_path, engine, **LONG, objective=spiking_at(40))
    outcome = run_loop(job, RunState(), diary, diary.stop)
    assert [report.step for report in reports if report.spike] == [40]
    assert reports[39].grad_norm > 100 * reports[39].spike
    assert (outcome.state.guard.spikes, outcome.state.guard.skipped) == (1, 0)


def test_a_run_that_stopped_after_a_spike_goes_on_as_the_one_that_did_not(tmp_path):
    outcome, straight = trained(tmp_path / "a", objective=spiking_at(38, 41))
    trained(tmp_path / "b", stop_after=39, objective=spiking_at(38, 41))
    job, state = resume(tmp_path / "b", **LONG, objective=spiking_at(2))  # step 41, the second from here
    rest = Diary()
    again = run_loop(job, state, rest, rest.stop)
    assert same_bits(bits(straight), bits(job.engine))
    assert dataclasses.replace(again.state, seconds=0, beside={}) == dataclasses.replace(
        outcome.state, seconds=0, beside={}
    )
    assert again.state.guard.spikes == 2


def test_twin_without_it_a_spike_moves_the_weights(tmp_path):
    def moved(**changes):
        weights = [trained(tmp_path / f"{len(list(tmp_path.iterdir()))}", **changes)[1].model.head.weight]
        return (weights[0] - calm).norm()

    calm = trained(tmp_path / "calm")[1].model.head.weight
    assert moved(objective=spiking_at(40), clip_spikes=False) > 2 * moved(objective=spiking_at(40))


def test_too_many_steps_that_are_not_finite_within_a_short_time_end_the_run(tmp_path):
    calls = iter(range(2, 10**6))

    def objective(model, batch):
        out = toy_loss(model, batch)
        return LossSum(out.loss * float("nan")) if next(calls) // 2 % 5 == 0 else out

    engine, diary = toy_engine(), Diary()
    job = make_job(tmp_path, engine, **LONG, objective=objective)
    with raises_fault("SF-DIVERGED", "step 20"):
        run_loop(job, RunState(), diary, diary.stop)
    assert trained(tmp_path / "b", objective=objective, max_recent=10)[0].reason == "finished"


class Forgetful(Braked):
    def __init__(self, error):
        self.error = error

    def learned(self, report):
        if report.step == 3:
            raise self.error


def raising(error, plain, step):
    def act(number):
        if number == step:
            raise error
        return plain(number)

    return act


def crashing(job, phase, error):
    """The job with this error at step 5."""
    if phase == "memory":
        return dataclasses.replace(job, memory=Forgetful(error))
    name = {"batches": "batches", "evaluation": "evaluate"}[phase]
    return dataclasses.replace(job, **{name: raising(error, getattr(job, name), 5)})


@pytest.mark.parametrize(("phase", "step"), [("batches", 5), ("evaluation", 5), ("memory", 3)])
def test_an_exception_outside_of_the_step_is_recorded_with_its_phase(tmp_path, phase, step):
    error, heard = ZeroDivisionError("planted"), Heard()
    job = crashing(make_job(tmp_path, toy_engine(), recorder=heard), phase, error)
    with pytest.raises(ZeroDivisionError) as caught:
        run_loop(job, RunState(), Diary(), StopRequest())
    assert caught.value is error
    ((attempt, told),) = heard.told
    assert (attempt.phase, attempt.step, told) == (phase, step, error)
    assert bool(attempt.micro_batches) == (phase == "memory")


@pytest.mark.parametrize("phase", ["batches", "evaluation", "memory"])
def test_twin_a_refusal_is_not_recorded(tmp_path, phase):
    error, heard = EnvironmentFault(Fault("disk", "is full")), Heard()
    job = crashing(make_job(tmp_path, toy_engine(), recorder=heard), phase, error)
    with pytest.raises(EnvironmentFault):
        run_loop(job, RunState(), Diary(), StopRequest())
    assert heard.told == []


def test_an_evaluation_that_was_asked_for_is_recorded_too(tmp_path):
    heard = Heard()
    job = make_job(tmp_path, toy_engine(), recorder=heard)
    job = dataclasses.replace(job, evaluate=raising(ZeroDivisionError("planted"), job.evaluate, 2))
    with pytest.raises(ZeroDivisionError):
        loop._evaluated(job, 2, StopRequest())
    assert heard.told[0][0].phase == "evaluation"
