"""RLHF on the quickstart's museum: PPO and GRPO learn from their reward alone what the supervised data do not say."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, pstdev

import pytest

import museum
import surefoot
from surefoot.commands.quickstart.world import base_folder, instructions

EXAMPLES = Path(__file__).parents[2] / "examples"
RISE = 2.0  # deviations of the supervised policy's rewards
KL_BOUND = 50.0  # ppo.kl_bound


def test_the_reward_is_1_for_the_right_room_in_the_right_words_alone():
    records = [record for part in instructions(museum.MUSEUM) for record in part]
    prompts = [f"{record['instruction']} {record['input']}" for record in records]
    right = [record["output"] for record in records]
    assert museum.right_room(prompts, right) == [1.0] * len(records)
    wrong = [answer.replace("room", "hall") for answer in right]
    others = right[1:] + right[:1]
    assert museum.right_room(prompts, wrong) == [0.0] * len(records)
    assert mean(museum.right_room(prompts, others)) < 0.2


def test_the_data_say_nothing_about_rooms(tmp_path):
    museum.write_data(tmp_path)
    supervised = json.loads((tmp_path / "sft.json").read_text())
    prompts = [f"{record['instruction']} {record['input']}" for record in supervised]
    earned = museum.right_room(prompts, [record["output"] for record in supervised])
    assert mean(earned) == pytest.approx(1 / 8, abs=0.03)
    for name in ("prompts", "held-out"):
        assert all(
            record.keys() == {"instruction", "input"} for record in json.loads((tmp_path / f"{name}.json").read_text())
        )


SHORT = {
    "sft": ["duration=1 epochs"],
    "ppo": ["eval_every=4 epochs", "duration=4 epochs", "log_every=1", "ppo.reward=REWARD"],
    "grpo": ["log_every=1", "grpo.rewards=[REWARD]"],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_each_method_raises_the_mean_reward_by_two_deviations(tmp_path, method):
    """One seed, PPO at two thirds of the example's length. The first rollouts stand for the supervised policy."""
    museum.write_data(tmp_path / "data")
    prompts = [f"data.train={tmp_path}/data/prompts.json", f"data.eval={tmp_path}/data/held-out.json"]
    for name, model, data in (
        ("sft", base_folder(), [f"data.train={tmp_path}/data/sft.json"]),
        (method, tmp_path / "sft", [*prompts, "samples.count=0", "eval_at_start=false"]),
    ):
        own = [one.replace("REWARD", f"{EXAMPLES}/museum.py:right_room") for one in SHORT[name]]
        changes = [f"model={model}", f"output={tmp_path}/{name}", "seed=1", *data, *own]
        surefoot.train(EXAMPLES / f"museum-{name}.yaml", changes, stream=io.StringIO())
    rows = [json.loads(line) for line in (tmp_path / method / "trainer_log.jsonl").read_text().splitlines()]
    questions = json.loads((tmp_path / "data" / "prompts.json").read_text())
    before = museum.earnings(str(tmp_path / "sft"), questions)
    after = museum.earnings(str(tmp_path / method), questions)
    assert mean(after) >= mean(before) + RISE * pstdev(before)
    assert all(row["kl"] < KL_BOUND for row in rows if "kl" in row)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_example_raises_it_for_every_seed(tmp_path, seed):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = EXAMPLES / "rlhf_quickstart.sh"
    done = subprocess.run(
        ["bash", str(script), str(tmp_path / "out"), f"seed={seed}"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "ppo" / "trainer_log.jsonl").read_text().splitlines()]
    assert all(row["kl"] < KL_BOUND for row in rows if "kl" in row)
