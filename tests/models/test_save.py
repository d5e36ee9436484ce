"""What is written is what PEFT and transformers read, with the same bits, and nothing of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.faults import raises_fault
from helpers.plans import adapter_plan, linear_names
from helpers.tiers import diagonal
from surefoot.models.adapters import add_adapter
from surefoot.models.embeddings import resize_vocabulary
from surefoot.models.save import load_adapter_weights, save_adapter, save_full

IDS = torch.arange(40).reshape(2, 20) * 7 % 300


@pytest.fixture(scope="module")
def folders(tiny_model) -> dict[bool, Path]:
    return {tied: tiny_model(tied=tied) for tied in (True, False)}


def opened(folder: Path, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def trained(folder: Path, dtype: torch.dtype = torch.float32, rows: int = 0, base: str = "org/base", **plan):
    """An adapter that has moved away from its start."""
    model = opened(folder, dtype)
    resize_vocabulary(model, model.config.vocab_size + rows)
    model = add_adapter(model, adapter_plan(linear_names(model), **plan), seed=1, base=base).eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


PLANS = (
    {"kind": "lora"},
    {"kind": "dora"},
    {"kind": "lora", "rslora": True, "alpha": 6.5},
    {"kind": "dora", "modules_to_save": ("lm_head",)},
    {"kind": "lora", "dropout": 0.3},
)


@pytest.mark.parametrize(("plan", "tied"), diagonal(PLANS, [True, False]))
def test_an_adapter_loads_with_peft_and_gives_the_same_logits(folders, tmp_path, tied, plan):
    model = trained(folders[tied], **plan)
    save_adapter(model, tmp_path, save_embedding=False)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    again = PeftModel.from_pretrained(opened(folders[tied]), tmp_path).eval()
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), logits(opened(folders[tied])))  # the adapter is not idle


def test_an_adapter_over_a_bf16_base_keeps_fp32_bits(folders, tmp_path):
    model = trained(folders[False], torch.bfloat16, kind="dora")
    save_adapter(model, tmp_path, save_embedding=False)
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.float32}
    assert torch.equal(
        logits(PeftModel.from_pretrained(opened(folders[False], torch.bfloat16), tmp_path)), logits(model)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_added_rows_travel_with_the_adapter(folders, tmp_path, tied):
    model = trained(folders[tied], rows=2)
    save_adapter(model, tmp_path, save_embedding=True)
    base = opened(folders[tied])
    base.resize_token_embeddings(base.config.vocab_size + 2)  # as the model card tells the user; rows drawn at random
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path)), logits(model))
    save_adapter(model, tmp_path, save_embedding=False)  # twin: without the rows the result depends on that draw
    base = opened(folders[tied])
    base.resize_token_embeddings(base.config.vocab_size + 2)
    assert not torch.equal(logits(PeftModel.from_pretrained(base, tmp_path)), logits(model))


def test_equal_adapters_are_equal_bytes_in_any_process(folders, tmp_path):
    """PEFT writes sets, whose order changes from process to process."""
    for name in ("one", "two"):
        save_adapter(trained(folders[False], kind="dora"), tmp_path / name, save_embedding=False)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    short = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == short
    assert config["base_model_name_or_path"] == "org/base"
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 8, True)
    assert str(folders[False]) not in json.dumps(config)


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("plan", [{}, {"modules_to_save": ("lm_head",)}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_bit_for_bit(folders, tmp_path, tied, plan, rows):
    model = trained(folders[tied], rows=rows, kind="dora", **plan)
    save_adapter(model, tmp_path, save_embedding=rows > 0)
    fresh = opened(folders[tied])
    resize_vocabulary(fresh, fresh.config.vocab_size + rows)
    fresh = add_adapter(fresh, adapter_plan(linear_names(fresh), "dora", **plan), seed=9, base="org/base")
    for name, parameter in fresh.named_parameters():
        if parameter.shape[0] > fresh.config.vocab_size - rows and "original_module" not in name:
            parameter.data[-rows or len(parameter) :] = 0  # they must come from the file
    load_adapter_weights(fresh, tmp_path, save_embedding=rows > 0)
    saved = dict(model.named_parameters())
    assert all(torch.equal(parameter, saved[name]) for name, parameter in fresh.named_parameters())


@pytest.mark.parametrize("other", [{"rank": 2}, {"kind": "dora"}, {"modules_to_save": ("lm_head",)}], ids=str)
def test_weights_of_another_adapter_are_refused(folders, tmp_path, other):
    save_adapter(trained(folders[False]), tmp_path, save_embedding=False)
    model = trained(folders[False], **other)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with raises_fault("SF-ADAPTER-FIT", f"{tmp_path}/adapter_model.safetensors"):
        load_adapter_weights(model, tmp_path, save_embedding=False)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_model_loads_with_transformers_and_keeps_fp32_bits(folders, tmp_path, tied):
    model = opened(folders[tied])
    for parameter in model.parameters():
        parameter.data += 1e-4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    save_full(model, tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)  # no dtype given: config.json says fp32
    saved = dict(model.named_parameters())
    assert all(torch.equal(parameter, saved[name]) for name, parameter in again.named_parameters())
    assert torch.equal(logits(again), logits(model))
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is True
    assert str(folders[tied]) not in (tmp_path / "config.json").read_text()


def test_saving_writes_nothing_to_the_terminal(folders, tmp_path, capfd):
    model = trained(folders[False])
    capfd.readouterr()
    save_adapter(model, tmp_path / "adapter", save_embedding=False)
    save_full(opened(folders[False]), tmp_path / "full")
    err = capfd.readouterr().err
    assert "Writing" not in err
