"""`surefoot migrate`: what it writes and prints, and what it refuses."""

import json
import re
import shutil

import pytest
import yaml
from click.testing import CliRunner

from helpers import zoo
from helpers.faults import prints_fault
from helpers.hub_stub import client_of, serve
from surefoot.commands.main import main as cli
from surefoot.config.load import load_config
from surefoot.runs.make_plan import make_plan

CONFIG = """\
stage: sft
model: opt
data: {train: train.json, max_length: 64}
adapter: {kind: lora, rank: 4, targets: [q_proj, out_proj]}
tokenizer: {pad: <pad>}
batch: {size: 4}
precision: fp32
optim: {lr: 9.65e-6}
output: runs/opt
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    zoo.opt(tmp_path / "opt")
    zoo.llama3(tmp_path / "llama3")
    rows = [{"instruction": f"say {n}", "output": f"it is {n}"} for n in range(9)]
    (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def migrate(*words):
    return CliRunner().invoke(cli, ["migrate", *words])


def test_the_config_is_written_and_runs(place):
    result = migrate("run.yaml", "--to", "llama3", "--try")
    assert result.exit_code == 0, result.output
    written = yaml.safe_load((place / "run-llama3.yaml").read_text(encoding="utf-8"))
    assert written["adapter"]["targets"] == ["q_proj", "o_proj"]
    assert written["model"] == {"path": "llama3"}
    marks = re.findall(r"^ *\[(.)\] ", result.output, re.MULTILINE)  # licence, token, memory, what is left to do, run
    assert [*marks[:3], marks[-1]] == ["-", "x", "x", "x"]
    assert "model.decoder.layers." in result.output
    assert not (place / "runs").exists()
    assert (place / "run.yaml").read_text(encoding="utf-8") == CONFIG


def test_overrides_are_moved_as_what_the_file_sets(place):
    (place / "run.yaml").write_text(CONFIG.replace("model: opt", "model: not-here"), encoding="utf-8")
    result = migrate("run.yaml", "--to", "llama3", "model=opt", "batch.size=2")
    assert result.exit_code == 0, result.output
    assert "opt -> llama3" in result.output
    assert yaml.safe_load((place / "run-llama3.yaml").read_text(encoding="utf-8"))["batch"]["size"] == 2


def test_twin_without_the_override_the_file_is_blamed(place):
    (place / "run.yaml").write_text(CONFIG.replace("model: opt", "model: not-here"), encoding="utf-8")
    result = migrate("run.yaml", "--to", "llama3")
    assert result.exit_code == 2
    assert prints_fault(result.output, "SF-FILE-MISSING", "run.yaml:2:8: error: model.path", "not-here")


def said_at_once(output):
    return int(re.search(r"(\d+) examples? per micro-batch", output)[1])


def test_memory_is_that_of_the_micro_batches_which_plan_says(place):
    many = CONFIG.replace("size: 4", "size: 512").replace("max_length: 64", "max_length: 512")
    (place / "run.yaml").write_text(many, encoding="utf-8")
    result = migrate("run.yaml", "--to", "llama3")
    assert result.exit_code == 0, result.output
    planned = CliRunner().invoke(cli, ["plan", "run-llama3.yaml", "--json"])
    made = json.loads(planned.stdout)
    assert said_at_once(result.output) == made["batch"]["micro"]["value"]
    blind = make_plan(load_config("run-llama3.yaml").config, measure=False)  # twin: without the data another number
    assert said_at_once(result.output) != blind.batch.micro.value


@pytest.mark.parametrize(
    ("name", "remedy"),
    {"models/other": (), "llama33": ("llama3",), "train.json": ()}.items(),
)
def test_a_new_model_that_is_none_is_no_fault_of_the_file(place, name, remedy):
    (place / "models").mkdir()  # without it, models/other is a hub id
    result = migrate("run.yaml", "--to", name)
    assert result.exit_code == 2
    assert prints_fault(result.output, "SF-FILE-MISSING", "--to", name, *remedy)


@pytest.mark.parametrize("name", ["opt", "./opt", "elsewhere/../opt"])
def test_the_same_model_is_nothing_to_move(place, name):
    (place / "elsewhere").mkdir()
    result = migrate("run.yaml", "--to", name)
    assert result.exit_code == 2
    assert prints_fault(result.stderr, "SF-USE-FLAG", "--to", name)
    assert not list(place.glob("run-*.yaml"))


def test_twin_a_copy_under_another_name_is_another_model(place):
    shutil.copytree(place / "opt", place / "other")
    result = migrate("run.yaml", "--to", "other")
    assert result.exit_code == 0, result.output
    assert "opt -> other" in result.output


def test_a_trial_that_fails_is_told_and_is_no_success(place):
    (place / "train.json").write_text("[]", encoding="utf-8")
    result = migrate("run.yaml", "--to", "llama3", "--try")
    assert result.exit_code == 3
    assert result.output.count("[!]") == 1
    assert "train.json" in result.output


def test_a_model_that_does_not_fit_is_said(place):
    (place / "big").mkdir()
    config = json.loads((place / "llama3" / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    (place / "big" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / "big" / name).write_bytes((place / "llama3" / name).read_bytes())
    full = CONFIG.replace("adapter: {kind: lora, rank: 4, targets: [q_proj, out_proj]}\n", "")
    (place / "full.yaml").write_text(full, encoding="utf-8")
    result = migrate("full.yaml", "--to", "big", "--hardware", "rtx4090")
    assert result.exit_code == 3
    assert result.output.count("[!]") == 1
    assert "adapter" in result.output


def test_json_is_json(place):
    result = migrate("run.yaml", "--to", "llama3", "--json")
    found = json.loads(result.stdout)
    assert found["config"] == "run-llama3.yaml"
    assert {"adapter.targets", "model.path"} <= {move["key"] for move in found["moves"]}


def test_nothing_is_overwritten(place):
    (place / "run-llama3.yaml").write_text("mine", encoding="utf-8")
    result = migrate("run.yaml", "--to", "llama3")
    assert result.exit_code == 2
    assert prints_fault(result.output, "SF-USE-OUTPUT", "run-llama3.yaml")
    assert (place / "run-llama3.yaml").read_text(encoding="utf-8") == "mine"


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture
def hub(place):
    """A hub that has Llama, for those who accepted its terms."""
    with serve(place / "hub") as stub, client_of(stub, place / "cache"):
        stub.add("models", "meta-llama/Llama-3.1-8B", {name: (place / "llama3" / name).read_bytes() for name in FILES})
        stub.gated = {"meta-llama/Llama-3.1-8B"}
        yield stub


def test_a_gated_model_names_the_page_and_the_login(place, hub):
    result = migrate("run.yaml", "--to", "meta-llama/Llama-3.1-8B")
    assert result.exit_code == 3
    assert "https://huggingface.co/meta-llama/Llama-3.1-8B" in result.output
    assert "hf auth login" in result.output  # a command to paste
    assert not list(place.glob("run-*.yaml"))


def test_twin_with_access_it_is_written(place, hub):
    hub.gated = set()
    result = migrate("run.yaml", "--to", "meta-llama/Llama-3.1-8B")
    assert result.exit_code == 0, result.output
    assert re.search(r"\[x\] .*meta-llama/Llama-3\.1-8B$", result.output, re.MULTILINE)
    assert re.search(r"\[ \] .*\btoken\b", result.output)
    assert (place / "run-Llama-3.1-8B.yaml").is_file()
