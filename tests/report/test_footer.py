"""The last lines: true, and every command can be pasted."""

import shlex
from pathlib import Path

import pytest

from helpers.faults import gives, lines_giving
from surefoot.report import footer
from surefoot.report.wording import duration_text

RESULTS = {"train_loss": 1.2345, "eval_loss": 1.301, "eval_accuracy": 0.612}


TOOK = {"in steps": 20.0, "set-up": 40.0, "compile": 650.0, "batches": 0.001, "evaluation": 10.0, "saving": 5.0}


def closing(run, results=RESULTS, early=False, best_step=200, skipped=0, here=TOOK):
    return footer.finished(
        run,
        results,
        step=300,
        total_steps=900,
        early=early,
        here=here,
        whole=TOOK,
        best_step=best_step,
        skipped=skipped,
    )


def test_the_end_of_a_run(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 1_500_000)
    for name in ("run.log", "report.html", "training_eval_loss.png"):
        (tmp_path / name).write_text("")
    lines = closing(tmp_path)
    whole, _, parts = lines[0].rpartition(": ")
    assert gives(whole, 300)
    assert whole.endswith(duration_text(725))
    known = {"compile": 650, "set-up": 40, footer.STEPS: 20, "evaluation": 10, footer.OTHER: 5.001}
    assert parts.split(", ") == [f"{duration_text(spent)} {name}" for name, spent in known.items()]
    figures = zip(lines[1].split(" · "), ("1.234", "1.301", "61.2%", "checkpoint-200"), strict=True)
    assert all(gives(part, value) for part, value in figures)
    assert lines_giving("\n".join(lines), "adapter_model.safetensors", 1.4)
    assert any(line.startswith("  report.html") for line in lines)
    assert any(line.startswith("  training_eval_loss.png") for line in lines)
    assert not any("plan.json" in line for line in lines)  # is not there, is not promised
    assert lines[-3:] == [f"  {command}" for _, command in footer.next_commands(tmp_path)]


def test_early_stopping_and_skipped_steps_are_said(tmp_path):
    first, *rest = closing(tmp_path, early=True, skipped=2)
    assert all(gives(first, step) for step in (300, 900))
    assert f" {duration_text(725)}: " in first
    (said,) = set(rest) - set(closing(tmp_path, early=True))
    assert gives(said, 2)
    assert not gives(closing(tmp_path)[0], 900)  # twin


def test_a_resumed_run_says_what_this_start_took_and_the_whole(tmp_path):
    lines = closing(tmp_path, here=TOOK | {"compile": 50.0})
    assert duration_text(725) in lines[0]
    assert f" {duration_text(125)}: {duration_text(50)} compile, " in lines[1]
    assert closing(tmp_path) == [lines[0], *lines[2:]]  # twin: there was one start alone


def test_nothing_is_said_about_figures_that_are_not_there(tmp_path):
    first, _, *rest = closing(tmp_path)
    assert closing(tmp_path, results={"eval_loss": None}, best_step=None) == [first, *rest]


@pytest.mark.parametrize("run", [Path("runs/llama3-dora"), Path("runs/my run; rm x"), Path("it's")])
def test_commands_survive_a_shell(run):
    commands = [shlex.split(command) for _, command in footer.next_commands(run)]
    assert [words[:2] for words in commands] == [["surefoot", "chat"], ["surefoot", "generate"], ["surefoot", "verify"]]
    assert all(words[2] == str(run) for words in commands)


def test_a_run_on_texts_is_not_chatted_with():
    commands = footer.next_commands(Path("runs/a"), "Once upon a time", texts=True)
    assert [command for _, command in commands] == [
        "surefoot generate runs/a --raw --prompt 'Once upon a time'",
        "surefoot verify runs/a",
    ]


def test_a_run_on_pictures_is_asked_about_one():
    asked, without = (
        [shlex.split(command) for _, command in footer.next_commands(Path("runs/a"), "What?", picture=shown)][1]
        for shown in ("a cat.png", "")  # the twin: none was seen
    )
    assert asked == ["surefoot", "generate", "runs/a", "--image", "a cat.png", "--prompt", "What?"]
    assert without == [*asked[:3], *asked[5:]]


def test_a_reward_model_is_measured_on_the_pairs_that_were_held_out():
    (measure, _) = footer.next_commands(Path("runs/a b"), scores=True, held_out=True)
    assert shlex.split(measure[1]) == ["surefoot", "evaluate", "reward", "runs/a b"]
    (verify,) = footer.next_commands(Path("runs/a b"), scores=True)  # twin: none were
    assert shlex.split(verify[1])[1] == "verify"


def test_the_resume_command():
    typed = ["surefoot", "train", "my config.yaml", "optim.lr=1e-4", "--overwrite"]
    resume = footer.resume_command(typed)
    assert resume == ["surefoot", "train", "my config.yaml", "optim.lr=1e-4", "--resume"]
    assert footer.resume_command(resume) == resume
    text, command = footer.stopped(Path("runs/a"), step=433, total_steps=900, command=resume)
    assert "checkpoint-433" in text
    assert shlex.split(command) == resume


def test_the_resume_command_leaves_the_words_of_another_tool_alone():
    typed = ["surefoot", "run", "--overwrite", "--", "tool", "--overwrite"]
    assert footer.resume_command(typed) == ["surefoot", "run", "--resume", "--", "tool", "--overwrite"]
