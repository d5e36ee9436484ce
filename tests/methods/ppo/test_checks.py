"""What PPO says of its reward model before it begins: how often it prefers the better answer of held-out pairs, and
where that is known from."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch

import surefoot
from helpers.tiers import representatives
from helpers.tiny_models import tiny_judge
from surefoot.methods.open_reward import open_reward


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A reward model, and its own opinion of ten pairs of answers."""
    folder = tmp_path_factory.mktemp("prior")
    tiny_judge(folder / "reward", weight=torch.randn(1, 32, generator=torch.Generator().manual_seed(0)))
    return folder


def said(world: Path, folder: Path, pairs: list[dict[str, str]], **data: object) -> tuple[list[str], bool]:
    """The lines on the reward model, and whether a caution is among them."""
    path = str(folder / "pairs.jsonl")
    Path(path).write_text("".join(json.dumps(one) + "\n" for one in pairs))
    config = {
        "stage": "ppo",
        "model": str(world / "reward"),
        "data": {"train": path, "eval": path, "max_length": 64, **data},
        "ppo": {"max_new_tokens": 4, "reward": str(world / "reward")},
        "batch": {"size": 4, "micro": 2},
        "precision": "fp32",
        "duration": "1 steps",
        "output": str(folder / f"run-{len(list(folder.iterdir()))}"),
    }
    stream = io.StringIO()
    surefoot.train(config, stream=stream)
    lines = [line for line in stream.getvalue().splitlines() if re.search(r"of \d+ pairs|surefoot evaluate", line)]
    return lines, any(line.startswith("caution: ") for line in lines)


def pairs_with(right: int, better: str, worse: str) -> list[dict[str, str]]:
    """Ten, of which so many have the answer first that the reward model prefers."""
    answers = [(better, worse)] * right + [(worse, better)] * (10 - right)
    return [{"prompt": "Say it.", "chosen": one, "rejected": other} for one, other in answers]


@pytest.fixture(scope="module")
def ten(world, tmp_path_factory):
    """Makes ten pairs of which so many have the answer first that the reward model prefers."""
    assert open_reward(str(world / "reward")).model.v_head.summary.weight.any()
    (line, *_), _ = said(world, tmp_path_factory.mktemp("which"), pairs_with(10, "a e i o", "b c d f"))
    better, worse = ("a e i o", "b c d f") if "100.0%" in line else ("b c d f", "a e i o")
    return lambda right: pairs_with(right, better, worse)


@pytest.mark.parametrize(
    ("right", "caution"), representatives([(10, False), (7, True), (6, True), (0, True)], (10, False), (7, True))
)
def test_the_accuracy_is_said_and_a_poor_one_is_a_caution(world, tmp_path, ten, right, caution):
    """Seven of ten may be a coin's; ten of ten are the twin."""
    (line, *_), cautioned = said(world, tmp_path, ten(right))
    assert f"{10 * right:.1f}% of 10 pairs" in line
    assert cautioned == caution


@pytest.mark.parametrize("where", representatives(["all", "each"], "each"))
def test_pairs_whose_prompts_alone_are_answered_are_still_pairs(world, tmp_path, ten, where):
    data = {"format": "prompts"}
    if where == "each":
        data = {name: {"path": str(tmp_path / "pairs.jsonl"), "format": "prompts"} for name in ("train", "eval")}
    (line, *_), _ = said(world, tmp_path, ten(9), **data)
    assert "90.0% of 10 pairs" in line


@pytest.fixture
def recorded(world):
    """Writes what the run that made the reward model found."""
    file = world / "reward" / "all_results.json"
    yield lambda accuracy, pairs: file.write_text(
        json.dumps({"eval_reward_accuracy": accuracy, "eval_pairs": pairs, "eval_loss": 0.7})
    )
    file.unlink()


def test_where_no_pairs_are_held_out_the_reward_models_own_run_tells(world, tmp_path, recorded):
    for accuracy, caution in ((0.48, True), (0.71, False)):
        recorded(accuracy, 200)
        (line, *_), cautioned = said(world, tmp_path, pairs_with(5, "a", "b"), eval="none")
        assert f"{accuracy:.1%} of 200 pairs" in line
        assert cautioned == caution
    assert "200" not in said(world, tmp_path, pairs_with(5, "a", "b"))[0][0]  # twin: pairs that are here go before it


def test_where_nothing_tells_that_is_said_with_the_command_that_would(world, tmp_path):
    (line,), cautioned = said(world, tmp_path, pairs_with(5, "a", "b"), eval="none")
    assert cautioned
    assert f"surefoot evaluate reward {world / 'reward'}" in line
