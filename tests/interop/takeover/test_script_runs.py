"""`surefoot run -- python train.py`, from the script's first line to its last."""

from __future__ import annotations

import json
import subprocess

import pytest
from transformers import AutoModelForCausalLM

from helpers.faults import prints_fault
from helpers.tiny_models import tiny_llama
from surefoot.report.verification import compare_folders

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
