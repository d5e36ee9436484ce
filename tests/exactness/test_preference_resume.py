"""Kill -9 and resume of stages dpo, kto and reward: the end is bit for bit that of a run that nothing disturbed.

Kills before a step, in a save and between a step and its log row; epochs end with a short batch, dropout is on.
"""

import json

import pytest
import yaml

from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.models.value_head import VALUE_HEAD_FILE
from surefoot.report.verification import compare_folders

KILLED = -9
LORA = {"kind": "lora", "rank": 2, "dropout": 0.1}
CASES = {
    "dpo-lora": {"stage": "dpo", "adapter": LORA, "alignment": {"sft": 0.5}},
    "dpo-cached": {"stage": "dpo", "alignment": {"reference": "cached"}},
    "kto-full": {"stage": "kto"},
    "reward-lora": {"stage": "reward", "adapter": LORA, "reward": {"loss": "last", "center": 0.01}},
    "reward-full": {"stage": "reward", "reward": {"loss": "divergence", "center": 0.01}},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tiny_llama(folder / "base", pad=True, attention_dropout=0.1)
    pairs, judged = [], []
    for k in range(11):
        prompt, better, worse = f"Say sky {k} times.", " ".join(["sky"] * (1 + k % 4)), "heron"
        pairs.append({"prompt": prompt, "chosen": better, "rejected": worse})
        judged.append({"prompt": prompt, "completion": better if k % 3 else worse, "label": k % 3 > 0})
    for name, rows in (("dpo", pairs), ("reward", pairs), ("kto", judged)):
        (folder / f"{name}.json").write_text(json.dumps(rows[:7]))
        (folder / f"{name}-eval.json").write_text(json.dumps(rows[7:]))
    return folder


def write_config(world, case, output):
    words = CASES[case]
    config = {
        "model": {"path": str(world / "base"), "dropout": "own"},
        "data": {key: str(world / f"{words['stage']}{end}.json") for key, end in (("train", ""), ("eval", "-eval"))},
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 1e-2},
        "duration": "6 steps",
        "eval_every": "3 steps",
        "checkpoint": {"every": "2 steps", "keep": 2, "best": "reward_accuracy"},
        "output": str(output),
        **words,
    }
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.mark.parametrize("case", representatives(CASES, "dpo-cached", "reward-full"))
def test_killed_and_resumed_equals_uninterrupted(server, world, case):
    straight, broken = world / f"straight-{case}", world / f"broken-{case}"
    config = write_config(world, case, straight)
    assert server.run(["train", config], straight.with_suffix(".txt")) == 0, straight.with_suffix(".txt").read_text()
    config, log = write_config(world, case, broken), broken.with_suffix(".txt")
    for kill in ({"at": "step", "n": 2}, {"at": "sync", "n": 9}, {"at": "log", "n": 5}):
        assert server.run(["train", config, "--resume"], log, kill) == KILLED, log.read_text()
    assert server.run(["train", config, "--resume"], log) == 0, log.read_text()
    assert compare_folders(straight, broken) == []
    if (head := broken / "checkpoint-6" / VALUE_HEAD_FILE).exists():  # twin: one flipped bit of the head is seen
        data = bytearray(head.read_bytes())
        data[-1] ^= 1
        head.write_bytes(bytes(data))
        assert compare_folders(straight, broken) != []
        return
    other = write_config(world, case, world / f"seeded-{case}")  # twin: another order of the data
    log = world / f"seeded-{case}.txt"
    assert server.run(["train", other, "seed=1"], log) == 0, log.read_text()
    assert compare_folders(straight, world / f"seeded-{case}") != []
