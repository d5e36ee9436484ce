"""Full, LoRA and DoRA in fp32, bf16 and fp16 on alpaca data: the short version of benchmarks/alpaca_matrix.py."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import alpaca_matrix
from helpers.faults import gives
from helpers.tiers import diagonal
from helpers.tiny_models import tiny_llama

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "instruct" / "alpaca_en_demo.json"
SAMPLES = 16
SHORT = {"batch": {"size": 4}, "duration": "3 epochs", "checkpoint": {"every": "1 epoch"}, "optim": {"lr": 5e-3}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("models") / "base", chat_template=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The real file where it is at hand, else rows of the same layout."""
    if REAL.is_file():
        return REAL
    rows = [
        {"instruction": f"Name {count} {kind}.", "input": "", "output": ", ".join([kind] * count)}
        for kind in ("birds", "fish", "trees", "towns")
        for count in range(1, 8)
    ]
    path = tmp_path_factory.mktemp("data") / "alpaca.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="module")
def trained(server, base, data, tmp_path_factory):
    """Adapter, precision -> the run folder; each is made once."""

    @functools.cache
    def train(adapter, precision):
        output = tmp_path_factory.mktemp("runs") / f"{adapter}-{precision}"
        config = alpaca_matrix.run_config(base, data, output, adapter, precision, SAMPLES, **SHORT)
        path, log = output.with_suffix(".yaml"), output.with_suffix(".txt")
        path.write_text(yaml.safe_dump(config))
        assert server.run(["train", str(path)], log) == 0, log.read_text()
        assert server.run(["verify", str(output)], log) == 0, log.read_text()
        return output

    return train


@pytest.mark.parametrize(("adapter", "precision"), diagonal(alpaca_matrix.ADAPTERS, alpaca_matrix.PRECISIONS))
def test_a_run_is_sound_from_the_command_to_the_reloaded_model(trained, base, adapter, precision):
    finding = alpaca_matrix.examine(base, trained(adapter, precision), adapter, precision)
    assert finding.faults == ()
    assert finding.steps == 3 * SAMPLES / 4


def test_twin_every_check_notices_what_it_is_for(trained, base, tmp_path):
    output = shutil.copytree(trained("lora", "bf16"), tmp_path / "run")
    weights = load_file(output / "adapter_model.safetensors")
    name = next(iter(weights))
    weights[name] = torch.full_like(weights[name], float("nan"))
    save_file(weights, output / "adapter_model.safetensors", metadata={"format": "pt"})
    log = output / "trainer_log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows[0]["loss"] = None
    for row in rows[len(rows) // 2 :]:
        row["loss"] = 99.0
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    finite, falls, computed, reloaded, logits = alpaca_matrix.examine(base, output, "lora", "fp32").faults
    assert gives(finite, 1)
    assert gives(falls, "99.000")
    assert gives(computed, "bf16")
    assert gives(reloaded, "weights")
    assert gives(logits, "logits")
