"""Runs over a base that is stored in few bits are those over the same base in plain numbers."""

import json
import shutil
from functools import partial

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.stored_forms import in_awq, in_gptq, in_packed
from helpers.tiers import representatives
from helpers.trained_runs import heron_folder, heron_train, heron_trained
from helpers.wrappers import wrapper
from helpers.zoo_modern import MODERN

# Plain weights stay in the mapped file and begin elsewhere in a line of the cache, where some products add otherwise.
FP32 = 1e-6
LORA = {"kind": "lora", "rank": 4}
DORA = {"kind": "dora", "rank": 4, "dropout": 0.1}
# Of a base: what makes it, and what stores it. Experts have no DoRA.
BASES = {
    "gptq": (None, in_gptq, DORA),
    "awq": (MODERN["qwen3_moe"], in_awq, LORA),
    "packed": (partial(wrapper, "qwen2_5_vl"), in_packed, DORA),
}


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


def stored(form, tmp_path):
    """A folder with `base` in this form and `plain`, and the adapter to train over them."""
    make, write, adapter = BASES[form]
    folder = heron_folder(tmp_path)
    if make is not None:
        shutil.rmtree(folder / "base")
        make(folder / "base")
    write(folder / "base", folder / "plain")
    return folder, adapter


@pytest.mark.parametrize("form", ["awq", "packed"])
def test_so_are_runs_over_awq_and_compressed_tensors(tmp_path, form):
    """Over experts that are stored one by one, and in a wrapper: an adapter merged into the model. The order of the
    numbers is written in the helper, apart from the decoder's."""
    folder, _ = stored(form, tmp_path)
    settings = {"adapter": LORA | {"publish": "merged"}, "duration": "2 steps", "precision": "fp32"}
    heron_trained(folder, "run", **settings)
    heron_trained(folder, "run-plain", model=str(folder / "plain"), **settings)
    ours, twin = (load_file(folder / name / "model.safetensors") for name in ("run", "run-plain"))
    assert ours.keys() == twin.keys()
    assert all(torch.equal(ours[key], twin[key]) for key in ours)
    assert "quantization_config" not in json.loads((folder / "run" / "config.json").read_text())


@pytest.mark.parametrize("form", representatives(list(BASES), "gptq"))
def test_killed_and_resumed_it_is_the_uninterrupted_run_and_that_over_plain_numbers(tmp_path, form):
    """DoRA reads the norms of the decoded weights."""
    folder, adapter = stored(form, tmp_path)
    settings = {"adapter": adapter, "duration": "4 steps", "precision": "fp32"}
    settings |= {"checkpoint": {"every": "2 steps", "best": "none"}}
    heron_trained(folder, "whole", **settings)
    heron_trained(folder, "plainly", model=str(folder / "plain"), **settings)
    shutil.copytree(folder / "whole", folder / "half")
    shutil.rmtree(folder / "half/checkpoint-4")
    (folder / "half/MANIFEST.json").unlink()
    shutil.copytree(folder / "half", folder / "other")
    heron_trained(folder, "half", "--resume", **settings)
    for file in ("adapter_model", "optimizer"):
        whole, half = (load_file(folder / name / f"checkpoint-4/{file}.safetensors") for name in ("whole", "half"))
        assert whole.keys() == half.keys()
        assert all(torch.equal(whole[key], half[key]) for key in whole)
    ours, plain = (load_file(folder / name / "adapter_model.safetensors") for name in ("whole", "plainly"))
    assert ours.keys() == plain.keys()
    assert all(torch.allclose(ours[key], plain[key], rtol=0, atol=FP32) for key in ours)
    assert any("magnitude" in name for name in ours) == (adapter is DORA)
    # Twin: over other numbers under the same names there is nothing to go on with.
    tensors = load_file(folder / "base/model.safetensors")
    next(one for name, one in sorted(tensors.items()) if name.endswith(("qweight", "weight_packed")))[0] += 1
    save_file(tensors, folder / "base/model.safetensors", metadata={"format": "pt"})
    result = heron_train(folder, "other", "--resume", **settings)
    assert result.exit_code != 0
    assert "SF-RESUME" in result.output
