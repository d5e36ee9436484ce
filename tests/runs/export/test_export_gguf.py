"""GGUF files come back, by transformers' own reader, as the same weights, logits and token ids."""

import math
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.adapter_runs import a_plan, a_run
from helpers.faults import gives, raises_fault
from helpers.tiers import diagonal
from helpers.tiny_models import tiny_llama
from surefoot.models import gguf as gguf_file
from surefoot.models.gguf import CONTROL, NotInGguf, gguf_vocabulary, pair_rotary_rows
from surefoot.models.load import load_tokenizer
from surefoot.runs.export import gguf as gguf_export
from surefoot.runs.export.model import export_model

WRITTEN = {
    "llama2": {},
    "llama3": {},
    "mistral": {"version": "0.3"},
    "qwen2": {},
    "qwen3": {},
}


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


def fields(file: Path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize(("family", "dtype"), diagonal(WRITTEN, ["fp32", "bf16"]))
def test_families_with_a_row_come_back_bit_for_bit(tmp_path, family, dtype):
    base = zoo.ZOO[family](tmp_path / "base", **WRITTEN[family])
    out = tmp_path / "out"
    exported = export_model(str(base), out, dtype=dtype, gguf=True)
    told = [caution for caution in exported.cautions if "GGUF" in caution or ".gguf" in caution]
    assert not any("convert_hf_to_gguf.py" in caution for caution in told)
    assert bool(told) == (family in ("llama2", "mistral"))
    check = exported.record["checks"]["reloaded_and_gguf"]
    assert (check["largest_difference"], check["top1_agreement"]) == (0, 1)
    file = out / f"out-{'f32' if dtype == 'fp32' else 'bf16'}.gguf"
    assert file.name in exported.record["outputs"]
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.attn_q.weight"] == ("F32" if dtype == "fp32" else "BF16")
    assert kinds["blk.0.attn_norm.weight"] == "F32"


def test_a_merged_run_says_how_it_is_asked(tmp_path):
    base = tiny_llama(tmp_path / "base")
    run = a_run(tmp_path / "run", base, a_plan("tokenizer", stop=(321, 328)))
    export_model(str(run), tmp_path / "out", merge=True, dtype="fp16", gguf=True)
    found = fields(tmp_path / "out" / "out-f16.gguf")
    tokenizer = load_tokenizer(base)
    assert found["tokenizer.ggml.bos_token_id"] == 320
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.eos_token_id"] == 321
    assert found["tokenizer.ggml.eot_token_id"] == 328
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.tokens"][320] == "<|begin_of_text|>"
    assert found["tokenizer.ggml.token_type"][320] == CONTROL
    config = AutoModelForCausalLM.from_pretrained(base).config
    assert found["llama.attention.head_count_kv"] == config.num_key_value_heads
    assert found["llama.rope.freq_base"] == config.rope_parameters["rope_theta"]
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config.rms_norm_eps)


def test_twin_rotary_rows_that_are_not_paired_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "pair_rotary_rows", lambda tensor, heads: tensor)
    base = zoo.llama2(tmp_path / "base")
    with raises_fault("SF-EXPORT", "out-f32.gguf"):
        export_model(str(base), tmp_path / "out", gguf=True)
    assert not (tmp_path / "out").exists()


def test_a_file_that_loads_with_other_tensors_is_refused(tmp_path, monkeypatch):
    """A weight that only one of the two models has is told as one that differs."""
    load = gguf_export.AutoModelForCausalLM.from_pretrained

    def with_a_layer_less(*args, **kwargs):
        model = load(*args, **kwargs)
        model.model.layers = model.model.layers[:-1]
        return model

    base = zoo.llama2(tmp_path / "base")
    monkeypatch.setattr(gguf_export, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=with_a_layer_less))
    with raises_fault("SF-EXPORT", "out-f32.gguf"):
        export_model(str(base), tmp_path / "out", gguf=True)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(gguf_export, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=load))  # twin
    export_model(str(base), tmp_path / "out", gguf=True)


def test_rotary_rows_by_hand():
    rows = torch.arange(8.0)[:, None]
    assert pair_rotary_rows(rows, heads=2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_rotary_factors_of_llama_3_1_by_hand(tmp_path):
    """llama.cpp divides each frequency by these: 1 for short waves, the factor for long ones, a ramp between."""
    base = zoo.llama3(tmp_path / "base")  # factor 8, low 1, high 4, trained on 256 positions, theta 500,000
    export_model(str(base), tmp_path / "out", gguf=True)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out" / "out-f32.gguf").tensors}
    expected = []
    for place in range(0, 8, 2):  # heads are 8 wide
        wave = 2 * math.pi * 500_000.0 ** (place / 8)
        ramp = (256 / wave - 1) / (4 - 1)
        expected.append(1.0 if wave < 256 / 4 else 8.0 if wave > 256 else 1 / ((1 - ramp) / 8 + ramp))
    np.testing.assert_allclose(tensors["rope_freqs.weight"], expected, rtol=1e-6)
    assert len(set(expected)) > 1


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("gpt2", {}, "'gpt2'"),
        ("phi3", {}, "'phi3'"),
        ("mistral", {}, "16 tokens"),
        (
            "llama3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
            "'yarn'",
        ),
    ],
    ids=["gpt2", "phi3", "window", "yarn"],
)
def test_what_is_not_supported_gets_the_command(tmp_path, family, keys, named):
    base = zoo.ZOO[family](tmp_path / "base", **keys)
    out = tmp_path / "out"
    exported = export_model(str(base), out, dtype="bf16", gguf=True)
    (said,) = [caution for caution in exported.cautions if "convert_hf_to_gguf.py" in caution]
    assert named in said
    assert f"convert_hf_to_gguf.py {out} --outfile {out}/out-bf16.gguf --outtype bf16" in said
    assert (out / "model.safetensors").is_file()
    assert not list(out.glob("*.gguf"))


def test_a_tokenizer_that_cuts_words_in_its_own_way_is_not_written(tmp_path):
    tokenizer = load_tokenizer(zoo.qwen2(tmp_path / "base"))
    rows = len(tokenizer)
    assert gguf_vocabulary(tokenizer, rows).pre == "qwen2"
    with pytest.raises(NotInGguf) as caught:
        gguf_vocabulary(tokenizer, rows - 3)
    assert gives(str(caught.value), rows - 1)
    assert gives(str(caught.value), rows - 3)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = type(backend.pre_tokenizer)([backend.pre_tokenizer[1]])
    with pytest.raises(NotInGguf):
        gguf_vocabulary(tokenizer, rows)
