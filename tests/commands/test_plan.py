"""`surefoot plan`: table, JSON, presets, overrides; quick and without torch where nothing is measured."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from helpers.faults import gives, prints_fault
from helpers.model_layouts import LLAMA32_1B, llama3_tokenizer, model_facts
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.planning.plan import plan_from_json, plan_to_json
from surefoot.runs import plan_with_data as with_data
from surefoot.system import hardware
from surefoot.system.errors import EnvironmentFault, Fault


@pytest.fixture
def config(tmp_path):
    model = llama3_tokenizer(tmp_path / "model", chat=True, pad=True)
    model_facts(model, LLAMA32_1B)
    data = tmp_path / "train.jsonl"
    data.write_text('{"instruction": "a", "output": "b"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        f"stage: sft\nmodel: {model}\nadapter: {{kind: lora, rank: 8}}\ndata: {{train: {data}, max_length: 512}}\n"
        f"output: {tmp_path / 'run'}\n"
    )
    return path


@pytest.fixture
def whole(config, tmp_path):
    """The same of a model whose tokenizer can be loaded, as this machine's plan does to read the data."""
    base = tiny_llama(tmp_path / "whole", pad=True)
    config.write_text(config.read_text().replace(str(tmp_path / "model"), str(base)))
    return config


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_a_preset_is_planned_as_a_table(config):
    result = run(config, "--hardware", "h100")
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines() if line.split()[:2] == ["precision.compute", "bf16"]]
    assert "H100" in result.stdout
    assert "\x1b" not in result.stdout
    assert "\r" not in result.stdout


def test_json_is_the_plan(config):
    result = run(config, "--hardware", "rtx4090", "--json")
    data = json.loads(result.stdout)
    plan = plan_from_json(data)
    assert plan_to_json(plan) == data
    assert plan.adapter.targets.value[0] == "model.layers.0.self_attn.q_proj"
    assert gives(plan.device.reason, 4090)


def test_overrides_change_the_plan(config):
    result = run(config, "precision=fp32", "adapter.rank=4", "--hardware", "h100", "--json")
    plan = plan_from_json(json.loads(result.stdout))
    assert plan.precision.compute.value == "fp32"
    assert plan.adapter.rank == 4


def test_an_unknown_machine(config):
    result = run(config, "--hardware", "h2000")
    assert result.exit_code == 2
    assert prints_fault(result.stderr, "SF-USE-FLAG", "--hardware", "h2000", "h200")
    assert len(result.stderr.splitlines()) == 1


def test_all_conflicts_are_lines_on_stderr(config):
    result = run(config, "tokenizer.pad=w5", "precision=fp32", "attention.flash=on", "--hardware", "h100")
    assert result.exit_code == 2
    assert result.stdout == ""
    pad, flash = sorted(result.stderr.splitlines(), key=lambda line: "attention.flash" in line)
    assert prints_fault(pad, "SF-CONFIG-CONFLICT", "override tokenizer.pad=w5: tokenizer.pad")
    assert prints_fault(flash, "SF-CONFIG-CONFLICT", "override attention.flash=on: attention.flash", "fp16", "bf16")


def test_data_with_a_fault_are_told_below_the_plan_as_the_run_would(whole, tmp_path):
    """A file that a description names and that is gone; data that were never looked for are the twin."""
    (tmp_path / "dataset_info.json").write_text('{"birds": {"file_name": "gone.json"}}')
    asked = [whole, f"data.train={{path: {tmp_path}, name: birds}}"]
    result = run(*asked)
    assert result.exit_code == 2
    assert [line for line in result.stdout.splitlines() if line.split()[:1] == ["precision.compute"]]
    assert prints_fault(result.stderr, "SF-FILE-MISSING", tmp_path / "gone.json")
    told = json.loads(run(*asked, "--json").stdout)
    assert plan_from_json(told).precision.compute.value
    assert run(*asked, "--hardware", "h100").exit_code == 0


def test_a_hub_that_cannot_be_reached_from_here_is_no_fault_of_the_data(config, monkeypatch):
    unreached = EnvironmentFault(Fault("org/data", "the hub cannot be reached"))
    monkeypatch.setattr(with_data, "planned_tokenizer", lambda *asked: (_ for _ in ()).throw(unreached))
    result = run(config)
    assert result.exit_code == 0
    assert gives(result.stderr, "org/data")


def test_this_machine_is_the_default(whole):
    result = run(whole, "attention=eager", "precision=fp32", "--json")
    assert result.exit_code == 0, result.output
    plan = plan_from_json(json.loads(result.stdout))
    assert plan.attention.expected.value == "eager"
    assert plan.device.reason == hardware.detect().name
    assert run(whole, "--hardware", "cpu", "--json").stdout != result.stdout  # twin


def test_nothing_heavy_is_imported_for_a_preset(config):
    program = (
        "import sys\nfrom surefoot.commands.main import main\n"
        "try: main(['plan', sys.argv[1], '--hardware', 'h100'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'peft', 'accelerate', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))"
    )
    command = [sys.executable, "-c", program, str(config)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "HEAVY []"
