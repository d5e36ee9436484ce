"""Runs over a base that is stored in few bits are those over the same base in plain numbers."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.stored_forms import in_awq, in_gptq, in_packed
from helpers.trained_runs import heron_folder, heron_trained
from helpers.wrappers import wrapper
from helpers.zoo_modern import MODERN

LORA = {"kind": "lora", "rank": 4}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """`base` in GPTQ, `plain` its twin."""
    folder = heron_folder(tmp_path_factory.mktemp("stored"))
    in_gptq(folder / "base", folder / "plain")
    return folder


@pytest.mark.parametrize("adapter", [LORA, LORA | {"publish": "merged"}, None])
def test_a_run_over_gptq_is_the_run_over_what_it_stands_for(world, adapter):
    name = "full" if adapter is None else adapter.get("publish", "adapter")
    heron_trained(world, name, adapter=adapter, duration="2 steps", precision="fp32")
    heron_trained(
        world, f"{name}-plain", adapter=adapter, duration="2 steps", model=str(world / "plain"), precision="fp32"
    )
    run = world / name
    file = "adapter_model.safetensors" if adapter == LORA else "model.safetensors"
    ours, twin = load_file(run / file), load_file(world / f"{name}-plain" / file)
    assert ours.keys() == twin.keys()
    assert all(torch.equal(ours[key], twin[key]) for key in ours)
    assert "GPTQ" in (run / "README.md").read_text()
    assert "GPTQ" in json.loads((run / "plan.json").read_text())["plan"]["precision"]["base"]["reason"]
    if adapter == LORA:
        assert json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"] == str(world / "base")
        opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(world / "plain"), run)
    else:
        opened = AutoModelForCausalLM.from_pretrained(run)
        assert "quantization_config" not in json.loads((run / "config.json").read_text())
    assert opened(torch.arange(3, 9)[None]).logits.isfinite().all()


def test_another_number_in_the_files_is_another_run(world, tmp_path):
    """The twin: what is decoded is what is trained over."""
    shutil.copytree(world / "base", tmp_path / "base")
    tensors = load_file(tmp_path / "base/model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qweight"] += 1
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    for name, base in {"one": world / "base", "other": tmp_path / "base"}.items():
        heron_trained(world, name, adapter=LORA, duration="2 steps", model=str(base), precision="fp32")
    one, other = (load_file(world / name / "adapter_model.safetensors") for name in ("one", "other"))
    assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("write", "make"),
    [(in_awq, MODERN["qwen3_moe"]), (in_packed, partial(wrapper, "qwen2_5_vl"))],
    ids=["awq", "packed"],
)
def test_so_are_runs_over_awq_and_compressed_tensors(tmp_path, write, make):
    """Over experts that are stored one by one, and in a wrapper: an adapter merged into the model. The order of the
    numbers is written in the helper, apart from the decoder's."""
    folder = heron_folder(tmp_path)
    shutil.rmtree(folder / "base")
    make(folder / "base")
    write(folder / "base", folder / "plain")
    settings = {"adapter": LORA | {"publish": "merged"}, "duration": "2 steps", "precision": "fp32"}
    heron_trained(folder, "run", **settings)
    heron_trained(folder, "run-plain", model=str(folder / "plain"), **settings)
    ours, twin = (load_file(folder / name / "model.safetensors") for name in ("run", "run-plain"))
    assert ours.keys() == twin.keys()
    assert all(torch.equal(ours[key], twin[key]) for key in ours)
    assert "quantization_config" not in json.loads((folder / "run" / "config.json").read_text())
