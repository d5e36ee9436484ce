"""`surefoot run -- python train.py`, from the script's first line to its last."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from transformers import AutoModelForCausalLM

from helpers.faults import prints_fault
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.report.verification import compare_folders
from surefoot.system.errors import STOPPED_EXIT_CODE
from surefoot.training.checkpoint import newest_verified

SCRIPT = """
import sys
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("base")
tokenizer.pad_token = tokenizer.eos_token
rows = [dict(tokenizer(f"heron {number} stands on leg {number % 2}.")) for number in range(int(sys.argv[1]))]
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32),
    TrainingArguments("out", max_steps=3, per_device_train_batch_size=4, report_to="none", use_cpu=True),
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    train_dataset=rows,
    processing_class=tokenizer,
)
done = trainer.train()
trainer.save_model("final")
print("after", done.global_step, done.training_loss)
"""


@pytest.fixture
def place(tmp_path):
    tiny_llama(tmp_path / "base")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(place, python, *words):
    command = [python, "-m", "surefoot", *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


def test_the_script_goes_on_with_the_trained_weights(place, any_python):
    done = run(place, any_python, "run", "--", any_python, "train.py", "8")
    assert done.returncode == 0, done.stderr
    results = json.loads((place / "out/surefoot/all_results.json").read_text())
    assert f"after 3 {results['train_loss']}" in done.stdout
    saved, trained = (AutoModelForCausalLM.from_pretrained(place / path) for path in ("final", "out/surefoot"))
    own = saved.state_dict()
    assert all((own[name] == value).all() for name, value in trained.state_dict().items())
    config = (place / "out/taken-over/surefoot.yaml").read_text()
    (place / "again.yaml").write_text(config.replace("output: out/surefoot", "output: again"))
    again = run(place, any_python, "train", "again.yaml")
    assert again.returncode == 0, again.stderr
    assert not compare_folders(place / "again/checkpoint-3", place / "out/surefoot/checkpoint-3")


def test_a_script_that_ends_early_is_one_line(place, any_python):
    done = run(place, any_python, "run", "--", any_python, "train.py")
    assert done.returncode == 2
    assert prints_fault(done.stderr, "SF-TRANSLATE-SCRIPT", "train.py", 1)
    assert not (place / "out/surefoot").exists()


def test_translate_writes_the_config_and_the_rows(place, any_python):
    done = run(place, any_python, "translate", "--", any_python, "train.py", "8")
    assert done.returncode == 0, done.stderr
    assert len((place / "out/taken-over/train.jsonl").read_text().splitlines()) == 8
    assert done.stdout == (place / "out/taken-over/surefoot.yaml").read_text()
    assert not (place / "final").exists()


def test_a_script_that_resumes_by_itself_goes_on_with_its_run(place, any_python):
    first = run(place, any_python, "run", "--", any_python, "train.py", "8")
    assert first.returncode == 0, first.stderr
    refused = run(place, any_python, "run", "--", any_python, "train.py", "8")
    assert prints_fault(refused.stderr, "SF-USE-OUTPUT", place / "out/surefoot")
    (place / "train.py").write_text(SCRIPT.replace("train()", "train(resume_from_checkpoint=True)"))
    again = run(place, any_python, "run", "--", any_python, "train.py", "8")
    assert again.returncode == 0, again.stderr
    assert (place / "out/surefoot/checkpoint-3").is_dir()


SLOW = """
import time
from pathlib import Path
Path("begun").touch()
time.sleep(600)
# Trainer(...).train()
"""


def begun(place, python, *words):
    command = [python, "-m", "surefoot", *words]
    return subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path, process, lines=0):
    while process.poll() is None and not (path.exists() and len(path.read_bytes().splitlines()) >= lines):
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()


def children_of(process):
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("number", representatives([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_ends_the_script_too(place, number):
    """While it loads, reads its data, or does whatever it does before train()."""
    (place / "slow.py").write_text(SLOW)
    process = begun(place, sys.executable, "run", "--", sys.executable, "slow.py")
    wait_for(place / "begun", process)
    scripts = children_of(process)
    assert scripts
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: STOPPED_EXIT_CODE}[number]
    assert not any(one.is_running() for one in scripts)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_goes_on_with_its_script(place, number):
    (place / "train.py").write_text(SCRIPT.replace("max_steps=3", "max_steps=400, logging_steps=1"))
    words = ("run", "--resume", "--", sys.executable, "train.py", "8")
    process = begun(place, sys.executable, *words)
    wait_for(place / "out/surefoot/trainer_log.jsonl", process, lines=2)
    scripts = children_of(process)
    for one in (process, *scripts) if number == signal.SIGINT else (process,):  # as a terminal does
        one.send_signal(number)
    said, errors = process.communicate(timeout=100)
    assert process.returncode == STOPPED_EXIT_CODE, (said, errors)
    assert "Traceback" not in errors
    assert not any(one.is_running() for one in scripts)
    assert not (place / "final").exists()
    assert newest_verified(place / "out/surefoot")[0].step < 400
    again = run(place, sys.executable, *words)
    assert again.returncode == 0, again.stderr
    assert "after 400" in again.stdout
