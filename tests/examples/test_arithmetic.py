"""The example that learns sums from a reward: its arms run, and the reward with a bug is told from the strict one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic.py"


def example():
    spec = importlib.util.spec_from_file_location("arithmetic", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reward_with_a_bug_takes_what_the_strict_one_does_not():
    module = example()
    assert module.not_below(["1+2="] * 4, ["3", "99", "2", ""], ["3"] * 4) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
def test_short_runs_of_two_arms_over_one_base(tmp_path):
    module = example()
    for arm in ("reward", "bug"):
        found = module.main(tmp_path / "sums", arm, base_epochs=1, epochs=1)
        assert 0 <= found["eval_pass_at_1"] <= found["eval_pass_at_8"] <= 1
    first = json.loads((tmp_path / "sums" / "bug" / "answers.jsonl").read_text().splitlines()[0])
    assert list(first["rewards"]) == ["not_below", "numeric"]
    assert first["score"] == first["rewards"]["not_below"]["score"]


@pytest.mark.slow
def test_sums_are_learned_from_the_reward(tmp_path):
    found = example().main(tmp_path / "sums")
    rows = [json.loads(one) for one in (tmp_path / "sums" / "reward" / "trainer_log.jsonl").read_text().splitlines()]
    before = next(row["eval_pass_at_1"] for row in rows if "eval_pass_at_1" in row)
    assert found["eval_pass_at_1"] > before + 0.2
