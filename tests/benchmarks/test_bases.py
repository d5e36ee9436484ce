"""Random Llamas of the benchmarks: shapes are those of the published models, and the small ones stay as they were."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from bases import SIZES, Shape, build_base, moved_bytes

PARAMETERS = {"1b": 1_235_814_400, "8b": 8_030_261_248}  # of meta-llama/Llama-3.2-1B and Llama-3.1-8B, as published
# 3 · layers · 2 · (6 h + 2 (q + kv) + 3 i), by hand.
MOVED = {"1b": 3 * 16 * 2 * (12_288 + 2 * 2_560 + 24_576), "8b": 3 * 32 * 2 * (24_576 + 2 * 5_120 + 43_008)}


def parameters(shape: Shape) -> int:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape.fields()))
    return model.num_parameters()


@pytest.mark.parametrize("size", PARAMETERS)
def test_a_large_base_has_as_many_parameters_as_the_model_that_it_is_named_after(size):
    assert parameters(SIZES[size]) == PARAMETERS[size]


def test_twin_another_gate_or_an_untied_head_is_another_number():
    wider = {**SIZES["8b"].own, "intermediate_size": 14_337}
    assert parameters(dataclasses.replace(SIZES["8b"], own=wider)) != PARAMETERS["8b"]
    untied = {**SIZES["1b"].own, "tie_word_embeddings": False}
    assert parameters(dataclasses.replace(SIZES["1b"], own=untied)) != PARAMETERS["1b"]


@pytest.mark.parametrize("size", MOVED)
def test_what_small_operators_move_is_what_the_formula_says(size):
    assert moved_bytes(SIZES[size]) == MOVED[size]


def test_twin_as_many_keys_as_queries_move_more():
    shape = SIZES["8b"]
    assert moved_bytes(dataclasses.replace(shape, own={**shape.own, "num_key_value_heads": 32})) > MOVED["8b"]


def test_small_sizes_are_as_they_were():
    assert SIZES["small"].fields() == {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 2048,
    }


@pytest.mark.parametrize(("large", "held"), [(False, "F32"), (True, "BF16")])
def test_a_large_base_is_written_in_16_bits_and_the_same_each_time(tmp_path, large, held):
    shape = Shape(2, 64, own={"rope_parameters": SIZES["8b"].own["rope_parameters"]}, large=large)
    for name in ("one", "two"):
        build_base(tmp_path / name, ["a heron is a bird"], shape)
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    with safe_open(one, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {held}  # noqa: SIM118
    assert json.loads((one.parent / "config.json").read_text())["rope_parameters"]["factor"] == 8.0
    assert torch.get_default_dtype() == torch.float32
