"""The example that learns sums from a reward: its arms run, and the reward with a bug is told from the strict one."""

import json

import pytest

import arithmetic


def test_the_reward_with_a_bug_takes_what_the_strict_one_does_not():
    assert arithmetic.not_below(["1+2="] * 4, ["3", "99", "2", ""], ["3"] * 4) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
def test_short_runs_of_two_arms_over_one_base(tmp_path):
    for arm in ("reward", "bug"):
        found = arithmetic.main(tmp_path / "sums", arm, base_epochs=1, epochs=1)
        assert 0 <= found["eval_pass_at_1"] <= found["eval_pass_at_8"] <= 1
    first = json.loads((tmp_path / "sums" / "bug" / "answers.jsonl").read_text().splitlines()[0])
    assert list(first["rewards"]) == ["not_below", "numeric"]
    assert first["score"] == first["rewards"]["not_below"]["score"]


@pytest.mark.slow
def test_sums_are_learned_from_the_reward(tmp_path):
    found = arithmetic.main(tmp_path / "sums")
    rows = [json.loads(one) for one in (tmp_path / "sums" / "reward" / "trainer_log.jsonl").read_text().splitlines()]
    before = next(row["eval_pass_at_1"] for row in rows if "eval_pass_at_1" in row)
    assert found["eval_pass_at_1"] > before + 0.2
