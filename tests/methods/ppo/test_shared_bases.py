"""A reward model that is a whole model: the critic is an adapter over it, and both have its base once.

Held against the same run with the reward model and the reference as copies of their own: every number to the bit, by
the libraries' own kernels. surefoot's go into what learns, and copies that stand apart keep the plain ones.
"""

from __future__ import annotations

import io
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import surefoot
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.data.batching.batch import Batch
from surefoot.methods import table as kinds
from surefoot.methods.open_reward import open_reward
from surefoot.methods.ppo import models
from surefoot.models.shared_backbone import SharedBackbone
from surefoot.planning.plan import Choice
from surefoot.system.errors import EnvironmentFault, IntegrityError
from surefoot.training.manifest import read_manifest

APART = Choice("model", "a copy of its own", "default")
NUMBERS = (
    "loss",
    "reward",
    "kl",
    "policy_loss",
    "value_loss",
    "entropy",
    "ratio",
    "grad_norm_actor",
    "grad_norm_critic",
)
STEPS = 3
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "value_head.safetensors"}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A policy, and a reward model of another base, untied, that has been trained."""
    folder = tmp_path_factory.mktemp("shared")
    tiny_llama(folder / "base")
    tiny_llama(folder / "other", seed=1, layers=3)
    rows = [{"prompt": f"Say number {n}."} for n in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"Say {n}.", "chosen": "a e i", "rejected": "b c d"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    train(reward_config(folder, folder / "reward"))
    return folder


def reward_config(world: Path, output: Path) -> dict:
    return {
        "stage": "reward",
        "model": str(world / "other"),
        "data": {"train": str(world / "pairs.jsonl"), "max_length": 64},
        "optim": {"lr": 1e-2},
        "batch": {"size": 6},
        "precision": "fp32",
        "duration": "4 steps",
        "output": str(output),
    }


def train(config: dict, **more) -> str:
    said = io.StringIO()
    surefoot.train(config, stream=said, **more)
    return said.getvalue()


def config_of(world: Path, output: Path, **ppo) -> dict:
    return {
        "stage": "ppo",
        "model": str(world / "base"),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(world / "prompts.jsonl"), "max_length": 64},
        "ppo": {"reward": str(world / "reward"), "max_new_tokens": 8, "critic_lr": 1e-2, "ema": 0.5, **ppo},
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 1e-2},
        "precision": "fp32",
        "kernels": {"last_block": "plain", "pointwise": "plain"},
        "duration": f"{STEPS} steps",
        "checkpoint": {"best": "none"},
        "output": str(output),
    }


def apart(monkeypatch) -> None:
    """From now on, reward model and reference are copies of their own, whatever the plan shares."""

    def build(config, plan, policy, base):
        return models.build_ppo(
            config, replace(plan, ppo=replace(plan.ppo, reward=APART, reference=APART)), policy, base
        )

    own = replace(kinds.functions_of("ppo"), build=build)
    monkeypatch.setitem(kinds.FUNCTIONS, "ppo", lambda: own)


def outcome(run: Path) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The numbers of each step, and all tensors that were written, the optimizer's too."""
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    tensors = {
        f"{file.relative_to(run)}: {name}": tensor
        for file in sorted((run / f"checkpoint-{STEPS}").rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return [[row[name] for name in NUMBERS] for row in rows if "loss" in row], tensors


def same(one: Path, other: Path) -> bool:
    (numbers, tensors), (others, theirs) = outcome(one), outcome(other)
    return numbers == others and all(torch.equal(tensors[name], theirs[name]) for name in tensors | theirs)


def plan_of(run: Path) -> dict:
    return json.loads((run / "plan.json").read_text())


@pytest.fixture(scope="module")
def shared(world) -> Path:
    """A run with shared bases."""
    train(config_of(world, world / "run"))
    return world / "run"


def test_shared_bases_give_the_numbers_of_separate_copies(world, shared, tmp_path, monkeypatch):
    parts = plan_of(shared)["plan"]["ppo"]
    assert [parts[part]["value"] for part in ("critic", "reward", "reference")] == ["adapter", *["adapter-off"] * 2]
    apart(monkeypatch)
    train(config_of(world, tmp_path / "apart"))
    assert same(shared, tmp_path / "apart")


@pytest.mark.slow
def test_so_they_do_with_dora_and_layers_that_are_computed_again(world, tmp_path, monkeypatch):
    changed = {"adapter": {"kind": "dora", "rank": 4}, "gradient_checkpointing": "on"}
    train(config_of(world, tmp_path / "shared") | changed)
    apart(monkeypatch)
    train(config_of(world, tmp_path / "apart") | changed)
    assert same(tmp_path / "shared", tmp_path / "apart")


@pytest.mark.parametrize("whose", representatives(["reward", "reference"], "reward"))
def test_twin_an_adapter_that_stays_on_is_seen(world, shared, tmp_path, monkeypatch, whose):
    """whose: the part that hears its trunk's adapter in place of the base."""
    playing, layers = SharedBackbone.use_adapter, {"reward": 3, "reference": 2}[whose]

    def stays(trunk, adapter):
        deaf = adapter is None and len(trunk.model.get_decoder().layers) == layers
        return nullcontext() if deaf else playing(trunk, adapter)

    monkeypatch.setattr(SharedBackbone, "use_adapter", stays)
    train(config_of(world, tmp_path / "twin"))
    assert not same(shared, tmp_path / "twin")


def test_of_the_critic_its_adapter_and_its_head_train_and_nothing_else(world, tmp_path, monkeypatch):
    config = config_of(world, tmp_path / "run", critic_adapter={"kind": "lora", "rank": 2, "targets": ["q_proj"]})
    train(config | {"duration": "1 steps"})
    found = plan_of(tmp_path / "run")
    linear = 3 * 2 * (32 + 32)  # layers, rank, inputs and outputs
    assert found["plan"]["ppo"]["critic_parameters"] == linear
    assert found["verified"]["critic_trainable"] == linear + 33
    assert found["verified"]["critic_parameters"] == 3 * 2 + 2
    add_adapter = models.add_adapter

    def unfrozen(*given, **more):
        return add_adapter(*given, **more).requires_grad_(True)

    monkeypatch.setattr(models, "add_adapter", unfrozen)  # the twin: its base trains, too
    with pytest.raises(EnvironmentFault) as caught:
        train(config | {"output": str(tmp_path / "twin")})
    assert caught.value.faults[0].where == "plan: ppo.critic_parameters"


def test_the_critics_folder_holds_an_adapter_and_a_head_that_others_load(world, shared):
    for folder in (shared / "critic", shared / f"checkpoint-{STEPS}" / "critic"):
        assert {file.name for file in folder.iterdir()} >= ADAPTER_FILES
        assert not (folder / "model.safetensors").exists()
        assert all(".lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
    folder = shared / "critic"
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(world / "reward")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(named), folder)
    ids = torch.randint(5, 300, (1, 9), generator=torch.Generator().manual_seed(0))
    head = load_file(folder / "value_head.safetensors")
    ours = open_reward(str(folder)).model
    with torch.no_grad():
        hidden = theirs(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        expected = hidden @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"]
        found = ours.values(Batch(ids, torch.full_like(ids, -100), None, 0, (9,), (0,)))
        with theirs.disable_adapter():
            plain = theirs(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(plain @ head["v_head.summary.weight"][0], expected)  # the twin: without the adapter


def test_a_run_may_go_on_from_the_critic_of_another(world, shared, tmp_path):
    """Which is an adapter over the reward model: both still share its base."""
    config = config_of(world, tmp_path / "second", critic=str(shared / "critic"), critic_lr=1e-12)
    train(config | {"duration": "1 steps"})
    plan = plan_of(tmp_path / "second")["plan"]["ppo"]
    assert [plan[part]["value"] for part in ("critic", "reward")] == ["adapter", "adapter-off"]
    before, after = (load_file(run / "critic" / "adapter_model.safetensors") for run in (shared, tmp_path / "second"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)


def test_a_run_from_before_critics_had_adapters_goes_on_with_its_whole_critic(world, tmp_path):
    """Its config knows no ppo.critic_adapter, its plan has a whole critic."""
    config = config_of(world, tmp_path / "old")
    whole = config | {"ppo": config["ppo"] | {"critic_adapter": "none"}, "duration": f"{STEPS + 1} steps"}
    train(whole | {"checkpoint": {"best": "none", "every": f"{STEPS} steps"}})
    old = tmp_path / "old"
    written = yaml.safe_load((old / "config.yaml").read_text())
    del written["ppo"]["critic_adapter"]
    (old / "config.yaml").write_text(yaml.safe_dump(written))
    plan = plan_of(old)
    assert plan["plan"]["ppo"]["critic"]["value"] == "model"
    for name in ("critic_adapter", "critic_head"):
        del plan["plan"]["ppo"][name]
    (old / "plan.json").write_text(json.dumps(plan))
    before = load_file(old / f"checkpoint-{STEPS}" / "critic" / "model.safetensors")
    (old / "MANIFEST.json").unlink()
    shutil.rmtree(old / f"checkpoint-{STEPS + 1}")
    train(config | {"duration": f"{STEPS + 1} steps"}, resume=True)
    after = load_file(old / "critic" / "model.safetensors")
    assert after.keys() == before.keys()
    assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_a_run_goes_on_over_the_reward_model_that_it_began_with_or_not_at_all(world, shared, tmp_path, monkeypatch):
    """Other weights under the same value head, by which alone a reward model was known."""

    def goes_on_with(reward: Path) -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(shared, tmp_path / "run")
        config = config_of(world, tmp_path / "run", reward=str(reward)) | {"duration": f"{STEPS + 1} steps"}
        train(config, resume=True)

    moved = shutil.copytree(world / "reward", tmp_path / "moved")
    goes_on_with(moved)
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    with pytest.raises(IntegrityError) as refused:
        goes_on_with(moved)
    assert len(refused.value.faults) == 2  # it scores, and the critic's adapter lies over it
    known = read_manifest(shared / f"checkpoint-{STEPS}")["identity"]
    monkeypatch.setattr(models, "fingerprints", lambda *given: {part: known[part] for part in ("reward", "critic")})
    goes_on_with(moved)  # the twin


def test_a_critic_trains_in_fp32_what_its_reward_model_trained_in_full(world, tmp_path, monkeypatch):
    """An embedding beside a LoRA adapter, over a base that is held in bf16."""
    adapter = {"kind": "lora", "rank": 2, "modules_to_save": ["embed_tokens"]}
    train(reward_config(world, tmp_path / "reward") | {"adapter": adapter, "precision": "bf16", "duration": "1 steps"})
    build, seen = models.build_ppo, []

    def built(*given):
        for hold in (models.hold_in_fp32, lambda model: None):  # the second one is the twin
            monkeypatch.setattr(models, "hold_in_fp32", hold)
            seen.append({one.dtype for one in build(*given).model.parameters() if one.requires_grad})
        raise EnvironmentFault("seen")

    own = replace(kinds.functions_of("ppo"), build=built)
    monkeypatch.setitem(kinds.FUNCTIONS, "ppo", lambda: own)
    with pytest.raises(EnvironmentFault, match="seen"):
        train(config_of(world, tmp_path / "run", reward=str(tmp_path / "reward")) | {"precision": "bf16"})
    assert seen == [{torch.float32}, {torch.float32, torch.bfloat16}]
