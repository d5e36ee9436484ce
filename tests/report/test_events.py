"""events.jsonl and samples.jsonl: what is in them, and what a resume leaves of them."""

import io
import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from surefoot.report.console import Console
from surefoot.report.events import append_event, append_samples, cut_events, last_of_the_process
from surefoot.report.journal import salvage
from surefoot.report.observer import RunObserver
from surefoot.system.errors import Diverged, EnvironmentFault
from surefoot.training.report import EvalReport, StepReport
from surefoot.training.state import Best, RunState


def of(run: Path, name: str = "events.jsonl") -> list[dict]:
    records, damaged = salvage(run / name)
    assert damaged == []
    return records


def kinds(run: Path) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in of(run)]


def observe(
    run: Path, shown: io.StringIO | None = None, *, start_step: int = 0, rows: list | None = None
) -> RunObserver:
    return RunObserver(
        Console(shown or io.StringIO()),
        run,
        total_steps=9,
        log_every=1,
        epoch=lambda step: 0.0,
        peak_memory=lambda: None,
        rows=rows or [],
        start_step=start_step,
    )


def stepped(step: int, decision: str = "stepped") -> StepReport:
    bad = decision == "non_finite"
    return StepReport(
        step,
        None if bad else 1.0,
        1.0,
        1e-3,
        4,
        8,
        (3, 5),
        decision,
        "loss" if bad else None,
        0.1,  # pyright: ignore
    )


def test_a_session_tells_its_story(tmp_path):
    state = RunState(step=2)
    with observe(tmp_path) as observer:
        observer.step(stepped(1), state)
        observer.step(stepped(2, "non_finite"), state)
        observer.step(stepped(3, "scaler"), state)
        observer.evaluation(EvalReport(3, 0.5, 1.6, 0.7, 12, 0.2), state, improved=True)
        observer.evaluation(EvalReport(3, 0.6, 1.8, 0.7, 12, 0.2), state, improved=False)
        observer.samples(3, [("Say\nheron.", "<b>heron</b>")])
        observer.saved(tmp_path / "checkpoint-3", state)
    told = [("start", 0), ("non_finite", 2), ("skipped", 3), ("best", 3), ("saved", 3), ("stopped", 3)]
    assert kinds(tmp_path) == told
    assert of(tmp_path, "samples.jsonl") == [{"step": 3, "prompt": "Say\nheron.", "answer": "<b>heron</b>"}]
    for event in of(tmp_path):
        assert datetime.fromisoformat(event["time"]).utcoffset() == timedelta(0)
        assert event["text"]


def test_a_checkpoint_that_is_saved_as_the_best_says_so(tmp_path):
    """It may be one that checkpoint.every does not ask for. On the screen the line of its evaluation says it."""
    shown = io.StringIO()
    with observe(tmp_path, shown) as observer:
        for step, best in ((3, Best(3, 0.5)), (4, Best(3, 0.5)), (5, None)):
            observer.saved(tmp_path / f"checkpoint-{step}", RunState(step=step, best=best))
    told = [event["text"] for event in of(tmp_path) if event["kind"] == "saved"]
    assert ["best" in text for text in told] == [True, False, False]
    assert shown.getvalue().splitlines() == [f"saved checkpoint-{step}" for step in (3, 4, 5)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Diverged("step 3: the loss"), "diverged"),
        (EnvironmentFault("disk full"), "failed"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_how_it_ended_is_noted(tmp_path, error, kind):
    with pytest.raises(type(error)), observe(tmp_path):
        raise error
    assert kinds(tmp_path) == [("start", 0), (kind, 0)]
    assert last_of_the_process(of(tmp_path)) == kind


def write_a_history(run: Path) -> None:
    append_event(run, "start", 0, "started")
    for step in (2, 4):
        append_samples(run, step, [("a", f"b{step}")])
        append_event(run, "best", step, "better")
        append_event(run, "saved", step, "saved")
    append_event(run, "non_finite", 5, "bad")
    append_event(run, "diverged", 5, "ended")


def test_a_resume_cuts_what_is_done_again_and_keeps_the_history(tmp_path):
    write_a_history(tmp_path)
    with observe(tmp_path, start_step=4, rows=[{"current_steps": 4, "eval_loss": 1.0, "elapsed_time": "0:00:01"}]):
        pass
    before = [("start", 0), ("best", 2), ("saved", 2), ("best", 4), ("saved", 4), ("diverged", 5)]
    assert kinds(tmp_path) == [*before, ("resume", 4), ("stopped", 4)]
    assert [sample["step"] for sample in of(tmp_path, "samples.jsonl")] == [2, 4]


def test_an_evaluation_that_is_done_again_leaves_nothing(tmp_path):
    write_a_history(tmp_path)
    cut_events(tmp_path, 4, evaluated=False)
    assert ("best", 4) not in kinds(tmp_path)
    assert [sample["step"] for sample in of(tmp_path, "samples.jsonl")] == [2]


def test_twin_without_the_cut_a_step_is_told_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.report.observer.cut_events", lambda run, step, evaluated: None)
    write_a_history(tmp_path)
    with observe(tmp_path, start_step=4):
        pass
    assert ("non_finite", 5) in kinds(tmp_path)


def test_damaged_lines_go_with_the_cut(tmp_path):
    write_a_history(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind": "saved", "step": "x"}\nnonsense\n{"kind": "sav')
    cut_events(tmp_path, 9, evaluated=True)
    assert len(of(tmp_path)) == 7
    assert all(isinstance(json.loads(line), dict) for line in (tmp_path / "events.jsonl").read_text().splitlines())


@pytest.mark.parametrize("kind", [[], {}, 5, None])
def test_an_event_of_no_kind_ends_nothing(tmp_path, kind):
    write_a_history(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, "step": 99, "text": "x"}) + "\n")
    assert last_of_the_process(of(tmp_path)) is not None
    cut_events(tmp_path, 1, evaluated=True)
    assert 99 not in [step for _, step in kinds(tmp_path)]
