"""A run on a GPU learns what it learns on a CPU, goes on where it was killed, and is replayed where it failed."""

from __future__ import annotations

import shutil
from itertools import product

import pytest
import torch
from click.testing import CliRunner

from gpu.devices import DEVICES, IN_THE_LONG_TIER, QUIET, device_of, logged, losses_of, take
from helpers.tiers import representatives
from helpers.trained_runs import heron_folder, heron_train
from surefoot.commands.main import main
from surefoot.report.verification import compare_folders
from surefoot.training import loop, step
from surefoot.training.failure import read_failure

ADAPTERS = {
    "lora": {"kind": "lora", "rank": 4},
    "dora": {"kind": "dora", "rank": 4},
    "full": None,
}
# Relative, over six steps in which the loss falls. fp32 on two devices: other orders of sums. bf16 beside fp32: its
# rounding, 2^-9 for each number.
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
STEPS, BAD_STEP = 6, 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return heron_folder(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def on_the_cpu(place):
    """adapter -> losses in fp32, each made once."""
    made: dict[str, list[float]] = {}

    def get(adapter):
        if adapter not in made:
            with pytest.MonkeyPatch.context() as patch:
                take("cpu", patch)
                made[adapter] = losses_of(place, f"reference-{adapter}", adapter=ADAPTERS[adapter], precision="fp32")
        return made[adapter]

    return get


def furthest(found, wanted):
    assert len(found) == len(wanted) == STEPS
    return max(abs(one - other) / other for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("adapter", "precision"), representatives(product(ADAPTERS, TOLERANCE), ("lora", "bf16")))
def test_losses_are_those_of_the_cpu_in_fp32(place, monkeypatch, on_the_cpu, device, precision, adapter):
    wanted = on_the_cpu(adapter)
    take(device, monkeypatch)
    name = f"{device}-{adapter}-{precision}"
    found = losses_of(place, name, adapter=ADAPTERS[adapter], precision=precision)
    assert device_of(place / name) == device
    assert furthest(found, wanted) < TOLERANCE[precision]
    assert found[-1] < 0.95 * found[0]  # else agreement would be cheap


def test_twin_another_rate_is_noticed(place, monkeypatch, on_the_cpu):
    take("cpu", monkeypatch)
    found = losses_of(place, "twin", adapter=ADAPTERS["lora"], precision="fp32", optim={"lr": 2e-2})
    assert furthest(found, on_the_cpu("lora")) > TOLERANCE["bf16"]


# What fuses attention on a GPU, without measuring first: a kernel that is switched is the user's choice. In fp32 it is
# the memory-efficient kernel's, with the tiny model's grouped heads.
FUSED = {"attention": {"cudnn": "off"}}


@pytest.mark.parametrize("device", IN_THE_LONG_TIER)
@pytest.mark.parametrize("precision", representatives(TOLERANCE, "bf16"))
def test_packed_rows_and_sdpa_learn_the_same(place, monkeypatch, on_the_cpu, device, precision):
    take(device, monkeypatch)
    data = {"train": str(place / "train.json"), "max_length": 128, "packing": "on"}
    name = f"{device}-packed-{precision}"
    found = losses_of(place, name, precision=precision, data=data, batch={"size": 4, "micro": 4}, **FUSED)
    assert furthest(found, on_the_cpu("lora")) < TOLERANCE[precision]
    assert "taken out" not in (place / name / "run.log").read_text()


def stopped_after(last):
    """`loop.train_step`, which is interrupted as a program is that dies."""
    real = loop.train_step

    def stopping(*arguments, **named):
        if named["step"] > last:
            raise SystemExit(9)
        return real(*arguments, **named)

    return stopping


def straight_and_broken(place, device, resumed=lambda patch: None, attention="eager"):
    """Runs with dropout: two that nothing disturbed (on a CPU one), and one that ended in its fifth step and went on.

    resumed: changes something while it goes on.
    attention: eager, or sdpa, with gradients that are the same each time.
    """
    ways = {**QUIET, "duration": f"{STEPS} steps", "checkpoint": {"every": "2 steps", "keep": 9}, "precision": "bf16"}
    if attention == "sdpa":
        ways["attention"] = {"implementation": "sdpa", "deterministic": "on"}
    names = [f"{device}-{attention}-{name}" for name in ("straight", "again", "broken")]
    shutil.rmtree(place / names[2], ignore_errors=True)
    for name in names[: 1 if device == "cpu" else 2]:
        if not (place / name).exists():  # the other test's are as good
            assert heron_train(place, name, **ways).exit_code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", stopped_after(4))
        assert heron_train(place, names[2], **ways).exit_code == 9
    with pytest.MonkeyPatch.context() as patch:
        resumed(patch)
        result = heron_train(place, names[2], "--resume", **ways)
    assert result.exit_code == 0, result.output
    return [place / name for name in names]


@pytest.mark.parametrize("device", IN_THE_LONG_TIER)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_run_that_ended_and_went_on_equals_one_that_nothing_disturbed(place, monkeypatch, device, attention):
    """Bit for bit; and so are two straight runs."""
    take(device, monkeypatch)
    straight, again, broken = straight_and_broken(place, device, attention=attention)
    assert device == "cpu" or compare_folders(straight, again) == []
    assert compare_folders(straight, broken) == []


@pytest.mark.slow
def test_twin_other_draws_after_the_resume_are_noticed(place, monkeypatch):
    take("cpu", monkeypatch)
    straight, _, broken = straight_and_broken(
        place, "cpu", lambda patch: patch.setattr(step, "seed_micro_batch", lambda *place: torch.manual_seed(0))
    )
    assert compare_folders(straight, broken) != []


@pytest.mark.parametrize("device", IN_THE_LONG_TIER)
def test_a_failure_is_found_again_at_the_same_module(place, monkeypatch, device):
    take(device, monkeypatch)
    real = loop.train_step

    def spoiling(engine, *arguments, **named):
        if named["step"] == BAD_STEP:
            with torch.no_grad():
                names = [name for name in engine.parameters if "layers.1.mlp.up_proj.lora_B" in name]
                engine.parameters[names[0]][0, 0] = float("nan")
        return real(engine, *arguments, **named)

    name = f"{device}-failing"
    with pytest.MonkeyPatch.context() as spoilt:
        spoilt.setattr(loop, "train_step", spoiling)
        result = heron_train(place, name, duration="6 steps", guard={"max_consecutive": 2}, **QUIET)
    assert result.exit_code == 5, result.output
    kept = place / name / f"failure-{BAD_STEP}"
    origin = read_failure(kept).failure.finding.origin
    assert "layers.1.mlp.up_proj" in origin.module
    result = CliRunner().invoke(main, ["replay", str(kept)])
    assert result.exit_code == 0, result.output
    assert all(loss == loss for loss in logged(place / name) if loss is not None)
