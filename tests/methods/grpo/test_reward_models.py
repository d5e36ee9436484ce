"""Reward models among GRPO's rewards: the scores that PEFT and transformers compute, on the policy's base or apart."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surefoot
from helpers.faults import raises_fault
from helpers.tiny_models import llama3_tokenizer, tiny_judge, tiny_llama
from surefoot.methods import table as kinds
from surefoot.methods.grpo import answering, reward_models, start
from surefoot.planning.plan import Choice

SCORE = 1e-5  # relative, of fp32 sums in another order: the reference computes one row at a time
UNEQUAL = ("elapsed_time", "remaining_time", "throughput", "peak_memory")


def train(config: dict, **how) -> None:
    surefoot.train(config, stream=io.StringIO(), **how)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A policy's base, a reward model that is an adapter over it, and one that is a model of its own."""
    folder = tmp_path_factory.mktemp("judged")
    tiny_llama(folder / "base")
    tiny_judge(folder / "whole", bias=1.0, seed=1, layers=3)
    rows = [{"prompt": f"Say number {n}."} for n in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"Say {n}.", "chosen": "a e i", "rejected": "b c d"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    train(
        {
            "stage": "reward",
            "model": str(folder / "base"),
            "adapter": {"kind": "lora", "rank": 2, "alpha": 64},
            "data": {"train": str(folder / "pairs.jsonl"), "max_length": 64},
            "optim": {"lr": 1e-2},
            "batch": {"size": 6},
            "precision": "fp32",
            "duration": "4 steps",
            "output": str(folder / "reward"),
        }
    )
    return folder


def config_of(world: Path, output: Path, kind: str = "lora", **grpo) -> dict:
    rewards = [str(world / "reward"), {"name": f"{world}/whole", "weight": 0.5}]
    return {
        "stage": "grpo",
        "model": str(world / "base"),
        **({} if kind == "full" else {"adapter": {"kind": "lora", "rank": 4}}),
        "data": {"train": str(world / "prompts.jsonl"), "max_length": 64},
        "grpo": {"max_new_tokens": 8, "group": 4, "rewards": rewards, **grpo},
        "batch": {"size": 8, "micro": 3},
        "optim": {"lr": 1e-2},
        "precision": "fp32",
        "kernels": {"adapter": "plain", "last_block": "plain", "pointwise": "plain"},  # as copies have them
        "duration": "3 steps",
        "output": str(output),
    }


def rows_of(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in UNEQUAL} for row in rows if "loss" in row]


def plan_of(run: Path) -> dict:
    return json.loads((run / "plan.json").read_text())["plan"]


def reference_scores(model: torch.nn.Module, folder: Path, answers) -> list[float]:
    """As a reward model is defined: the head over the last hidden state, by transformers and PEFT."""
    head = load_file(folder / "value_head.safetensors")
    found = []
    for one in answers:
        with torch.no_grad():
            ids = torch.tensor([[*one.prompt, *one.response]])
            state = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        found.append(float(state @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"][0]))
    return found


@pytest.fixture(scope="module")
def judged(world) -> tuple[Path, list]:
    """A run by both reward models, and all answers that it scored."""
    seen = []

    def spied(model, answers, pictures, how):
        seen.extend([] if model.name.endswith("whole") else answers)
        return reward_models.model_scores(model, answers, pictures, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "model_scores", spied)
        train(config_of(world, world / "run", kl=0.1))
    return world / "run", seen


def test_answers_have_the_scores_of_the_models(world, judged):
    run, answers = judged
    kept = [json.loads(line)["rewards"] for line in (run / "answers.jsonl").read_text().splitlines()]
    base = AutoModelForCausalLM.from_pretrained(world / "base")
    bare = reference_scores(base, world / "reward", answers)
    adapted = reference_scores(PeftModel.from_pretrained(base, world / "reward"), world / "reward", answers)
    whole = reference_scores(AutoModelForCausalLM.from_pretrained(world / "whole"), world / "whole", answers)
    assert len(answers) == len(kept) == 24
    assert [one["reward"]["score"] for one in kept] == pytest.approx(adapted, rel=SCORE, abs=SCORE)
    assert [one["whole"]["score"] for one in kept] == pytest.approx(whole, rel=SCORE, abs=SCORE)
    assert [one["reward"]["score"] for one in kept] != pytest.approx(bare, rel=SCORE, abs=SCORE)  # twin: no adapter
    for place, row in enumerate(rows_of(run)):
        own = [one + 0.5 * other for one, other in zip(adapted, whole, strict=True)][8 * place : 8 * place + 8]
        assert row["reward"] == pytest.approx(sum(own) / 8, rel=SCORE)
        assert {"reward_reward", "reward_whole"} <= row.keys()


def test_the_plan_shares_the_policys_base_and_counts_the_other(world, judged, tmp_path):
    plan = plan_of(judged[0])
    assert [one["value"] for one in plan["reward_models"]] == ["adapter", "model"]
    adapter = sum(one.numel() for one in load_file(world / "reward" / "adapter_model.safetensors").values())
    whole = sum(one.numel() for one in load_file(world / "whole" / "model.safetensors").values())
    assert plan["memory"]["beside"] == 4 * (adapter + whole)
    train(config_of(world, tmp_path / "full", "full") | {"duration": "1 steps"})
    apart = plan_of(tmp_path / "full")
    base = sum(one.numel() for one in load_file(world / "base" / "model.safetensors").values())
    assert [one["value"] for one in apart["reward_models"]] == ["model", "model"]
    assert apart["memory"]["beside"] == 4 * (base + adapter + whole)


def test_a_shared_base_gives_the_numbers_of_a_copy(world, judged, tmp_path, monkeypatch):
    own = kinds.functions_of("grpo")

    def apart(plan):
        return replace(plan, reward_models=(Choice("model", "a copy of its own", "default"),) * 2)

    def opened(run, loaded):
        return reward_models.open_reward_models(replace(run, plan=apart(run.plan)), loaded)

    copies = replace(own, build=lambda config, plan, policy, base: own.build(config, apart(plan), policy, base))
    monkeypatch.setitem(kinds.FUNCTIONS, "grpo", lambda: copies)
    monkeypatch.setattr(start, "open_reward_models", opened)
    train(config_of(world, tmp_path / "run", kl=0.1))
    assert rows_of(tmp_path / "run") == rows_of(judged[0])
    one, other = (load_file(run / "adapter_model.safetensors") for run in (tmp_path / "run", judged[0]))
    assert one.keys() == other.keys()  # nothing of the reward model is published
    assert all(one[name].equal(other[name]) for name in one)


def test_a_stopped_run_goes_on_with_the_same_model_alone(world, judged, tmp_path):
    shutil.copytree(world / "reward", tmp_path / "reward")
    config = config_of(world, tmp_path / "run", kl=0.1)
    config["grpo"]["rewards"][0] = str(tmp_path / "reward")
    config |= {"duration": "2 steps", "checkpoint": {"every": "1 steps"}, "optim": {"lr": 1e-2, "schedule": "constant"}}
    train(config)
    (tmp_path / "reward").rename(tmp_path / "moved")
    config["grpo"]["rewards"][0] = str(tmp_path / "moved")
    config["duration"] = "3 steps"
    head = tmp_path / "moved" / "value_head.safetensors"
    before = head.read_bytes()
    head.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with raises_fault("SF-RESUME-CHANGED", "grpo.rewards"):
        train(config, resume=True)
    head.write_bytes(before)
    train(config, resume=True)
    whole = {**config, "output": str(tmp_path / "whole")}
    train(whole)
    for name in ("reward_moved", "reward_whole", "loss"):
        assert rows_of(tmp_path / "run")[-1][name] == rows_of(tmp_path / "whole")[-1][name]


def test_what_is_no_reward_model_is_refused(world, tmp_path):
    tiny_llama(tmp_path / "other", seed=2)
    llama3_tokenizer(tmp_path / "other", vocab_size=300)
    shutil.copy(world / "whole" / "value_head.safetensors", tmp_path / "other")
    for name, code, where in (
        (f"{tmp_path}/none", "SF-FILE-MISSING", "grpo.rewards[1].name"),
        (f"{tmp_path}/other", "SF-TOKENIZER", "grpo.rewards[1].name"),
        (f"{world}/base", "SF-MODEL-KIND", str(world / "base")),
        ("whole", "SF-REWARD", "grpo.rewards[1].name"),
    ):
        with raises_fault(code, where):
            train(config_of(world, tmp_path / "run", rewards=["json", name]))
