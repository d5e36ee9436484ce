"""`model.trained`: a part of the weights trains, and the rest keeps its bits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.faults import raises_fault
from helpers.growing_records import sky_workplace
from helpers.path_runs import ends, forget, path_config, saved_plan, start
from helpers.tiny_models import tiny_llama
from surefoot.config.contradictions import contradictions
from surefoot.models.wrapped import freeze_others
from surefoot.planning.trained import trains
from surefoot.runs.make_plan import make_plan

PATTERNS = [r"model\.layers\.1\.mlp\..*", r".*\.k_proj", "lm_head"]
SGD = {"name": "sgd", "lr": 1.0, "schedule": "constant", "warmup": 0, "max_grad_norm": None}
SAME = 1e-6  # of the largest difference: the same sums, over fewer tensors


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return sky_workplace(tmp_path_factory, 12, hidden=64)


def config(workplace, output, trained: list[str] | None = None, **more: Any):
    times = {"duration": "4 steps", "checkpoint": {"every": "1 step", "keep": 4, "best": "none"}, "adapter": None}
    found = path_config(workplace, output, **(times | more))
    return found.model_copy(update={"model": found.model.model_copy(update={"trained": trained})})


def weights(folder):
    return load_file(folder / "model.safetensors")


def in_the_part(name: str) -> bool:
    """By parameter, without surefoot's code."""
    return bool(re.search(r"layers\.1\.mlp\.|k_proj\.weight$|^lm_head", name))


def test_a_part_trains_and_the_rest_keeps_its_bits(workplace, tmp_path) -> None:
    wanted = config(workplace, tmp_path / "run", PATTERNS)
    before = AutoModelForCausalLM.from_pretrained(wanted.model.path, dtype=torch.float32)
    start(wanted)
    old = before.state_dict()
    changed = {name for name, one in weights(tmp_path / "run").items() if not torch.equal(one, old[name])}
    assert changed == {name for name, _ in before.named_parameters() if in_the_part(name)}
    assert saved_plan(tmp_path / "run").trainable == sum(
        one.numel() for name, one in before.named_parameters() if in_the_part(name)
    )
    uninterrupted = ends(tmp_path / "run", 4)
    forget(tmp_path / "run", range(3, 5))
    start(wanted, "resume")
    assert ends(tmp_path / "run", 4) == uninterrupted


def test_its_step_is_that_of_all_weights_on_this_part(workplace, tmp_path) -> None:
    part = config(workplace, tmp_path / "part", PATTERNS, optim=SGD, duration="1 step")
    start(part)
    start(config(workplace, tmp_path / "all", optim=SGD, duration="1 step"))
    before = load_file(f"{part.model.path}/model.safetensors")
    part_of, all_of = (
        {name: one - before[name] for name, one in weights(tmp_path / run).items()} for run in ("part", "all")
    )
    largest = max(float(one.abs().max()) for one in all_of.values())
    for name, one in part_of.items():
        expected = all_of[name] if in_the_part(name) else torch.zeros_like(one)
        assert float((one - expected).abs().max()) <= SAME * largest, name
    assert any(float(all_of[name].abs().max()) > 0 for name in all_of if not in_the_part(name))  # the twin


def test_a_tied_head_is_its_embedding(tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path, pad=True))
    model.lm_head.weight = model.model.embed_tokens.weight
    freeze_others(model, ["lm_head", r"model\.norm"])
    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["model.norm.weight"]
    freeze_others(model, ["lm_head"])
    assert not any(one.requires_grad for one in model.parameters())
    assert trains("model.norm", [r"model\.norm"])
    assert not trains("model.norm", [r"model\.nor"])


@pytest.mark.parametrize("trained", [["lm_head", "model.layers.7.mlp"], ["model.embed_tokens.weight"]])
def test_a_pattern_that_matches_no_module_ends_the_plan(workplace, tmp_path, trained) -> None:
    """There are two layers, and parameters are no modules."""
    with raises_fault("SF-CONFIG-CONFLICT", "model.trained"):
        make_plan(config(workplace, tmp_path / "run", trained))


def test_what_does_not_go_with_a_part(workplace, tmp_path) -> None:
    def keys(**more: Any) -> list[str]:
        wanted = config(workplace, tmp_path / "run", **({"trained": PATTERNS} | more))
        return [problem.key for problem in contradictions(wanted)]

    others = [{"adapter": {"kind": "lora", "rank": 2}}, {"parallel": {"offload": "optimizer"}}, {"stage": "reward"},
              {"trained": ["(lm_head"]}]  # fmt: skip
    assert [keys(**one).count("model.trained") for one in others] == [1, 1, 1, 1]
    assert "model.trained" not in keys()
