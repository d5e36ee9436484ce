"""PPO killed with -9 inside generation, inside an update and between: resumed, it ends bit for bit as if nothing was.

Cycles of four steps (two batches of answers, two passes) and a checkpoint after every third step, so that checkpoints
fall inside cycles; a steered KL coefficient and a moving average are carried along.
"""

import json
import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from helpers.tiers import representatives
from helpers.tiny_models import tiny_judge, tiny_llama
from surefoot.report.verification import compare_folders
from surefoot.system.durable import sha256_file, write_json
from surefoot.training.manifest import sealed

KILLED = -9
SCORE = """
def vowels(prompts, responses):
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    tiny_llama(folder / "base", attention_dropout=0.1)
    (folder / "score.py").write_text(SCORE)
    rows = [{"prompt": f"Say number {n}."} for n in range(11)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_judge(folder / "judge", seed=1)
    return folder


def write_config(world, adapter, output, **changes):
    config = {
        "stage": "ppo",
        "model": str(world / "base"),
        "data": {"train": str(world / "prompts.jsonl"), "eval": str(world / "prompts.jsonl"), "max_length": 64},
        "ppo": {
            "reward": f"{world / 'score.py'}:vowels",
            "max_new_tokens": 8,
            "rollout_batches": 2,
            "epochs": 2,
            "kl_target": 0.5,
            "kl_horizon": 100,
            "ema": 0.9,
            "whiten": True,
        },
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 3e-3},
        "precision": "fp32",
        "duration": "9 steps",
        "eval_every": "4 steps",
        "checkpoint": {"every": "3 steps", "keep": 5, "best": "none"},
        "output": str(output),
    }
    if adapter != "full":
        config["adapter"] = {"kind": "lora", "rank": 4, "alpha": 8}
    if adapter == "shared":
        config["ppo"] |= {"reward": str(world / "judge"), "critic_lr": 3e-3}
    config["ppo"] |= changes
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.fixture(scope="module")
def uninterrupted(server, world):
    done = {}

    def get(adapter):
        if adapter not in done:
            output = world / f"straight-{adapter}"
            log = output.with_suffix(".txt")
            assert server.run(["train", write_config(world, adapter, output)], log) == 0, log.read_text()
            done[adapter] = output
        return done[adapter]

    return get


# Steps 1-4 are a cycle, 5 and 6 the short one that ends the epoch, 7-9 lie in the next; saved after 3, 6 and 9.
KILLS = [
    {"at": "rollout", "n": 3},  # in the first answers: nothing is saved
    {"at": "update", "n": 4},  # step 2: nothing is saved
    {"at": "step", "n": 4},  # behind the checkpoint inside the first cycle
    {"at": "rollout", "n": 3},  # in the evaluation after step 4, resumed from step 3
    {"at": "update", "n": 6},
    {"at": "log", "n": 6},
    {"at": "step", "n": 8},
    {"at": "rollout", "n": 2},  # at the beginning of the third cycle
    {"at": "step", "n": 9},
]


KILLS_OF = {"full": KILLS, "lora": KILLS, "shared": [KILLS[2], KILLS[4], KILLS[7]]}


@pytest.mark.parametrize("adapter", representatives(KILLS_OF, "shared"))
def test_killed_anywhere_and_resumed_equals_uninterrupted(server, world, uninterrupted, adapter):
    """shared: critic and reward model have one base, which is not the policy's."""
    output = world / f"broken-{adapter}"
    config, log = write_config(world, adapter, output), output.with_suffix(".txt")
    for kill in KILLS_OF[adapter]:
        assert server.run(["train", config, "--resume"], log, kill) == KILLED, (kill, log.read_text())
    assert server.run(["train", config, "--resume"], log) == 0, log.read_text()
    assert compare_folders(uninterrupted(adapter), output) == []


def test_checkpoints_inside_a_cycle_hold_its_episodes_and_others_do_not(uninterrupted):
    run = uninterrupted("full")
    held = {step: json.loads((run / f"checkpoint-{step}" / "state.json").read_text())["stage"] for step in (3, 6, 9)}
    assert {step: len(stage["records"]) for step, stage in held.items()} == {3: 8, 6: 0, 9: 8}
    assert held[3]["kl_coef"] != 0.1


@pytest.mark.parametrize("lost", representatives(["kl_coef", "episodes", "average"], "kl_coef"))
def test_twin_what_is_not_carried_is_noticed(server, world, uninterrupted, lost):
    """A checkpoint whose memory was changed by a little leads to another end."""

    output = world / f"twin-{lost}"
    shutil.copytree(uninterrupted("full"), output)
    for name in ("checkpoint-6", "checkpoint-9"):
        shutil.rmtree(output / name)
    (output / "MANIFEST.json").unlink()
    folder = output / "checkpoint-3"
    if lost == "kl_coef":
        state = json.loads((folder / "state.json").read_text())
        state["stage"]["kl_coef"] *= 1.5
        (folder / "state.json").write_text(json.dumps(state))
    else:
        tensors = load_file(folder / "stage.safetensors")
        name = next(one for one in tensors if one.startswith("episodes.adv" if lost == "episodes" else "average."))
        tensors[name] = tensors[name] + torch.ones_like(tensors[name])
        save_file(tensors, folder / "stage.safetensors")
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    for name, entry in manifest["files"].items():
        entry |= {"size": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
    write_json(folder / "MANIFEST.json", sealed(manifest))
    config, log = write_config(world, "full", output), output.with_suffix(".txt")
    assert server.run(["train", config, "--resume"], log) == 0, log.read_text()
    assert compare_folders(uninterrupted("full"), output) != []


def test_another_score_under_the_same_name_is_refused(server, world, uninterrupted):

    output = world / "rescored"
    shutil.copytree(uninterrupted("full"), output)
    shutil.rmtree(output / "checkpoint-9")
    (output / "MANIFEST.json").unlink()
    config, log = write_config(world, "full", output), output.with_suffix(".txt")
    (world / "score.py").write_text(SCORE.replace("/ 4", "/ 5"))
    try:
        assert server.run(["train", config, "--resume"], log) == 4
    finally:
        (world / "score.py").write_text(SCORE)
    assert re.search(r"error: ppo\.reward: .* \[SF-RESUME-CHANGED\]$", log.read_text(), re.MULTILINE)
