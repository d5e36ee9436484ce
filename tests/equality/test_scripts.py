"""A script around transformers' Trainer, run as it stands, and the config that its syntax tree becomes: both train the
same ids with the same learning rates, and their first step has the same loss."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from equality import models
from equality.ours import LOSS, RATE, run_until_step_1, same_examples, same_rates
from helpers.tiers import representatives
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file

HERE = Path(__file__).parent
SCRIPTS = {"lora_trainer": "llama3", "full_trainer": "qwen2"}


@pytest.fixture(params=representatives(SCRIPTS, "lora_trainer"))
def script(request, tmp_path, monkeypatch):
    """The script as a file that finds its model and data in the working directory."""
    monkeypatch.chdir(tmp_path)
    models.build(SCRIPTS[request.param], tmp_path / "models")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "texts.jsonl").write_text((HERE / "trl_data" / "texts.jsonl").read_text())
    path = tmp_path / f"{request.param}.py"
    path.write_text((HERE / "scripts" / path.name).read_text())
    return path


def translated(path):
    read = Options(read=lambda name: Path(name).read_text(encoding="utf-8"))
    return json.loads(json.dumps(translate_file(str(path), path.read_text(), [], read).config))


def theirs(path, python):
    """What run_script.py wrote of it."""
    out = path.with_suffix(".json")
    environment = {**os.environ, "PYTHONPATH": str(HERE / "stand_in"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, str(HERE / "run_script.py"), str(path), str(out)], env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(out.read_text())


def test_the_translated_script_trains_as_the_script(script, any_python):
    other, config = theirs(script, any_python), translated(script)
    in_one_step = config["batch"]["size"] == len(other["examples"])
    ours = run_until_step_1(config, step=in_one_step)
    assert same_examples(ours, other)
    assert same_rates(ours, other)
    if in_one_step:
        passes = len(other["losses"]) // len(other["learning_rates"])
        assert ours.first_loss == pytest.approx(sum(other["losses"][:passes]), abs=LOSS)


def test_twin_another_schedule_gives_other_rates(script):
    config = translated(script)
    right = run_until_step_1(config, step=False).learning_rates
    for key, value in (("schedule", "constant"), ("warmup_from_zero", False)):
        other = {**config, "optim": {**config["optim"], key: value}, "output": f"{config['output']}-{key}"}
        assert run_until_step_1(other, step=False).learning_rates != pytest.approx(right, abs=RATE)
