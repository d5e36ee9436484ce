"""`surefoot train` as a user meets it: what it leaves, what it refuses, how it stops and goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from click.testing import CliRunner
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.fork_server import ForkServer
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.report.verification import compare_folders

MOST_LINES = 26  # before step 1; the plan and the audit have some 100
ROWS = [
    {"instruction": f"Say {word} {k} times.", "input": "", "output": " ".join([word] * k)}
    for word in ("one", "two", "heron", "sky")
    for k in (1, 2, 4)
]


@pytest.fixture(scope="module")
def server():
    with ForkServer() as running:
        yield running


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("models") / "base")


class Run:
    """One run folder with its config; call it to run `surefoot train`."""

    def __init__(self, server, folder, base, **changes):
        self.server, self.folder, self.output = server, folder, folder / "out"
        (folder / "train.json").write_text(json.dumps(ROWS))
        self.config = {
            "stage": "sft",
            "model": str(base),
            "adapter": {"kind": "lora", "rank": 4},
            "data": {"train": str(folder / "train.json"), "eval": 2, "max_length": 128},
            "batch": {"size": 4},
            "duration": "6 steps",
            "eval_every": "3 steps",
            "checkpoint": {"every": "2 steps"},
            "output": str(self.output),
        } | changes

    def __call__(self, *arguments, kill=None):
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(self.config))
        log = self.folder / "log.txt"
        log.write_text("")
        code = self.server.run(["train", str(path), *arguments], log, kill)
        return code, log.read_text()

    def files(self):
        return {path.relative_to(self.output).as_posix(): path.read_bytes() for path in self.output.rglob("*.*")}


@pytest.fixture
def run(server, tmp_path, base):
    return lambda **changes: Run(server, tmp_path, base, **changes)


@pytest.fixture(scope="module")
def finished(server, tmp_path_factory, base):
    """A finished LoRA run, looked at by several tests and changed by none."""
    run = Run(server, tmp_path_factory.mktemp("finished"), base)
    code, log = run()
    assert code == 0, log
    return run, log


# What a run leaves


def test_the_run_folder_has_what_the_ecosystem_expects(finished):
    run, _ = finished
    names = {path.name for path in run.output.iterdir()}
    expected = """adapter_config.json adapter_model.safetensors tokenizer.json tokenizer_config.json chat_template.jinja
        generation_config.json README.md config.yaml plan.json environment.json data.json trainer_log.jsonl
        trainer_state.json train_results.json eval_results.json all_results.json training_loss.png
        training_eval_loss.png run.log MANIFEST.json checkpoint-6"""
    assert set(expected.split()) <= names
    assert not [name for name in names if name.startswith(".")]


def said_before_step_1(log):
    return log.partition("\nstep 1/")[0].splitlines()


def check_shortness(log):
    lines = said_before_step_1(log)
    assert len(lines) <= MOST_LINES
    words = ("model", "trains", "computes", "data", "evaluation", "example", "batch", "memory", "speed")
    assert [word for word in words if not any(line.startswith(f"{word} ") for line in lines)] == []


def test_what_is_said_before_step_1_is_short_and_the_log_has_all(finished):
    run, log = finished
    check_shortness(log)
    whole = (run.output / "run.log").read_text()
    assert all(words in whole and words not in log for words in ("precision.compute", "training data:"))


def test_twin_all_of_it_on_request(run):
    code, log = run()("-v", "--dry-run")
    assert code == 0
    assert all(words in log for words in ("precision.compute", "training data:"))
    with pytest.raises(AssertionError):
        check_shortness(log)


@pytest.mark.parametrize("sources", [1, 2])
def test_every_caution_is_said(run, sources):
    """Of two sources also what is much of one and little of both."""
    trial = run(optim={"warmup": "100 steps"})
    (trial.folder / "train.json").write_text(json.dumps(ROWS * (2 if sources == 1 else 20)))  # copies: a caution
    if sources == 2:
        (trial.folder / "long.json").write_text(json.dumps([{"instruction": "Go on.", "output": "and on " * 200}]))
        trial.config["data"]["train"] = [str(trial.folder / name) for name in ("train.json", "long.json")]
    code, log = trial("--dry-run")
    full = [line for line in log.splitlines() if line.lstrip().startswith("caution")]
    assert code == 0
    assert trial()[0] == 0
    short = (trial.folder / "log.txt").read_text().splitlines()
    assert len([line for line in short if line.startswith("caution: ")]) == len(full) > 2


def test_the_times_add_up_and_the_last_lines_say_them(finished):
    run, log = finished
    took = json.loads((run.output / "train_results.json").read_text())
    parts = ("steps", "setup", "compile", "batches", "evaluation", "saving", "other")
    whole = sum(took[f"{part}_runtime"] for part in parts)
    assert took["whole_runtime"] == pytest.approx(whole, abs=0.01)  # each is rounded to a millisecond
    assert took["whole_runtime"] > took["train_runtime"] > took["steps_runtime"] > 0
    assert min(took["evaluation_runtime"], took["saving_runtime"], took["setup_runtime"]) > 0
    assert re.search(r"^done: 6 steps in .*: .*in steps", log, flags=re.MULTILINE)
    assert "this start" not in log


def test_peft_loads_the_output_and_it_answers_as_trained(finished, base):
    run, _ = finished
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run.output)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run.output / "checkpoint-6")
    tokenizer = AutoTokenizer.from_pretrained(run.output)
    assert tokenizer.chat_template
    ids = torch.tensor([tokenizer("Say heron.").input_ids])
    plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert not torch.equal(model(ids).logits, plain)


def test_transformers_loads_a_full_fine_tune(run):
    trained = run(adapter=None)
    assert trained()[0] == 0
    model = AutoModelForCausalLM.from_pretrained(trained.output)
    saved = load_file(trained.output / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items() if name in saved)


def test_no_path_of_the_machine_and_no_none_in_what_is_published(finished):
    run, _ = finished
    card = (run.output / "README.md").read_text()
    assert str(run.folder) not in card
    assert "None" not in card
    for name in ("data.json", "environment.json", "trainer_state.json"):
        assert str(run.folder.parent.parent) not in (run.output / name).read_text() or name == "data.json"


def test_the_resolved_config_runs_the_run_again(finished, tmp_path, server):
    run, _ = finished
    log = tmp_path / "log.txt"
    again = tmp_path / "again"
    assert server.run(["train", str(run.output / "config.yaml"), f"output={again}"], log) == 0, log.read_text()
    assert compare_folders(run.output, again) == []


def test_the_log_has_one_row_per_step_and_never_both_losses(finished):
    run, _ = finished
    rows = [json.loads(line) for line in (run.output / "trainer_log.jsonl").read_text().splitlines()]
    assert [row["current_steps"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["current_steps"] for row in rows if "eval_loss" in row] == [3, 6]
    assert not [row for row in rows if "loss" in row and "eval_loss" in row]
    assert rows[-1]["total_steps"] == 6


def test_output_on_a_pipe_is_plain_lines(finished):
    run, log = finished
    for text in (log, (run.output / "run.log").read_text()):
        assert "\r" not in text
        assert "\x1b" not in text
    assert re.search(r"^step 6/6 · loss \d", log, re.M)
    assert "surefoot chat" in log


def test_the_plan_is_recorded_with_what_was_verified(finished):
    run, _ = finished
    plan = json.loads((run.output / "plan.json").read_text())
    assert plan["verified"]["kernels"] == [plan["plan"]["attention"]["expected"]["value"]]
    assert plan["verified"]["trainable"] == plan["plan"]["trainable"]


def test_an_example_may_be_as_long_as_the_model_takes(run):
    trial = run(duration="1 step", eval_every=None)
    trial.config["data"] = {"train": str(trial.folder / "train.json")}
    code, log = trial()
    assert code == 0, log
    assert json.loads((trial.output / "plan.json").read_text())["plan"]["tokenizer"]["max_length"]["value"] == 512
    assert yaml.safe_load((trial.output / "config.yaml").read_text())["data"]["max_length"] == "auto"
    assert "512 tokens" in (trial.output / "README.md").read_text()


def test_a_dry_run_writes_nothing(run):
    trial = run()
    code, log = trial("--dry-run")
    assert code == 0, log
    assert "nothing was written" in log
    assert not trial.output.exists()


# What it refuses


def test_an_occupied_folder_is_refused_and_nothing_changes(finished):
    run, _ = finished
    before = run.files()
    code, log = run()
    assert code == 2
    assert "--resume" in log
    assert run.files() == before


def test_overwrite_replaces_a_run_but_not_a_strangers_folder(run):
    trial = run(duration="2 steps")
    trial.output.mkdir()
    (trial.output / "thesis.txt").write_text("years of work")
    code, log = trial("--overwrite")
    assert code == 2, log
    assert (trial.output / "thesis.txt").read_text() == "years of work"
    (trial.output / "thesis.txt").unlink()
    assert trial()[0] == 0
    assert trial("--overwrite", "duration=3 steps")[0] == 0
    assert (trial.output / "checkpoint-3").is_dir()
    assert trial("--overwrite", "duration=1 step")[0] == 0
    assert [path.name for path in trial.output.glob("checkpoint-*")] == ["checkpoint-1"]


def test_overwrite_deletes_nothing_before_the_checks_have_passed(run):
    trial = run(duration="2 steps")
    assert trial()[0] == 0
    before = trial.files()
    assert trial("--overwrite", "adapter.targets=[nothing_proj]")[0] == 2
    (trial.folder / "train.json").write_text('[{"instruction": "x"}]')
    assert trial("--overwrite")[0] == 2
    assert trial.files() == before


def test_resume_and_overwrite_contradict(run):
    code, log = run()("--resume", "--overwrite")
    assert code == 2
    assert "give one of them" in log


def test_a_cut_base_is_refused_before_anything_is_shown(run, base, tmp_path, finished):
    shutil.copytree(base, tmp_path / "cut")
    with (tmp_path / "cut" / "model.safetensors").open("rb+") as file:
        file.truncate(3000)
    code, log = run(model=str(tmp_path / "cut"))()
    assert code == 2
    assert "model.safetensors: damaged: 3,000 bytes, expected" in log
    shown = ("\ncomputes ", "\nexample ")
    assert all(words in finished[1] and words not in log for words in shown)


@pytest.mark.parametrize(
    "tensor", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight"]
)
def test_one_nan_in_the_base_is_refused_before_step_1(run, base, tmp_path, tensor):
    poisoned = tiny_llama(tmp_path / "poisoned")
    weights = load_file(poisoned / "model.safetensors")
    weights[tensor].view(-1)[3] = float("nan")
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    trial = run(model=str(poisoned))
    code, log = trial()
    assert code == 2
    assert tensor in log
    assert "Traceback" not in log
    assert not trial.output.exists()


def test_a_diverging_run_stops_with_names_and_leaves_only_finite_checkpoints(run):
    trial = run(adapter=None, optim={"lr": 1e30, "max_grad_norm": None, "warmup": 0.0}, duration="12 steps")
    code, log = trial()
    assert code == 5, log
    line = next(line for line in log.splitlines() if line.startswith("error: "))
    assert re.match(r"error: step \d+: the loss was not finite, 3 times in a row; ", line)
    assert "was the first non-finite value" in line
    assert line.count("examples ") == 1  # of its one micro-batch
    assert "Traceback" not in log
    rows = [json.loads(line) for line in (trial.output / "trainer_log.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row][-3:] == [None, None, None]
    for path in trial.output.rglob("*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(path).values()), path


# How it goes on


def test_resuming_a_finished_run_changes_nothing(finished):
    run, _ = finished
    before = run.files()
    code, log = run("--resume")
    assert code == 0
    assert "nothing to do" in log
    assert run.files() == before


def test_resume_without_a_checkpoint_starts(run):
    code, log = run(duration="1 step")("--resume")
    assert code == 0, log


@pytest.fixture
def stopped(run):
    """A run that was killed after step 4; checkpoints 2, 3 (best) and 4 exist."""
    trial = run()
    assert trial(kill={"at": "step", "n": 5})[0] == -9
    return trial


def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(stopped, finished):
    path = stopped.output / "checkpoint-4" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(bytes(data))
    code, log = stopped("--resume")
    assert code == 0, log
    assert "checkpoint-4/optimizer.safetensors" in log
    assert "resuming from" in log
    assert compare_folders(finished[0].output, stopped.output) == []


def test_no_checkpoint_that_verifies_is_exit_4(stopped):
    for folder in stopped.output.glob("checkpoint-*"):
        (folder / "state.json").write_text("{}")
    code, log = stopped("--resume")
    assert code == 4
    assert "no checkpoint verifies" in log


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("optim.lr=1e-3", 2, "optim.lr"),
        ("seed=7", 2, "seed"),
        ("batch.size=2", 2, "batch.size"),
        ("duration=5 steps", 0, "duration changed"),
        ("log_every=2", 0, "resuming from"),
        ("batch.micro=2", 0, "batch.micro changed"),
    ],
)
def test_config_changes_on_resume(stopped, override, code, words):
    found, log = stopped("--resume", override)
    assert found == code, log
    assert words in log
    assert "Traceback" not in log


def test_other_data_under_the_same_name_is_exit_4(stopped):
    (stopped.folder / "train.json").write_text(json.dumps([*ROWS[:-1], {**ROWS[-1], "output": "else"}]))
    code, log = stopped("--resume")
    assert code == 4
    assert "training data" in log


def test_moved_data_base_and_run_folder_go_on_bit_for_bit(run, tmp_path, finished):
    base = tiny_llama(tmp_path / "own")
    trial = run(model=str(base))
    assert trial(kill={"at": "step", "n": 5})[0] == -9
    base.rename(tmp_path / "moved-base")
    (trial.folder / "train.json").rename(tmp_path / "moved.json")
    trial.output.rename(tmp_path / "moved-run")
    trial.output = tmp_path / "moved-run"
    moved = [f"model={tmp_path / 'moved-base'}", f"data.train={tmp_path / 'moved.json'}", f"output={trial.output}"]
    code, log = trial("--resume", *moved)
    assert code == 0, log
    assert compare_folders(finished[0].output, trial.output) == []


def test_another_base_under_the_same_name_is_exit_4(run, tmp_path):
    base = tiny_llama(tmp_path / "own")
    trial = run(model=str(base))
    assert trial(kill={"at": "step", "n": 4})[0] == -9
    tiny_llama(base, seed=5)
    code, log = trial("--resume")
    assert code == 4
    assert "base model" in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_says_how_to_go_on_and_leaves_no_process(run, number):
    trial = run(duration="100000 steps", eval_every=None, checkpoint={"every": "100000 steps"})
    path = trial.folder / "run.yaml"
    path.write_text(yaml.safe_dump(trial.config))
    command = [sys.executable, "-m", "surefoot", "train", str(path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    step = int(re.search(r"saved checkpoint-(\d+); continue with:", out)[1])
    assert (trial.output / f"checkpoint-{step}" / "MANIFEST.json").is_file()
    assert f"train {path} --resume" in out
    time.sleep(0.2)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert trial("--resume", f"duration={step + 2} steps")[0] == 0


def terminated(*_args, **_named):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)  # a signal is heard in between


@pytest.mark.parametrize("where", ["steps.set_up", "run.publish"])
def test_sigterm_before_and_after_the_steps_ends_in_75_and_the_run_goes_on(tmp_path, base, monkeypatch, where):
    trial = Run(None, tmp_path, base)
    trial.config["output"] = str(tmp_path / "out")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(trial.config))
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(f"surefoot.runs.{where}", terminated)
        result = CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml")])
    assert result.exit_code == 75, result.output
    assert "interrupted" in result.stderr
    assert signal.getsignal(signal.SIGTERM) is before
    again = CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml"), "--resume"])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "all_results.json").is_file()


@pytest.mark.parametrize("resume", [False, True])
def test_ctrl_c_before_the_first_step_writes_nothing_and_says_so(tmp_path, base, monkeypatch, resume):
    trial = Run(None, tmp_path, base)
    trial.config["output"] = str(tmp_path / "out")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(trial.config))
    monkeypatch.setattr("surefoot.runs.steps.set_up", interrupt)
    result = CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml"), *(["--resume"] if resume else [])])
    assert result.exit_code == 130
    step = "the next step" if resume else "step 1"
    assert result.stderr.strip() == f"interrupted before {step}; nothing was written"
    assert not list((tmp_path / "out").glob("*"))


def test_twin_ctrl_c_after_something_was_written_does_not_say_so(tmp_path, base, monkeypatch):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(Run(None, tmp_path, base).config))
    monkeypatch.setattr("surefoot.runs.run.open_trackers", interrupt)
    result = CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml")])
    assert result.exit_code == 130
    assert result.stderr.strip() == f"interrupted while {tmp_path / 'out'} was written; continue with --resume"


def interrupt(*_):
    raise KeyboardInterrupt


# Every key works


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": "on"},
        {"tokenizer": {"pad": "add"}},
        {"adapter": {"kind": "dora", "rank": 2, "rslora": True, "targets": ["q_proj", "v_proj"]}},
        {"adapter": {"kind": "lora", "rank": 2, "modules_to_save": ["lm_head"], "dropout": 0.2}},
        {"tokenizer": {"pad": "add"}, "adapter": {"kind": "lora", "rank": 2, "modules_to_save": ["lm_head"]}},
        {"attention": "eager"},
        {"attention": {"flash": "off"}},
        {"early_stopping": {"patience": 1, "min_delta": 10.0}},
        {"optim": {"schedule": "wsd", "decay": 0.5, "warmup": "2 steps", "weight_decay": 0.1}},
        {"duration": "600 tokens", "checkpoint": {"every": "200 tokens"}},
        {"samples": {"count": 2, "max_new_tokens": 4}},
        {"data": {"train_on": "everything", "eval": 0.2, "max_samples": 10, "template": "alpaca"}},
        {"bos": {"prepend": "off"}},
        {"precision": {"compute": "bf16", "base": "fp32"}},
        {"batch": {"size": 5, "micro": 2}},
        {"checkpoint": {"every": "1 step", "keep": 1, "best": "none"}},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_run_with(run, changes):
    trial = run(**changes)
    if "data" in changes:
        trial.config["data"] = {"train": str(trial.folder / "train.json"), "max_length": 128, **changes["data"]}
    code, log = trial()
    assert code == 0, log
    assert (trial.output / "all_results.json").is_file()


# What verify finds


def verify(server, tmp_path, *arguments):
    log = tmp_path / "verify.txt"
    log.unlink(missing_ok=True)
    return server.run(["verify", *map(str, arguments)], log), log.read_text()


@pytest.fixture
def copy(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished[0].output, folder)
    return folder


def test_verify_agrees_with_what_was_written(server, finished, copy, tmp_path):
    code, log = verify(server, tmp_path, finished[0].output, "--same-as", copy)
    assert code == 0, log
    assert "identical" in log


def flip(copy):
    path = copy / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda copy: (copy / "adapter_model.safetensors").unlink(),
        lambda copy: (copy / "MANIFEST.json").unlink(),
        lambda copy: (copy / "checkpoint-6" / "state.json").write_text("{}"),
    ],
    ids=["flipped bit", "no model", "no manifest", "checkpoint"],
)
def test_verify_sees_damage_on_either_side(server, finished, copy, tmp_path, damage):
    damage(copy)
    assert verify(server, tmp_path, copy)[0] == 4
    assert verify(server, tmp_path, finished[0].output, "--same-as", copy)[0] == 4
    assert verify(server, tmp_path, copy, "--same-as", finished[0].output)[0] == 4


def test_published_weights_are_compared(finished, copy):
    flip(copy)
    (difference,) = compare_folders(finished[0].output, copy)
    assert difference.where.startswith("adapter_model.safetensors: ")


def test_verify_says_that_a_run_is_not_finished(server, stopped, tmp_path):
    code, log = verify(server, tmp_path, stopped.output)
    assert code == 0, log
    assert "is not finished" in log
