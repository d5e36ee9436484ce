"""One process with its optimizer in host memory takes the steps of one without, to the bit, and goes on after a kill.

`tests/rehearsal/test_offloaded.py` runs the same on the pretend GPU, where the two memories are not one.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import surefoot
from helpers.tiers import representatives
from rehearsal.runs import OFFLOADED, STEPS, Died, config_of, dying, make_world
from surefoot.report.verification import compare_folders
from surefoot.training.engine import offloaded

# Several micro-batches, clipping below every norm, and steps that a NaN makes the guard reject.
EVERYTHING: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "clipped": {"precision": "bf16", "optim": {"lr": 1e-3, "max_grad_norm": 0.01}},
    "unclipped": {"precision": "bf16", "optim": {"lr": 1e-3, "max_grad_norm": None}},
    "one micro-batch": {"precision": "bf16", "batch": {"size": 4, "micro": 4}},
    "checkpointed": {"precision": "bf16", "gradient_checkpointing": "on"},
    "lora": {"precision": "bf16", "adapter": {"kind": "lora", "rank": 4, "dropout": 0.1}},
    "dora": {"precision": "bf16", "adapter": {"kind": "dora", "rank": 4}},
    "muon": {"precision": "bf16", "optim": {"name": "muon", "lr": 1e-3}},
    "adafactor": {"precision": "bf16", "optim": {"name": "adafactor", "lr": 1e-3}},
    "sgd": {"precision": "bf16", "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    "reward": {"precision": "bf16", "stage": "reward", "data": "pairs"},
    "dpo": {"precision": "bf16", "stage": "dpo", "data": "pairs"},
    "qat": {"precision": {"compute": "bf16", "qat": "int4", "qat_group_size": 32}},
    "8 bits": {"precision": "bf16", "optim": {"name": "adamw_8bit", "lr": 1e-3}},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("offloaded"))


def quiet_train(config: dict[str, Any], **how: Any) -> None:
    surefoot.train(config, stream=io.StringIO(), **how)


def run(world: Path, name: str, **changes: Any) -> Path:
    config = config_of(world, name, **{"adapter": None, "seed": 5} | changes)
    quiet_train(config)
    return Path(config["output"])


def tensors(run: Path) -> dict[str, torch.Tensor]:
    # A recorded failure has the weights only where they are in one place.
    files = sorted(file for file in run.rglob("*.safetensors") if not file.parent.name.startswith("failure"))
    assert any(file.name == "optimizer.safetensors" for file in files)
    return {f"{file.relative_to(run)}/{name}": one for file in files for name, one in load_file(file).items()}


def steps(run: Path) -> list[dict[str, Any]]:
    """What the log says of each step, but for its time."""
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("loss", "grad_norm", "skipped") if key in row} for row in rows if "lr" in row]


def same(one: Path, other: Path) -> bool:
    a, b = tensors(one), tensors(other)
    equal = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    return equal and steps(one) == steps(other)


@pytest.mark.parametrize("case", representatives(EVERYTHING, "bf16", "fp16", "clipped", "lora", "dpo"))
def test_it_takes_the_same_steps(world, case):
    if case == "qat":
        pytest.importorskip("torchao")
    plain = run(world, f"{case} plain", **EVERYTHING[case])
    off = run(world, f"{case} off", **EVERYTHING[case], **OFFLOADED)
    assert len(steps(plain)) == STEPS
    assert same(plain, off)


@pytest.mark.parametrize(
    "broken",
    [
        "the weights do not come back",
        "the second micro-batch replaces the first",
        "weights in 16 bits are what trains",
    ],
)
def test_the_comparison_has_teeth(world, broken, monkeypatch):
    plain = world / "bf16 plain"
    if not plain.exists():
        run(world, "bf16 plain", **EVERYTHING["bf16"])
    engine = offloaded.OffloadedEngine
    if broken.startswith("the weights"):
        monkeypatch.setattr(engine, "_send", lambda self, master, parameter: None)
    elif broken.startswith("the second"):
        monkeypatch.setattr(
            engine, "_add", lambda self, name, one, *rest: setattr(self._masters[name], "grad", one.float())
        )
    else:
        real = offloaded._move

        def move(model, parameters, device, narrow):
            masters = real(model, parameters, device, narrow)
            for name, one in parameters.items():
                masters[name].data = one.detach().float()
            return masters

        monkeypatch.setattr(offloaded, "_move", move)
    assert not same(plain, run(world, f"broken {broken}", **EVERYTHING["bf16"], **OFFLOADED))


def test_it_goes_on_after_a_kill_bit_for_bit(world):
    whole = run(world, "whole", **EVERYTHING["bf16"], **OFFLOADED)
    settings: dict[str, Any] = {"adapter": None, "seed": 5, **EVERYTHING["bf16"], **OFFLOADED}
    config = config_of(world, "killed", **settings)
    with pytest.MonkeyPatch.context() as patch:
        dying(patch, after=2)
        with pytest.raises(Died):
            quiet_train(config)
    quiet_train(config, resume=True)
    assert compare_folders(whole, Path(config["output"])) == []


def test_a_step_that_is_not_finite_changes_nothing(world):
    """The second step's gradients are infinite in one weight: both runs leave it out, and take the third."""

    def poisoned(patch: pytest.MonkeyPatch, name: str, **changes: Any) -> Path:
        from surefoot.training import step
        from surefoot.training.engine import Engine

        real = step.accumulate_gradients

        def accumulate(engine: Engine, *given: Any, **named: Any) -> Any:
            sums = real(engine, *given, **named)
            if named["step"] == 2:
                engine.reduce()
                next(iter(engine.gradients().values())).view(-1)[0] = float("inf")
            return sums

        patch.setattr(step, "accumulate_gradients", accumulate)
        return run(world, name, **EVERYTHING["bf16"], **changes)

    with pytest.MonkeyPatch.context() as patch:
        plain, off = poisoned(patch, "inf plain"), poisoned(patch, "inf off", **OFFLOADED)
    assert ["skipped" in row for row in steps(off)] == [False, True, False]
    assert same(plain, off)
