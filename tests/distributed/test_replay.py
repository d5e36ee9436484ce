"""A failure of a rank whose engine shards gradients and moments alone is kept with its weights, and happens again in
one process."""

import pytest
import yaml
from safetensors.torch import load_file

from helpers.trained_runs import heron_folder
from surefoot.runs.failures import replay as module
from surefoot.runs.failures.replay import replay


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_failed_under_zero_fails_again_from_its_own_weights(server, tmp_path, monkeypatch, stage):
    folder = heron_folder(tmp_path)
    config = {
        "stage": "sft",
        "model": str(folder / "base"),
        "data": {"train": str(folder / "train.json"), "max_length": 64},
        "adapter": {"kind": "lora", "rank": 4},
        "precision": "fp32",
        "batch": {"size": 4, "micro": 1},
        "optim": {"lr": 1.0e20, "max_grad_norm": None},
        "duration": "6 steps",
        "parallel": {"engine": "deepspeed", "zero_stage": stage},
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    assert server.run(["train", str(folder / "run.yaml")], folder / "log.txt", ranks=2) not in (0, 70)
    kept = folder / "run" / "failure-2"
    assert (kept / "weights.safetensors").exists() == (stage == 2)
    found = replay(kept)
    assert (found.start is None) == (stage == 2)
    assert found.same_place
    if stage == 3:
        return
    assert found.same_bits
    # The twin: with other weights it is another step.
    own = module._load
    small = {name: one.clamp(-1e-3, 1e-3) for name, one in load_file(kept / "weights.safetensors").items()}
    monkeypatch.setattr(module, "_load", lambda loaded, weights, folder: own(loaded, small, folder))
    assert not replay(kept).same_place
