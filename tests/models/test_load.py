"""A loaded model is exactly what its files say, or it is refused with one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.experts import moe_model
from helpers.faults import raises_fault
from helpers.tiny_models import tiny_llama
from surefoot.models import load
from surefoot.models.embeddings import is_tied
from surefoot.models.load import load_model, load_tokenizer
from surefoot.models.precision import TORCH_DTYPE
from surefoot.models.quiet import quiet_libraries

CPU = torch.device("cpu")


def open_model(folder: Path, dtype: torch.dtype = torch.float32, **options):
    return load_model(folder, dtype=dtype, attention_implementation="sdpa", device=CPU, **options)


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    return shutil.copytree(tiny_model(), tmp_path / "model")


def set_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(folder: Path, edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def poison(folder: Path, name: str, value: float) -> None:
    edit_weights(folder, lambda tensors: tensors[name].view(-1)[7:8].fill_(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_the_files_cast_to_the_planned_dtype(folder, dtype):
    model = open_model(folder, dtype)
    tensors = load_file(folder / "model.safetensors")
    assert {p.dtype for p in model.parameters()} == {dtype}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name].to(dtype)), name
    assert model.config._attn_implementation == "sdpa"
    assert not model.training


def test_loading_writes_nothing(folder, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()  # some other test's library may have switched it off
    open_model(folder)
    load_tokenizer(folder)
    assert capfd.readouterr() == ("", "")
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder)  # twin: unmuted, transformers draws a progress bar
    assert "Loading weights" in capfd.readouterr().err


def test_the_libraries_speak_again_afterwards():
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet_libraries():
        assert not logging.is_progress_bar_enabled()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_missing_weights_are_refused_not_drawn_at_random(folder, monkeypatch):
    set_config(folder, num_hidden_layers=3)
    with raises_fault("SF-MODEL-KEYS", folder, 9, "model.layers.2.input_layernorm.weight"):
        open_model(folder)
    monkeypatch.setattr(load, "_key_faults", lambda *_: [])  # twin: unchecked, a random layer trains
    assert len(open_model(folder).model.layers) == 3


def test_unexpected_weights_are_refused(folder, monkeypatch):
    set_config(folder, num_hidden_layers=1)
    with raises_fault("SF-MODEL-KEYS", f"{folder}/model.safetensors", 9):
        open_model(folder)
    monkeypatch.setattr(load, "_key_faults", lambda *_: [])
    assert len(open_model(folder).model.layers) == 1


def test_shapes_that_disagree_with_the_config_are_refused(folder, capfd):
    set_config(folder, hidden_size=64)
    with raises_fault("SF-MODEL-KEYS", f"{folder}/model.safetensors", "lm_head.weight", [329, 32], [329, 64]):
        open_model(folder)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embed_tokens.weight", float("nan")),
        ("model.norm.weight", float("inf")),
        ("lm_head.weight", float("-inf")),
    ],
)
def test_one_non_finite_value_is_refused_with_tensor_and_file(folder, name, value, monkeypatch):
    poison(folder, name, value)
    with raises_fault("SF-MODEL-NUMBERS", f"{folder}/model.safetensors", name, 1) as error:
        open_model(folder)
    assert error.value.exit_code == 2
    monkeypatch.setattr(load, "is_finite", lambda _: True)  # twin: unchecked, it loads
    assert not torch.isfinite(open_model(folder).get_parameter(name)).all()


def test_a_value_beyond_fp16_is_told_apart_from_damage(folder):
    poison(folder, "lm_head.weight", 1e6)
    with raises_fault("SF-MODEL-NUMBERS", f"{folder}/model.safetensors", "float16", "65504"):
        open_model(folder, torch.float16)
    open_model(folder, torch.bfloat16)


def test_tied_embeddings_load_as_one_parameter(tmp_path):
    assert is_tied(open_model(tiny_llama(tmp_path / "tied", tied=True)))
    assert not is_tied(open_model(tiny_llama(tmp_path / "untied")))


def test_a_tied_config_over_two_matrices_is_refused(folder):
    set_config(folder, tie_word_embeddings=True)
    with raises_fault("SF-MODEL-KEYS", folder):
        open_model(folder)
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert is_tied(open_model(folder))  # twin: two copies of one matrix are tied


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("hidden_size", "a", "config.json"),
        ("num_attention_heads", 5, "config.json"),
        ("hidden_act", "nope", ""),
        ("pad_token_id", 5000, ""),
    ],
)
def test_a_config_that_makes_no_model_is_one_line(folder, key, value, place):
    set_config(folder, **{key: value})
    with raises_fault("SF-MODEL-KIND", folder / place):
        open_model(folder)


def test_an_unknown_architecture_is_refused_whatever_code_it_brings(folder):
    (folder / "modeling_odd.py").write_text("raise SystemExit('ran')")
    set_config(folder, model_type="odd", auto_map={"AutoConfig": "modeling_odd.Odd"})
    with raises_fault("SF-MODEL-KIND", f"{folder}/config.json"):
        open_model(folder)


def test_code_beside_a_known_architecture_is_ignored(folder):
    (folder / "modeling_odd.py").write_text("raise SystemExit('ran')")
    set_config(folder, auto_map={"AutoConfig": "modeling_odd.Odd", "AutoModelForCausalLM": "modeling_odd.Odd"})
    assert type(open_model(folder)).__module__ == "transformers.models.llama.modeling_llama"


def test_an_attention_library_that_is_absent_is_an_environment_fault(folder):
    with raises_fault("SF-MODEL-KIND", "attention"):
        load_model(folder, dtype=torch.float32, attention_implementation="flash_attention_3", device=CPU)


def test_a_tokenizer_file_that_the_library_cannot_read_is_an_input_error(folder):
    """The Rust library raises a bare Exception for it."""
    content = json.loads((folder / "tokenizer.json").read_text())
    del content["added_tokens"][0]["single_word"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with raises_fault("SF-TOKENIZER", folder, "single_word"):
        load_tokenizer(folder)


def test_a_folder_without_tokenizer_is_one_line(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with raises_fault("SF-TOKENIZER", folder):
        load_tokenizer(folder)


def test_rows_are_added_on_request(folder):
    model = open_model(folder, vocab_rows=331)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == 331


@pytest.mark.parametrize(("width", "dtype", "implementation"), [(12, "bf16", "eager"), (16, "bf16", "grouped_mm")])
def test_experts_too_narrow_for_a_grouped_product_are_computed_one_by_one(width, dtype, implementation, tmp_path):
    moe_model("mixtral", intermediate_size=width).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=TORCH_DTYPE[dtype], attention_implementation="eager", device=torch.device("cpu"))
    assert model.config._experts_implementation == implementation
    assert torch.isfinite(model(input_ids=torch.arange(6).unsqueeze(0)).logits).all()
