"""What PPO says of its reward model before it begins: how often it prefers the better answer of held-out pairs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import surefoot
from surefoot.stages.open_reward import open_reward
from tiny import tiny_llama

CAUTION = "caution: 60% is the least"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A reward model, and its own opinion of ten pairs of answers."""
    folder = tmp_path_factory.mktemp("prior")
    tiny_llama(folder / "reward")
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    save_file(
        {"v_head.summary.weight": head, "v_head.summary.bias": torch.zeros(1)},
        folder / "reward" / "value_head.safetensors",
    )
    return folder


def said(world: Path, folder: Path, pairs: list[dict[str, str]]) -> str:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    config = {
        "stage": "ppo",
        "model": str(world / "reward"),
        "data": {"train": str(folder / "pairs.jsonl"), "eval": str(folder / "pairs.jsonl"), "max_length": 64},
        "ppo": {"max_new_tokens": 4, "reward": str(world / "reward")},
        "batch": {"size": 4, "micro": 2},
        "precision": "fp32",
        "duration": "1 steps",
        "output": str(folder / f"run-{len(list(folder.iterdir()))}"),
    }
    stream = io.StringIO()
    surefoot.train(config, stream=stream)
    return stream.getvalue()


def pairs_with(right: int, better: str, worse: str) -> list[dict[str, str]]:
    """Ten, of which so many have the answer first that the reward model prefers."""
    answers = [(better, worse)] * right + [(worse, better)] * (10 - right)
    return [{"prompt": "Say it.", "chosen": one, "rejected": other} for one, other in answers]


@pytest.mark.parametrize(("right", "caution"), [(10, False), (7, False), (6, True), (0, True)])
def test_the_accuracy_is_said_and_a_poor_one_is_a_caution(world, tmp_path, right, caution):
    assert open_reward(str(world / "reward")).model.v_head.summary.weight.any()
    (tmp_path / "which").mkdir()
    prefers = "100.0%" in said(world, tmp_path / "which", pairs_with(10, "a e i o", "b c d f"))
    better, worse = ("a e i o", "b c d f") if prefers else ("b c d f", "a e i o")
    text = said(world, tmp_path, pairs_with(right, better, worse))
    assert f"in {10 * right:.1f}% of 10 held-out pairs" in text
    assert (CAUTION in text) == caution  # each side of the limit is the other's twin
