"""`surefoot train` as a user meets it: what it leaves, what it refuses, how it stops and goes on."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch
import yaml
from click.testing import CliRunner
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.faults import lines_giving, prints_fault
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.report.footer import STEPS
from surefoot.report.verification import compare_folders

MOST_LINES = 26  # before step 1; the plan and the audit have some 100
ROWS = [
    {"instruction": f"Say {word} {k} times.", "input": "", "output": " ".join([word] * k)}
    for word in ("one", "two", "heron", "sky")
    for k in (1, 2, 4)
]


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

    def codes(self, *arguments):
        """The exit code, and the codes of what was refused."""
        code, log = self(*arguments)
        assert "Traceback" not in log
        return code, re.findall(r"^.*error: .*\[(SF-[A-Z-]+)\]$", log, flags=re.MULTILINE)

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
    words = ("model", "trains", "computes", "data", "evaluation", "example", "batch", "memory")
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


@pytest.mark.parametrize("sources", representatives([1, 2], 2))
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
    assert [line for line in lines_giving(log, 6, "set-up") if f" {STEPS}" in line]


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
    assert lines_giving((trial.output / "README.md").read_text(), 512)


def test_a_dry_run_writes_nothing(run):
    trial = run()
    code, log = trial("--dry-run")
    assert code == 0, log
    assert lines_giving(log, 6, trial.output)
    assert not trial.output.exists()


# What it refuses


def test_an_occupied_folder_is_refused_and_nothing_changes(finished):
    run, _ = finished
    before = run.files()
    assert run.codes() == (2, ["SF-USE-OUTPUT"])
    assert run.files() == before


@pytest.mark.parametrize(("flags", "code"), [([], 2), (["--overwrite"], 0)])
def test_a_dry_run_plans_there_and_tells_at_its_end_what_the_run_would_be_refused_for(finished, flags, code):
    """With a flag under which the run could use the folder nothing is told."""
    run, _ = finished
    before = run.files()
    found, log = run("--dry-run", *flags)
    assert found == code, log
    refused = [number for number, line in enumerate(log.splitlines()) if line.endswith("[SF-USE-OUTPUT]")]
    assert len(refused) == bool(code)
    planned = lines_giving(log, 6, run.output)[-1]  # steps
    assert all(number > log.splitlines().index(planned) for number in refused)
    assert run.files() == before


def test_overwrite_replaces_a_run_once_all_checks_have_passed_but_not_a_strangers_folder(run):
    trial = run(duration="2 steps")
    trial.output.mkdir()
    (trial.output / "thesis.txt").write_text("years")
    assert trial.codes("--overwrite") == (2, ["SF-USE-OUTPUT"])
    assert (trial.output / "thesis.txt").read_text() == "years"
    (trial.output / "thesis.txt").unlink()
    assert trial()[0] == 0
    before = trial.files()
    assert trial.codes("--overwrite", "adapter.targets=[nothing_proj]") == (2, ["SF-ADAPTER-TARGETS"])
    (trial.folder / "train.json").write_text('[{"instruction": "x"}]')
    assert trial.codes("--overwrite") == (2, ["SF-DATA-FORMAT"])
    assert trial.files() == before
    (trial.folder / "train.json").write_text(json.dumps(ROWS))
    for steps in (3, 1):
        assert trial("--overwrite", f"duration={steps} steps")[0] == 0
        assert (trial.output / f"checkpoint-{steps}").is_dir()
    assert [path.name for path in trial.output.glob("checkpoint-*")] == ["checkpoint-1"]


def test_resume_and_overwrite_contradict(run):
    code, log = run()("--resume", "--overwrite")
    assert (code, log.count("\n")) == (2, 1)


def test_a_cut_base_is_refused_before_anything_is_shown(run, base, tmp_path, finished):
    shutil.copytree(base, tmp_path / "cut")
    with (tmp_path / "cut" / "model.safetensors").open("rb+") as file:
        file.truncate(3000)
    code, log = run(model=str(tmp_path / "cut"))()
    assert code == 2
    assert log.rstrip().endswith("[SF-MODEL-WEIGHTS]")
    assert f"{tmp_path / 'cut' / 'model.safetensors'}: " in log
    shown = ("\ncomputes ", "\nexample ")
    assert all(words in finished[1] and words not in log for words in shown)


NAMES = ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight"]


@pytest.mark.parametrize("tensor", representatives(NAMES, NAMES[1]))
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
    assert "Traceback" not in log
    rows = [json.loads(line) for line in (trial.output / "trainer_log.jsonl").read_text().splitlines()]
    assert prints_fault(log, "SF-DIVERGED", f"step {rows[-1]['current_steps']}")
    assert [row["loss"] for row in rows if "loss" in row][-3:] == [None, None, None]
    for path in trial.output.rglob("*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(path).values()), path


# How it goes on


def test_resuming_a_finished_run_changes_nothing(finished):
    run, _ = finished
    before = run.files()
    assert run("--resume")[0] == 0
    assert run.files() == before


def test_resume_without_a_checkpoint_starts(run):
    code, log = run(duration="1 step")("--resume")
    assert code == 0, log


@pytest.fixture(scope="module")
def killed(server, tmp_path_factory, base):
    """A run that was killed after step 4; checkpoints 2, 3 (best) and 4 exist."""
    trial = Run(server, tmp_path_factory.mktemp("killed"), base)
    assert trial(kill={"at": "step", "n": 5})[0] == -9
    return trial


@pytest.fixture
def stopped(killed, run):
    """A copy of it, with data of its own."""
    trial = run()
    shutil.copytree(killed.output, trial.output)
    return trial


def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(stopped, finished):
    path = stopped.output / "checkpoint-4" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(bytes(data))
    code, log = stopped("--resume")
    assert code == 0, log
    assert "checkpoint-4/optimizer.safetensors" in log
    assert compare_folders(finished[0].output, stopped.output) == []


def test_no_checkpoint_that_verifies_is_exit_4(stopped):
    for folder in stopped.output.glob("checkpoint-*"):
        (folder / "state.json").write_text("{}")
    code, codes = stopped.codes("--resume")
    assert (code, "SF-CHECKPOINT-NONE" in codes) == (4, True)


def test_config_changes_on_resume(stopped):
    rows = (stopped.output / "trainer_log.jsonl").read_bytes()
    for override in ("optim.lr=1e-3", "seed=7", "batch.size=2"):
        code, log = stopped("--resume", override)
        assert (code, override.partition("=")[0] in log, "[SF-RESUME-CHANGED]" in log) == (2, True, True), log
    assert (stopped.output / "trainer_log.jsonl").read_bytes() == rows
    code, log = stopped("--resume", "duration=5 steps", "log_every=2", "batch.micro=2")
    assert code == 0, log
    assert all(f"{key} changed" in log for key in ("duration", "batch.micro", "log_every"))


def test_other_data_or_another_base_under_the_same_name_is_exit_4(stopped, tmp_path):
    (stopped.folder / "train.json").write_text(json.dumps([*ROWS[:-1], {**ROWS[-1], "output": "else"}]))
    assert stopped.codes("--resume") == (4, ["SF-RESUME-CHANGED"])
    (stopped.folder / "train.json").write_text(json.dumps(ROWS))
    stopped.config["model"] = str(tiny_llama(tmp_path / "base", seed=5))
    assert stopped.codes("--resume") == (4, ["SF-RESUME-CHANGED"])


def test_moved_data_base_and_run_folder_go_on_bit_for_bit(stopped, base, tmp_path, finished):
    """The run folder is a copy already."""
    shutil.copytree(base, tmp_path / "moved-base")
    (stopped.folder / "train.json").rename(tmp_path / "moved.json")
    code, log = stopped("--resume", f"model={tmp_path / 'moved-base'}", f"data.train={tmp_path / 'moved.json'}")
    assert code == 0, log
    assert compare_folders(finished[0].output, stopped.output) == []


@pytest.mark.parametrize("number", representatives([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_saves_says_how_to_go_on_and_leaves_no_process(run, number, any_python):
    trial = run(duration="100000 steps", eval_every=None, checkpoint={"every": "100000 steps"})
    path = trial.folder / "run.yaml"
    path.write_text(yaml.safe_dump(trial.config))
    command = [any_python, "-m", "surefoot", "train", str(path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    step = int(re.findall(r"\bcheckpoint-(\d+)", out)[-1])
    assert (trial.output / f"checkpoint-{step}" / "MANIFEST.json").is_file()
    assert f"train {path} --resume" in out
    time.sleep(0.2)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert trial("--resume", f"duration={step + 2} steps")[0] == 0


def terminated(*_args, **_named):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)  # a signal is heard in between


@pytest.fixture
def in_process(tmp_path, base):
    """`surefoot train` of one step in this process, with more words where they are given."""
    trial = Run(None, tmp_path, base, duration="1 step", eval_every=None)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(trial.config))
    return lambda *words: CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml"), *words])


@pytest.mark.parametrize("where", representatives(["steps.load_models", "run.publish"], "run.publish"))
def test_sigterm_before_and_after_the_steps_ends_in_75_and_the_run_goes_on(tmp_path, in_process, monkeypatch, where):
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(f"surefoot.runs.{where}", terminated)
        result = in_process()
    assert result.exit_code == 75, result.output
    assert signal.getsignal(signal.SIGTERM) is before
    again = in_process("--resume")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "all_results.json").is_file()


@pytest.mark.parametrize("words", [(), ("--resume",)])
def test_ctrl_c_before_the_first_step_writes_nothing_and_says_so(tmp_path, in_process, monkeypatch, words):
    monkeypatch.setattr("surefoot.runs.steps.load_models", interrupt)
    result = in_process(*words)
    assert (result.exit_code, str(tmp_path) in result.stderr) == (130, False)
    assert not list((tmp_path / "out").glob("*"))


def test_twin_ctrl_c_after_something_was_written_names_the_folder(tmp_path, in_process, monkeypatch):
    monkeypatch.setattr("surefoot.runs.run.open_trackers", interrupt)
    result = in_process()
    assert (result.exit_code, str(tmp_path / "out") in result.stderr) == (130, True)


def interrupt(*_):
    raise KeyboardInterrupt


# Every key works


EVERY_KEY = [
    {
        "gradient_checkpointing": "on",
        "tokenizer": {"pad": "add"},
        "adapter": {"kind": "lora", "rank": 2, "modules_to_save": ["lm_head"], "dropout": 0.2},
        "attention": "eager",
        "optim": {"schedule": "wsd", "decay": 0.5, "warmup": "2 steps", "weight_decay": 0.1},
        "samples": {"count": 2, "max_new_tokens": 4},
    },
    {
        "adapter": {"kind": "dora", "rank": 2, "rslora": True, "targets": ["q_proj", "v_proj"]},
        "tokenizer": {"pad": "add"},
        "attention": {"flash": "off"},
        "early_stopping": {"patience": 1, "min_delta": 10.0},
        "duration": "600 tokens",
        "checkpoint": {"every": "200 tokens"},
    },
    {
        "adapter": {"kind": "lora", "rank": 2, "modules_to_save": ["lm_head"]},
        "data": {"train_on": "everything", "eval": 0.2, "max_samples": 10, "template": "alpaca"},
        "bos": {"prepend": "off"},
        "precision": {"compute": "bf16", "base": "fp32"},
        "batch": {"size": 5, "micro": 2},
        "checkpoint": {"every": "1 step", "keep": 1, "best": "none"},
    },
]


@pytest.mark.parametrize("changes", representatives(EVERY_KEY, EVERY_KEY[0]), ids="-".join)
def test_a_run_with(run, changes):
    trial = run(**changes)
    if "data" in changes:
        trial.config["data"] = {"train": str(trial.folder / "train.json"), "max_length": 128, **changes["data"]}
    code, log = trial()
    assert code == 0, log
    assert (trial.output / "all_results.json").is_file()


# What verify finds


def verify(*arguments):
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def flip(copy):
    path = copy / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "nothing": lambda copy: None,
    "flipped bit": flip,
    "no model": lambda copy: (copy / "adapter_model.safetensors").unlink(),
    "no manifest": lambda copy: (copy / "MANIFEST.json").unlink(),
    "checkpoint": lambda copy: (copy / "checkpoint-6" / "state.json").write_text("{}"),
}


def test_verify_sees_damage_on_either_side(finished, tmp_path):
    """Nothing is the twin."""
    whole = finished[0].output
    for name, damage in DAMAGES.items():
        copy = shutil.copytree(whole, tmp_path / name)
        damage(copy)
        codes = [
            verify(*words).exit_code for words in ((copy,), (whole, "--same-as", copy), (copy, "--same-as", whole))
        ]
        assert codes == [0 if name == "nothing" else 4] * 3, name
    (difference,) = compare_folders(whole, tmp_path / "flipped bit")
    assert difference.where.startswith("adapter_model.safetensors: ")


def test_verify_says_that_a_run_is_not_finished(killed, finished):
    assert verify(killed.output).exit_code == 0
    assert len(verify(killed.output).output.splitlines()) == len(verify(finished[0].output).output.splitlines()) + 1
