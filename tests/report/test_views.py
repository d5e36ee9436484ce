"""What the report shows at its top is what the run said at its end, by the same names."""

import re
from dataclasses import replace

import pytest

from helpers.faults import gives
from helpers.run_folders import log_rows, write_run
from surefoot.report import views
from surefoot.report.comparison import FIGURES
from surefoot.report.events import append_event
from surefoot.report.footer import TO_TRY, finished
from surefoot.report.record import RunRecord, read_run
from surefoot.report.results import rollout_results
from surefoot.training.manifest import MANIFEST

ROWS = log_rows(60, evaluate=20)
RESULTS = {
    "train_loss": 0.4321,
    "train_runtime": 0.3,
    "whole_runtime": 9.5,
    "steps_runtime": 0.2,
    "eval_step": 20,
    "eval_loss": 0.1234,
    "eval_accuracy": 0.75,
}


TOOK = {"in steps": 0.2, "set-up": 9.2, "evaluation": 0.1}


def tiles(status, results=RESULTS):
    return {one.name: (one.value, one.note) for one in views.figures(ROWS, status, results)}


def test_a_finished_run_says_the_same_as_the_terminal(tmp_path):
    lines = finished(
        tmp_path, RESULTS, step=60, total_steps=60, early=False, here=TOOK, whole=TOOK, best_step=20, skipped=0
    )
    shown = tiles("finished")
    assert f" {shown['time'][0]}: " in lines[0]
    assert shown["time"][1] in lines[0]
    said = [f"{name} {shown[name][0]}" for name in ("training loss", "evaluation loss", "accuracy")]
    assert lines[1] == " · ".join([*said, "best checkpoint-20"])
    assert gives(shown["evaluation loss"][1], 20)


def test_twin_the_newest_figures_are_others(tmp_path, monkeypatch):
    honest = views.figures
    monkeypatch.setattr(views, "figures", lambda rows, status, results: honest(rows, status, {}))
    with pytest.raises(AssertionError):
        test_a_finished_run_says_the_same_as_the_terminal(tmp_path)


@pytest.mark.parametrize("status", ["running", "stopped"])
def test_a_run_that_goes_on_shows_its_newest_and_no_earlier_ending(status):
    shown = tiles(status)
    assert shown["evaluation loss"] == (f"{0.3 + 4.0 / 60:.4g}", "step 60")
    assert shown["training loss"][1] == "step 60"
    assert shown["time"][0] == "9.0 s"


def test_an_evaluation_of_rewards_is_shown_as_the_reward():
    def evaluation(**more):
        rows = [{"current_steps": 3, "eval_loss": -1.25, "eval_reward": 1.25, **more}]
        return [one.value for one in views.figures(rows, "running", {}) if "evaluation" in one.name]

    assert evaluation(eval_response_tokens=8) == ["1.25"]
    assert evaluation(eval_tokens=8) == ["-1.25"]  # twin: a metric of that name


def test_the_speed_of_a_finished_run_is_that_of_the_whole():
    speed = dict(FIGURES)["train_tokens_per_second"]  # its name
    whole = tiles("finished", {**RESULTS, "train_tokens_per_second": 12.5, "steps_tokens_per_second": 512.5})
    assert whole[speed][0] == "512"
    assert tiles("finished", {"train_tokens_per_second": 12.5})[speed][0] == "12"  # of an older run
    assert tiles("running")[speed] != whole[speed]


def check_commands(tmp_path, to_try, told):
    """The report's commands, made of `told`, are those on the terminal, made of `to_try`."""
    lines = finished(
        tmp_path, {}, step=1, total_steps=1, early=False, here={}, whole={}, best_step=None, skipped=0, **to_try
    )
    shown = views.commands(RunRecord(tmp_path, data={TO_TRY: told}), "finished")
    again = f"surefoot train {tmp_path}/config.yaml output={tmp_path}-again"
    assert [f"  {command}" for _, command in shown] == [*lines[lines.index("next:") + 1 :], f"  {again}"]


@pytest.mark.parametrize("texts", [False, True])
def test_a_finished_run_suggests_what_the_terminal_did(tmp_path, texts):
    to_try = {"prompt": "Where is the owl?", "texts": texts, "picture": "" if texts else "owl.png"}
    check_commands(tmp_path, to_try, to_try)


@pytest.mark.parametrize("told", [{"prompt": "Another?", "texts": False}, {"prompt": 3}, None])
def test_twin_another_prompt_is_noticed_and_a_damaged_one_is_no_prompt(tmp_path, told):
    with pytest.raises(AssertionError):
        check_commands(tmp_path, {"prompt": "Where is the owl?", "texts": False}, told)
    if not (told and isinstance(told["prompt"], str)):
        check_commands(tmp_path, {}, told)


def test_less_than_a_second_is_not_zero():
    rows = [{**row, "elapsed_time": "0:00:00"} for row in ROWS if "loss" in row]
    assert re.findall(r"\d+", {one.name: one.value for one in views.figures(rows, "running", {})}["time"]) == ["1"]


def rollout_run(steps=3, rewards=(0.125, 0.5, 0.875), unit="response_tokens"):
    """Rows of a run that draws answers, and its results."""
    place = {"total_steps": steps, unit: 8}
    rows = [
        {"current_steps": step, "loss": 0.01 * step, "reward": reward, "response_length": 6.0, **place}
        for step, reward in enumerate(rewards, 1)
    ]
    rows.append({"current_steps": steps, "eval_loss": -0.75, "eval_reward": 0.75, f"eval_{unit}": 8})
    return rows, {
        "train_loss": 0.02,
        "eval_step": steps,
        "eval_loss": -0.75,
        "eval_reward": 0.75,
        **rollout_results(rows),
    }


def test_a_run_with_rollouts_leads_with_its_reward_and_its_course(tmp_path):
    rows, results = rollout_run()
    lines = finished(tmp_path, results, step=3, total_steps=3, early=False, here={}, whole={}, best_step=0, skipped=0)
    assert [gives(line, value) for line, value in zip(lines[1:4], (0.125, 0.875, 0.75), strict=True)] == [True] * 3
    assert "checkpoint-0," in lines[3]  # that nothing was learned there is said
    assert not gives("\n".join(lines), 0.02)
    for status, ended in (("running", {}), ("finished", results)):
        reward, evaluation = views.figures(rows, status, ended)[1:3]
        assert (reward.value, gives(reward.note, 3), gives(reward.note, 0.125)) == ("0.875", True, True)
        assert evaluation.value == "0.75"
    assert views.value_table(rows).rows[0][:3] == ("1", "0.125", "0.01")
    assert views.marks([{"kind": "best", "step": 3}], rows) == [{"kind": "best", "step": 3, "value": 0.75}]


def test_twin_where_no_answers_are_drawn_the_loss_leads():
    rows, results = rollout_run(unit="tokens")
    assert views.figures(rows, "finished", results)[1].value == "0.02"
    assert views.value_table(rows).rows[0][:2] == ("1", "0.01")
    assert views.marks([{"kind": "best", "step": 3}], rows) == [{"kind": "best", "step": 3, "value": -0.75}]


def test_the_best_evaluation_is_marked_at_its_loss():
    events = [{"kind": "saved", "step": 20}, {"kind": "best", "step": 20}, {"kind": "best", "step": 33}]
    assert views.marks(events, ROWS) == [
        {"kind": "saved", "step": 20},
        {"kind": "best", "step": 20, "value": 0.3 + 4.0 / 20},
        {"kind": "best", "step": 33, "value": None},
    ]


CONFIG = "stage: sft\noptim: {lr: 2e-4}\n"


def boom(tmp_path, *failures: str, config: str = CONFIG):
    """A run that diverged at its ninth step, with these failures recorded."""
    run = tmp_path / "my runs" / "boom"
    write_run(run, log_rows(9), diverged="step 9: the loss was not finite", config=config)
    for name in failures:
        (run / name).mkdir()
        (run / name / MANIFEST).write_text("{}")
    return read_run(run)


def test_a_diverged_run_is_looked_at_and_begun_anew_with_a_lower_rate(tmp_path):
    record = boom(tmp_path, "failure-5", "failure-9")
    run = record.run
    assert [command for _, command in views.commands(record, "diverged")] == [
        f"surefoot replay '{run}/failure-9'",
        f"surefoot train '{run}/config.yaml' optim.lr=2e-05 'output={run}-lower'",
        f"surefoot verify '{run}'",
    ]


@pytest.mark.parametrize(("which", "advice"), [("moment", "--resume"), ("grad_norm", "optim.lr=2e-05")])
def test_a_lower_rate_is_named_only_where_the_rate_may_be_the_reason(tmp_path, which, advice):
    record = boom(tmp_path, "failure-9")
    last = {**record.rows[-1], "non_finite": which}
    told = [command for _, command in views.commands(replace(record, rows=(*record.rows[:-1], last)), "diverged")]
    assert [advice in command for command in told] == [False, True, False]


def test_twin_taken_for_a_stopped_one_it_would_diverge_again(tmp_path):
    told = views.commands(boom(tmp_path, "failure-5", "failure-9"), "stopped")
    assert told[0][1] == f"surefoot train '{tmp_path}/my runs/boom/config.yaml' --resume"


def test_the_failure_is_that_of_the_end(tmp_path):
    """An older one was overcome; a folder without a manifest is not whole; a rollback's is newer than its step says."""
    assert "replay" not in str(views.commands(boom(tmp_path / "a", "failure-5"), "diverged"))
    record = boom(tmp_path / "b", "failure-12", "failure-9-rollback-1")
    assert "failure-9-rollback-1" in views.commands(record, "diverged")[0][1]
    half = boom(tmp_path / "c", "failure-9")
    (half.run / "failure-9" / MANIFEST).unlink()
    assert "replay" not in str(views.commands(half, "diverged"))


def test_without_a_rate_that_can_be_read_none_is_named(tmp_path):
    for number, config in enumerate(("optim: {lr: fast}\n", "optim: [\n", "", "optim: 3\n", "optim: {lr: -1}\n")):
        told = views.commands(boom(tmp_path / str(number), config=config), "diverged")
        assert [command.split()[1] for _, command in told] == ["verify"]


@pytest.mark.parametrize(("rate", "lower"), [("1e20", "0.0002"), ("1e-3", "0.0001"), ("5e-6", "5e-07")])
def test_a_lower_rate_is_no_higher_than_the_usual_one(tmp_path, rate, lower):
    told = views.commands(boom(tmp_path, config=f"optim: {{lr: {rate}}}\n"), "diverged")
    assert f" optim.lr={lower} " in told[0][1]


def test_a_crash_is_run_again_and_gone_on_from(tmp_path):
    record = boom(tmp_path, "failure-9")
    append_event(record.run, "failed", 8, "RuntimeError: x")
    told = [command.split()[1] for _, command in views.commands(read_run(record.run), "failed")]
    assert told == ["replay", "train", "verify"]


def test_a_loss_of_a_python_callers_own_stays_in_python(tmp_path):
    record = replace(boom(tmp_path, "failure-9"), verified={"objective": "mine", "in_python": ["objective"]})
    (_, again), _ = views.commands(record, "diverged")
    overrides = ["optim.lr=2e-05", f"output={record.run}-lower"]
    assert again == f"surefoot.train('{record.run}/config.yaml', {overrides}, objective=…)  # in Python"
    told = views.commands(replace(record, verified={"objective": "mine"}), "diverged")  # twin: the config names it
    assert [command.split()[1] for _, command in told] == ["replay", "train", "verify"]


def test_a_finished_run_with_a_reward_of_a_python_caller_is_trained_again_in_python(tmp_path):
    record = replace(boom(tmp_path), verified={"in_python": ["reward"]})
    (_, again) = views.commands(record, "finished")[-1]
    assert again == f"surefoot.train('{record.run}/config.yaml', ['output={record.run}-again'], reward=…)  # in Python"
    (_, goes_on), _ = views.commands(record, "stopped")
    assert goes_on == f"surefoot.train('{record.run}/config.yaml', resume=True, reward=…)  # in Python"
