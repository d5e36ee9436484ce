"""Adapters of any origin: PEFT's own files open to the same logits, and what is not understood is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.faults import raises_fault
from helpers.tiny_models import tiny_llama
from surefoot.models.facts import facts_of
from surefoot.models.load import load_model
from surefoot.models.saved_adapter import fitted, is_adapter, open_adapter, read_adapter

IDS = torch.arange(40).reshape(2, 20) * 7 % 300


def by_peft(folder: Path, target: Path, rows: int = 0, **settings) -> torch.Tensor:
    """Logits of an adapter that plain PEFT made, moved off its start and saved."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    if rows:
        model.resize_token_embeddings(model.config.vocab_size + rows)
    config = LoraConfig(task_type="CAUSAL_LM", **({"target_modules": ["q_proj", "down_proj"], "r": 4} | settings))
    model = get_peft_model(model, config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(target)
    with torch.no_grad():
        return model(input_ids=IDS).logits


def base(folder: Path, rows: int | None):
    return load_model(
        folder, dtype=torch.float32, attention_implementation="sdpa", device=torch.device("cpu"), vocab_rows=rows
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "target_modules": "all-linear"},
        {"target_modules": r".*layers\.1\..*(q|v)_proj", "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"modules_to_save": ["lm_head"], "lora_dropout": 0.4},
        {"init_lora_weights": "gaussian", "layers_to_transform": [0]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"rows": 3},
        {"rows": 3, "modules_to_save": ["lm_head"]},
        {"rows": 3, "modules_to_save": ["embed_tokens"]},
        {"rows": 3, "modules_to_save": ["lm_head", "embed_tokens"]},
        {"rows": 3, "modules_to_save": ["norm"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=str,
)
def test_adapters_of_peft_open_to_the_same_logits(folder, tmp_path, settings):
    expected = by_peft(folder, tmp_path, **settings)
    assert is_adapter(tmp_path)
    assert not is_adapter(folder)
    saved = read_adapter(tmp_path)
    assert saved.base == str(folder)
    saved = fitted(saved, facts_of(folder))
    targets, trained = settings.get("target_modules", ()), settings.get("modules_to_save", ())
    holds_one = "rows" in settings or "lm_head" in trained or "embed_tokens" in targets
    assert saved.rows == (329 + settings.get("rows", 0) if holds_one else None)
    state = torch.get_rng_state()
    model = open_adapter(base(folder, saved.rows), saved)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, expected)
    assert not model.training


def test_another_base_is_refused(folder, tmp_path):
    by_peft(folder, tmp_path / "adapter")
    other = tiny_llama(tmp_path / "other", hidden=64)
    with raises_fault("SF-ADAPTER-FIT", f"{tmp_path}/adapter/adapter_model.safetensors"):
        open_adapter(base(other, None), read_adapter(tmp_path / "adapter"))
    shallow = tiny_llama(tmp_path / "shallow", layers=1)
    with raises_fault("SF-ADAPTER-FIT", f"{tmp_path}/adapter/adapter_model.safetensors"):
        open_adapter(base(shallow, None), read_adapter(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"something_new": True}, "something_new"),
        ({"target_modules": ["nothing_like_it"]}, "nothing_like_it"),
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_refused(folder, tmp_path, change, fact):
    by_peft(folder, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with raises_fault("SF-ADAPTER-FIT", path, fact):
        open_adapter(base(folder, None), read_adapter(tmp_path))


def test_other_kinds_and_pickled_weights_are_refused(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).save_pretrained(tmp_path)
    with raises_fault("SF-ADAPTER-FIT", f"{tmp_path}/adapter_config.json", "PREFIX_TUNING"):
        read_adapter(tmp_path)
    by_peft(folder, tmp_path / "lora")
    (tmp_path / "lora" / "adapter_model.safetensors").rename(tmp_path / "lora" / "adapter_model.bin")
    with raises_fault("SF-ADAPTER-FIT", f"{tmp_path}/lora"):
        read_adapter(tmp_path / "lora")


def test_a_non_finite_adapter_is_refused(folder, tmp_path):
    by_peft(folder, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, path)
    with raises_fault("SF-MODEL-NUMBERS", path):
        open_adapter(base(folder, None), read_adapter(tmp_path))
