"""Every row of the conformance table holds, and every column sees what it is there to see."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from conformance import table
from conformance.runs import KINDS, build, run_config, stopped_and_resumed, whole_run
from conformance.table import LIMIT, MERGED, ROWS, Proof, merge_error, prove, reload_error, step_errors, trained_modules
from conformance.targets import TARGETS
from helpers.tiers import representatives
from surefoot.report.verification import compare_folders
from surefoot.training import step

# Fused products, transposed matrices, a family that is neither, a state space beside attention, experts under pictures.
QUICK = [("llama3", "full"), ("gpt2", "lora"), ("phi3", "dora"), ("falcon_h1", "lora"), ("qwen3_5_moe+vision", "lora")]


@pytest.mark.parametrize(("family", "kind"), representatives(ROWS, *QUICK))
def test_row(family, kind, tmp_path):
    proof = prove(family, kind, tmp_path)
    assert proof.misses == [], proof


@torch.no_grad()
def louder_norm(model: nn.Module) -> None:
    """One part in a thousand on the last norm before the head."""
    norms = [p for name, p in model.named_parameters() if name.endswith("norm.weight") and ".layers." not in name]
    norms[-1].mul_(1.001)


def louder_gradient(model: nn.Module) -> None:
    """One part in a thousand on the gradient of a single tensor."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainable[-1].register_hook(lambda gradient: gradient * 1.001)


@pytest.mark.parametrize("kind", representatives(KINDS, "lora"))
def test_twin_a_disturbed_step_is_seen(kind, tmp_path):
    base = build("llama3", tmp_path / "base", dropout=False)
    loss, gradients = step_errors("llama3", kind, base, tmp_path, louder_norm)
    assert loss > LIMIT
    assert gradients > LIMIT
    loss, gradients = step_errors("llama3", kind, base, tmp_path, louder_gradient)
    assert loss <= LIMIT < gradients


CHANGED = [("full", "model.safetensors"), ("dora", "adapter_model.safetensors")]


@pytest.mark.parametrize(("kind", "name"), representatives(CHANGED, CHANGED[1]))
def test_twin_a_changed_output_is_seen(kind, name, tmp_path):
    base, output = build("llama3", tmp_path / "base", dropout=True), tmp_path / "run"
    trained = whole_run(run_config(base, kind, output, dropout=True), base)
    assert reload_error(base, output, kind, trained) <= LIMIT
    weights = load_file(output / name)
    last = max(weights)
    save_file(weights | {last: weights[last] * 1.01}, output / name, {"format": "pt"})
    assert reload_error(base, output, kind, trained) > LIMIT


def test_twin_a_merge_that_leaves_the_adapter_out_is_seen(tmp_path):
    base, output = build("llama3", tmp_path / "base", dropout=True), tmp_path / "run"
    trained = whole_run(run_config(base, "lora", output, dropout=True), base)
    assert merge_error(output, trained) <= MERGED
    assert reload_error(output, base, "full", trained) > MERGED


def test_twin_missing_targets_are_seen(tmp_path):
    base, output = build("llama3", tmp_path / "base", dropout=True), tmp_path / "run"
    whole_run(run_config(base, "lora", output, dropout=True, targets=["q_proj"]), base)
    found = trained_modules(base, output, "lora")
    assert found < TARGETS["llama3"]
    assert len(found) == 2


def test_twin_draws_that_drift_after_the_stop_are_seen(tmp_path, monkeypatch):
    base = build("llama3", tmp_path / "base", dropout=True)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    whole_run(run_config(base, "lora", straight, dropout=True), base)
    exact = step.seed_micro_batch
    monkeypatch.setattr(step, "seed_micro_batch", lambda seed, n, micro: exact(seed, n + (n > 2), micro))
    stopped_and_resumed(run_config(base, "lora", broken, dropout=True))
    assert compare_folders(straight, broken) != []


GOOD = Proof("any", "lora", 0.0, LIMIT, 0.0, MERGED, (frozenset("a"), frozenset("a")), ())
BAD = {
    "loss": replace(GOOD, loss=2 * LIMIT),
    "gradients": replace(GOOD, gradients=float("inf")),
    "reload": replace(GOOD, reload=float("nan")),
    "merge": replace(GOOD, merge=2 * MERGED),
    "targets": replace(GOOD, targets=(frozenset("ab"), frozenset("a"))),
    "resume": replace(GOOD, resume=("state.json: step: 3 against 4",)),
}


def test_a_miss_is_named_and_fails_the_command(monkeypatch, capsys):
    assert GOOD.misses == []
    for column, bad in BAD.items():
        assert bad.misses == [column]
        monkeypatch.setattr(table, "prove", lambda *_, bad=bad: bad)
        assert table.main(["llama2"]) == 1
        assert f"MISS: {column}" in capsys.readouterr().out
    monkeypatch.setattr(table, "prove", lambda *_: GOOD)
    assert table.main(["llama2"]) == 0
