"""Vision tower and projector that train: gradients beside autograd's own, plan, memory, saving, exact resume."""

import io
import json

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from torch import nn
from transformers import AutoModelForImageTextToText

import surefoot
from helpers.faults import raises_fault
from helpers.model_layouts import run_config
from helpers.seeing import seeing
from helpers.seeing_families import FAMILIES, seeing_family
from helpers.tiers import representatives
from runs.test_picture_families_run import batch_of, expected
from runs.test_pictures_run import FP32_RELATIVE, config, opened, records, trained_and_resumed
from surefoot.commands.main import main
from surefoot.families.vision_parts import PARTS, modules_of, part_of
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.adapters import add_adapter
from surefoot.models.facts import facts_of
from surefoot.models.shared_backbone import SharedBackbone
from surefoot.models.wrapped import train_vision, wrapper_parameters
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.notes import Notes
from surefoot.planning.optimizer import state_bytes
from surefoot.planning.vision import plan_vision, with_trained_vision

LACKING = [("gemma4_unified", "tower")]
QWEN = ("qwen2_5_vl", "qwen3_vl")
BOTH = {"tower": "trained", "projector": "trained"}
LORA = {"kind": "lora", "rank": 2, "dropout": 0.1}


def made(name, folder):
    return seeing(name, folder) if name in QWEN else seeing_family(name, folder)


@pytest.mark.parametrize("name", [*FAMILIES, *QWEN])
def test_modules_of_a_part_hold_it_and_nothing_else(tmp_path, name):
    model = AutoModelForImageTextToText.from_pretrained(made(name, tmp_path / "base"))
    names = [one for one in wrapper_parameters(model) if part_of(one)]
    for part in PARTS:
        modules = modules_of(part, names)
        assert bool(modules) == ((name, part) not in LACKING)
        assert not any(isinstance(model.get_submodule(one), nn.ModuleList | nn.ModuleDict) for one in modules)
        held = [f"{one}.{own}" for one in modules for own, _ in model.get_submodule(one).named_parameters()]
        assert sorted(held) == sorted(one for one in names if part_of(one) == part)
    whole = dict(model.named_modules())
    for one in (*modules_of("tower", names), *modules_of("projector", names)):  # PEFT goes by the ends of names
        assert [own for own in whole if own.endswith(one)] == [one]
    left = {one for one in wrapper_parameters(model).keys() - set(names) if "audio" not in one}
    assert all(part_of(one) is None for one in left)
    assert left == ({"model.image_newline"} if name == "llava_next" else set())


@pytest.mark.parametrize("name", representatives(list(FAMILIES), "gemma3", "llava", "smolvlm", "mistral3"))
def test_gradients_are_those_of_autograd(tmp_path, name):
    base = seeing_family(name, tmp_path / "base")
    batch, model = batch_of(base, tmp_path), opened(base)
    train_vision(model, PARTS)
    theirs = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa").eval()
    wanted = expected(theirs, name, base, tmp_path, batch)
    wanted.backward()
    sft_loss(model, batch).loss.backward()
    gradients = {key: one.grad for key, one in theirs.named_parameters() if one.grad is not None}
    largest = max(float(one.abs().max()) for one in gradients.values())
    found = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    for part in PARTS:
        if (name, part) in LACKING:
            continue
        own = [key for key in gradients if part_of(key) == part]
        assert any(float(gradients[key].abs().max()) > 0 for key in own)
        for key in own:
            assert float((found[key] - gradients[key]).abs().max()) <= FP32_RELATIVE * largest, key


EACH = representatives(["gemma3", "llava", "smolvlm", "qwen3_vl"], "gemma3")
COMBINED = [
    pytest.param(LORA, BOTH, id="lora-both"),
    pytest.param(LORA, {"projector": "trained"}, id="lora-projector", marks=pytest.mark.slow),
    pytest.param(None, {"tower": "trained"}, id="full-tower"),
]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(("adapter", "vision"), COMBINED)
def test_what_is_asked_for_trains_is_saved_and_resumed(tmp_path, name, adapter, vision):
    base = made(name, tmp_path / "base")
    records(tmp_path)
    raw = config(tmp_path, "whole") | {"vision": vision, "adapter": adapter}
    raw["data"] |= {"max_length": 512}
    trained_and_resumed(raw, tmp_path)
    kind = AutoModelForImageTextToText
    before = dict(kind.from_pretrained(base, dtype=torch.float32).named_parameters())
    if adapter:
        plain = PeftModel.from_pretrained(kind.from_pretrained(base, dtype=torch.float32), str(tmp_path / "whole"))
        after = dict(plain.merge_and_unload().named_parameters())
    else:
        after = dict(kind.from_pretrained(tmp_path / "whole", dtype=torch.float32).named_parameters())
    for part in PARTS:
        own = [key for key in before if part_of(key) == part]
        moved = [key for key in own if not torch.equal(before[key], after[key])]
        assert bool(moved) == (part in vision), part
    plan = json.loads((tmp_path / "whole" / "plan.json").read_text())["plan"]
    rows = {row["kind"]: row for row in plan["coverage"]}
    for part, kind_of_part in {"tower": "vision tower", "projector": "projector"}.items():
        size = sum(before[key].numel() for key in before if part_of(key) == part)
        learns = size if part in vision else 0
        assert (rows[kind_of_part]["weights"], rows[kind_of_part]["trained"]) == (size, learns)


def test_memory_counts_their_states(tmp_path):
    base = seeing_family("llava", tmp_path / "base")
    for name in ("adamw", "adafactor", "sgd"):
        given = {"name": name, "lr": 1e-3} | ({"momentum": 0.9} if name == "sgd" else {})
        asked = run_config(vision=BOTH, optim=given)
        vision = plan_vision(asked, facts_of(base), Notes())
        model = opened(base)
        train_vision(model, PARTS)
        own = [one for key, one in model.named_parameters() if part_of(key)]
        assert vision.parameters == sum(one.numel() for one in own)
        kinds = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
        optimizer = kinds[name](own) if name in kinds else torch.optim.SGD(own, momentum=0.9)
        for one in own:
            one.grad = torch.ones_like(one)
        optimizer.step()
        held = [value for state in optimizer.state.values() for value in state.values() if value is not None]
        found = sum(one.numel() * one.element_size() for one in held if isinstance(one, torch.Tensor) and one.ndim)
        assert state_bytes(asked.optim, iter(vision.tensors)) == found, name


def test_parts_that_cannot_train_are_refused(tmp_path):
    base = seeing_family("llava", tmp_path / "base")
    notes = Notes()
    plan_vision(run_config(vision=BOTH, stage="ppo"), facts_of(base), notes)
    assert [fault.where for fault in notes.faults] == ["vision.tower", "vision.projector"]
    blind, notes = facts_of(base), Notes()
    from dataclasses import replace

    plan_vision(run_config(vision={"tower": "trained"}), replace(blind, vision=()), notes)
    assert [fault.where for fault in notes.faults] == ["vision.tower"]
    unlike = tuple((name.replace("patch", "stem"), shape) for name, shape in blind.vision)  # as timm's in Gemma 3n
    for tower, found in (("trained", ["vision.tower"]), ("frozen", [])):
        notes = Notes()
        plan_vision(run_config(vision={"tower": tower}), replace(blind, vision=unlike), notes)
        assert [fault.where for fault in notes.faults] == found
    records(tmp_path)
    raw = config(tmp_path, "run") | {"vision": {"tower": "thawed"}}
    with raises_fault("SF-CONFIG-VALUE", "vision.tower"):
        surefoot.train(raw, stream=io.StringIO())


def test_a_reference_sees_with_the_frozen_parts(tmp_path):
    base = seeing_family("gemma3", tmp_path / "base")
    batch, facts, notes = batch_of(base, tmp_path), facts_of(base), Notes()
    asked = run_config(vision=BOTH, adapter={"kind": "lora", "rank": 2}, stage="dpo")
    vision = plan_vision(asked, facts, notes)
    plan = with_trained_vision(plan_adapter(asked.adapter, facts, 0, notes), vision, facts)
    model = add_adapter(opened(base), plan, seed=1, base="org/base").eval()
    with torch.no_grad():
        wanted = sft_loss(opened(base), batch).loss
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05
        policy = SharedBackbone(model)
        with policy.use_adapter(None):
            assert sft_loss(model, batch).loss.item() == pytest.approx(wanted.item(), rel=FP32_RELATIVE)
        assert abs(sft_loss(model, batch).loss.item() - wanted.item()) > 10 * FP32_RELATIVE  # twin: the policy


@pytest.mark.parametrize("name", representatives(["gemma3", "qwen3_vl"], "qwen3_vl"))
def test_what_is_published_merged_is_the_adapter_over_its_base(tmp_path, name):
    base = made(name, tmp_path / "base")
    records(tmp_path)
    raw = config(tmp_path, "apart") | {"vision": BOTH, "adapter": LORA | {"dropout": 0.0}}
    raw["data"] |= {"max_length": 512, "eval": str(tmp_path / "d.jsonl")}
    surefoot.train(raw, stream=io.StringIO())
    merged = raw | {"adapter": raw["adapter"] | {"publish": "merged"}, "output": str(tmp_path / "merged")}
    surefoot.train(merged, stream=io.StringIO())
    kind = AutoModelForImageTextToText
    found = dict(kind.from_pretrained(tmp_path / "merged", dtype=torch.float32).named_parameters())
    plain = PeftModel.from_pretrained(kind.from_pretrained(base, dtype=torch.float32), str(tmp_path / "apart"))
    for key, one in plain.merge_and_unload().named_parameters():
        if part_of(key):
            assert torch.equal(found[key], one), key
        else:
            assert torch.allclose(found[key], one, atol=1e-6), key
    last = json.loads((tmp_path / "apart" / "eval_results.json").read_text())["eval_loss"]
    for run in ("apart", "merged"):
        result = CliRunner().invoke(
            main, ["evaluate", "loss", str(tmp_path / run), str(tmp_path / "d.jsonl"), "--json"]
        )
        assert result.exit_code == 0, result.output
        results = json.loads(result.stdout)["results"]
        assert any(one["loss"] == pytest.approx(last, rel=FP32_RELATIVE) for one in results.values())
        if len(results) > 1:  # twin: the base, whose tower and projector are as they were
            assert any(abs(one["loss"] - last) > 10 * FP32_RELATIVE * last for one in results.values())
