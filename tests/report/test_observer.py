"""The log of a run that was stopped or killed and resumed is the log of the uninterrupted run, bit for bit."""

import dataclasses
import io
import json
import math

import pytest
from safetensors.torch import load_file, save_file

from helpers.faults import lines_giving
from helpers.killed import Killed
from helpers.tiers import diagonal
from helpers.toy_model import save_checkpoint, settings, toy_batches, toy_engine, toy_examples, toy_loss
from surefoot.report.console import Console
from surefoot.report.observer import RunObserver
from surefoot.report.pace import Pace, clock_seconds
from surefoot.report.trainer_log import NAME, cut_to_step, is_eval_row, is_train_row, read_rows, without_timing
from surefoot.system.errors import Diverged
from surefoot.training.checkpoint import load_state, newest_verified
from surefoot.training.engine import ALL
from surefoot.training.evaluation import evaluate_loss
from surefoot.training.interrupt import StopRequest
from surefoot.training.loop import Job, run_loop
from surefoot.training.objective import LossSum
from surefoot.training.optimizer import Schedule
from surefoot.training.optimizer_state import load_optimizer_tensors
from surefoot.training.state import Goal, RunState

EXAMPLES = toy_examples(20)
TOTAL = 12


class StoppedObserver(RunObserver):
    """Asks to stop after a step, or dies right after a row was written."""

    stop = StopRequest()
    stop_after: int | None = None
    die_after: tuple[str, int] | None = None

    def step(self, report, state):
        super().step(report, state)
        if report.step == self.stop_after:
            self.stop.request("SIGTERM")
        if self.die_after == ("step", report.step):
            raise Killed

    def evaluation(self, report, state, improved):
        super().evaluation(report, state, improved)
        if self.die_after == ("evaluation", report.step):
            raise Killed


def make_job(run, engine, observer, objective=toy_loss):
    def write_model(folder):
        save_file(dict(engine.model.state_dict()), folder / "model.safetensors")

    def save(state):
        with observer.during("saving"):
            observer.sync()
            return save_checkpoint(run, engine, state, write_model=write_model)

    def evaluate(step):
        with observer.during("evaluating"):
            batches = toy_batches(EXAMPLES, 5)
            return evaluate_loss(engine.model, toy_loss, batches, step=step, settings=settings(), device=engine.device)

    return Job(
        engine=engine,
        objective=objective,
        batches=lambda step: toy_batches([EXAMPLES[(step * 4 + k) % 20] for k in range(4)], 2),
        schedules={ALL: Schedule("cosine", 0.05, total=TOTAL, warmup=2)},
        settings=settings(),
        total_steps=TOTAL,
        evaluate=evaluate,
        eval_steps=frozenset({5, 10, 12}),
        save=save,
        save_steps=frozenset({4, 8, 12}),
        keep_best=False,
        goal=Goal(),
        max_consecutive=3,
        max_recent=3,
        clip_spikes=True,
        patience=None,
        min_delta=0.0,
    )


def session(run, *, log_every=1, stop_after=None, die_after=None, evaluated=None):
    """One process: start or resume, train until it stops, is killed, or ends. Returns what it said."""
    run.mkdir(exist_ok=True)
    checkpoint, _ = newest_verified(run)
    state, engine = RunState(), toy_engine(dropout=0.3)
    if checkpoint:
        state, tensors = load_state(checkpoint)
        engine.model.load_state_dict(load_file(checkpoint.folder / "model.safetensors"))
        load_optimizer_tensors(engine.optimizer, engine.parameters, tensors)
    done = state.evaluated == state.step if evaluated is None else evaluated
    screen = io.StringIO()
    with StoppedObserver(
        Console(screen),
        run,
        total_steps=TOTAL,
        log_every=log_every,
        epoch=lambda step: step / 5,
        peak_memory=lambda: 10**9,
        rows=cut_to_step(run / NAME, state.step, evaluated=done),
        start_step=state.step,
    ) as observer:
        observer.stop, observer.stop_after, observer.die_after = StopRequest(), stop_after, die_after
        run_loop(make_job(run, engine, observer), state, observer, observer.stop)
    return screen.getvalue()


def deterministic(run):
    return [without_timing(row) for row in read_rows(run / NAME)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    runs = {}
    for log_every in (1, 5):
        runs[log_every] = tmp_path_factory.mktemp("straight") / "run"
        session(runs[log_every], log_every=log_every)
    return runs


@pytest.mark.parametrize(("stops", "log_every"), diagonal([[3], [5], [4, 6, 11], [1, 2, 12]], [1, 5]))
def test_stopped_and_resumed(tmp_path, straight, stops, log_every):
    for stop_after in [*stops, None]:
        session(tmp_path, log_every=log_every, stop_after=stop_after)
    assert deterministic(tmp_path) == deterministic(straight[log_every])


@pytest.mark.parametrize(
    ("death", "log_every"), diagonal([("step", 3), ("step", 7), ("evaluation", 5), ("step", 11)], [1, 5])
)
def test_killed_and_resumed(tmp_path, straight, death, log_every):
    with pytest.raises(Killed):
        session(tmp_path, log_every=log_every, die_after=death)
    session(tmp_path, log_every=log_every)
    assert deterministic(tmp_path) == deterministic(straight[log_every])


def test_killed_after_repeating_an_evaluation(tmp_path, straight):
    """Stopped at step 5 before its evaluation, resumed, killed after it: the next session evaluates once more."""
    session(tmp_path, stop_after=5)
    with pytest.raises(Killed):
        session(tmp_path, die_after=("evaluation", 5))
    session(tmp_path)
    assert deterministic(tmp_path) == deterministic(straight[1])


def test_twin_without_looking_at_what_was_evaluated_the_row_stands_twice(tmp_path, straight):
    session(tmp_path, stop_after=5)
    with pytest.raises(Killed):
        session(tmp_path, die_after=("evaluation", 5))
    session(tmp_path, evaluated=True)
    assert len(deterministic(tmp_path)) == len(deterministic(straight[1])) + 1


def test_twin_without_the_cut_steps_stand_twice(tmp_path, straight, monkeypatch):
    monkeypatch.setitem(globals(), "cut_to_step", lambda path, step, evaluated: read_rows(path))
    with pytest.raises(Killed):
        session(tmp_path, die_after=("step", 7))
    session(tmp_path)
    assert deterministic(tmp_path) != deterministic(straight[1])


def test_rows_hold_what_the_loop_reported(straight):
    rows = read_rows(straight[1] / NAME)
    steps = [row for row in rows if is_train_row(row)]
    assert [row["current_steps"] for row in steps] == list(range(1, 13))
    assert [row["current_steps"] for row in rows if is_eval_row(row)] == [5, 10, 12]
    assert steps[-1]["total_supervised_tokens"] == sum(row["supervised_tokens"] for row in steps)
    assert steps[-1]["total_tokens"] == sum(row["step_tokens"] for row in steps)
    assert steps[-1]["percentage"] == 100.0
    assert steps[4]["epoch"] == 1.0
    assert all(row["peak_memory"] == 10**9 for row in rows)


def test_log_every_thins_rows_and_lines(tmp_path):
    said = session(tmp_path, log_every=50)
    steps = [row["current_steps"] for row in read_rows(tmp_path / NAME) if is_train_row(row)]
    assert steps == [*range(1, 11), 12]
    assert [line.split("/")[0] for line in said.splitlines() if line.startswith("step")] == [f"step {n}" for n in steps]
    assert said.count("saved checkpoint-") == 3


def observer_of(run, screen=None, *, log_every=1, **more):
    return RunObserver(
        Console(screen or io.StringIO()),
        run,
        total_steps=TOTAL,
        log_every=log_every,
        epoch=lambda step: 0.0,
        peak_memory=lambda: None,
        **more,
    )


def test_elapsed_time_goes_on_and_never_back(tmp_path):
    row = {"current_steps": 3, "loss": 1.0, "elapsed_time": "0:10:00"}
    observer = observer_of(tmp_path, rows=[row], start_step=3)
    report = evaluate_loss(
        toy_engine().model, toy_loss, toy_batches(EXAMPLES, 5), step=3, settings=settings(), device=toy_engine().device
    )
    observer.evaluation(report, RunState(step=3), improved=True)
    assert clock_seconds(observer.rows[-1]["elapsed_time"]) >= 600


@pytest.mark.parametrize(("guess", "said"), [(-5.0, True), (1e3, False), (math.inf, False)])
def test_a_first_loss_above_that_of_guessing_is_a_caution(tmp_path, guess, said):
    observer = observer_of(tmp_path, guess=guess)
    with observer:
        run_loop(make_job(tmp_path, toy_engine(), observer), RunState(), observer, StopRequest())
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert [event["step"] for event in events if event["kind"] == "caution"] == [1] * said


def test_a_run_that_diverges_leaves_rows_that_say_so(tmp_path):
    def nan_from_the_third_step(model, batch, calls=iter(range(2, 10**6))):  # noqa: B008
        out = toy_loss(model, batch)
        return LossSum(out.loss * float("nan")) if next(calls) // 2 >= 3 else out

    screen = io.StringIO()
    observer = observer_of(tmp_path, screen, log_every=50, pace=Pace())
    job = dataclasses.replace(make_job(tmp_path, toy_engine(), observer), objective=nan_from_the_third_step)
    with pytest.raises(Diverged), observer:
        run_loop(job, RunState(), observer, StopRequest())
    bad = [row for row in read_rows(tmp_path / NAME) if row.get("skipped")]
    assert [(row["current_steps"], row["loss"], row["non_finite"]) for row in bad] == [
        (step, None, "loss") for step in (3, 4, 5)
    ]
    assert [line for line in lines_giving(screen.getvalue(), "loss", 3) if line.startswith("step 5: ")]
