"""The example that learns to use a calculator: its environment, its data, and that the use is learned."""

import json
import random

import pytest

import arithmetic
import calculator
import surefoot
from surefoot.system.errors import NothingLearned


def test_the_calculator_replies_to_calls_and_scores_the_rest():
    one = calculator.Calculator()
    one.reset({"answer": "222"})
    assert one.step("?37*6") == "222"
    assert [one.step(text)["reward"] for text in ("222", "223", "?37", "")] == [1.0, 0.0, 0.0, 0.0]


def test_held_out_products_are_in_no_text_and_no_prompt(tmp_path):
    calculator.write_data(tmp_path)
    lines = {one.stem: one.read_text().splitlines() for one in tmp_path.iterdir()}
    held_out = {json.loads(one)["prompt"] for one in lines["held-out"]}
    asked = {json.loads(one)["messages"][0]["content"] for one in lines["texts"]}
    assert len(held_out) == 60
    assert not held_out & asked
    assert not held_out & {json.loads(one)["prompt"] for one in lines["prompts"]}


def test_another_number_has_another_digit():
    draw = random.Random(0)
    assert all(calculator.other(number, draw) != number for number in range(2, 900))


def test_a_few_steps_of_the_example(tmp_path):
    """With a base that has hardly learned: answers of one and of two turns are drawn, scored and kept."""
    folder = tmp_path / "calculator"
    arithmetic.make_base(folder / "random", "*?[]", calculator.TEMPLATE)
    calculator.write_data(folder)
    config = calculator.grpo_config(folder, "reward", 1)
    config |= {"model": str(folder / "random"), "duration": "1 steps", "batch": {"size": 16}, "eval_at_start": False}
    config["data"] |= {"eval": 2}
    with pytest.raises(NothingLearned):  # a random model hits no product
        surefoot.train(config)
    kept = [json.loads(one) for one in (folder / "reward" / "answers.jsonl").read_text().splitlines()]
    assert len(kept) == 16
    assert all(list(one["rewards"]) == ["environment"] for one in kept)


@pytest.mark.slow
def test_the_use_of_the_calculator_is_learned_from_the_reward(tmp_path):
    found = calculator.main(tmp_path / "calculator")
    log = tmp_path / "calculator" / "reward" / "trainer_log.jsonl"
    rows = [json.loads(one) for one in log.read_text().splitlines()]
    before = next(row for row in rows if "eval_pass_at_1" in row)
    assert found["eval_pass_at_1"] > before["eval_pass_at_1"] + 0.2
    assert found["eval_turns"] > before["eval_turns"]
