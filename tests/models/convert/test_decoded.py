"""Weights that files hold in MXFP4 or FP8 are the numbers that the formats say, and that transformers decodes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from equality.stored_integers import CASES, DYNAMIC, compressed, gptq, integers
from helpers.experts import moe_model
from helpers.faults import raises_fault
from helpers.stored_forms import BLOCK, in_fp8, in_mxfp4
from surefoot.families.stored_forms import obstacle, stored_form
from surefoot.models.convert import decoded as module
from surefoot.models.convert.decoded import decoded
from surefoot.models.convert.tensors import held
from surefoot.models.facts import facts_of
from surefoot.models.load import load_model
from surefoot.models.save import save_full

CPU = torch.device("cpu")
GPT_OSS = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}
FP8 = {"quant_method": "fp8", "weight_block_size": [2, 2]}
MXFP4 = {"quant_method": "mxfp4"}
FLOAT = integers(8, "channel", type="float")

# e2m1 by the standard's rule: sign, two bits of exponent with bias 1, one of mantissa; exponent 0 has no hidden one.
TABLE = [
    (-1) ** (code >> 3) * (2.0 ** ((code >> 1 & 3) - 1) * (1 + (code & 1) / 2) if code >> 1 & 3 else (code & 1) / 2)
    for code in range(16)
]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mxfp4")
    moe_model("gpt_oss", **GPT_OSS).save_pretrained(folder)
    return in_mxfp4(folder)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def fp8(request, tmp_path_factory):
    """Dense layers and experts, which the file holds one by one and transformers in one tensor."""
    folder = tmp_path_factory.mktemp(request.param)
    moe_model(request.param, torch.bfloat16, moe_intermediate_size=16, hidden_size=32).save_pretrained(folder)
    return in_fp8(folder)


def by_hand(blocks: list[int], exponent: int) -> list[float]:
    return [TABLE[half] * 2.0 ** (exponent - 127) for byte in blocks for half in (byte & 15, byte >> 4)]


def mxfp4(blocks, scales):
    return {"x_blocks": held(blocks), "x_scales": held(scales)}


def test_mxfp4_by_hand():
    blocks = torch.arange(256, dtype=torch.uint8).reshape(2, 2, 4, 16)
    scales = torch.tensor([127, 126, 130, 100, 127, 90, 128, 160, 127, 1, 127, 127, 127, 127, 121, 122])
    scales = scales.to(torch.uint8).reshape(2, 2, 4)
    plain = decoded(mxfp4(blocks, scales), MXFP4)["x"]
    assert (plain.shape, plain.dtype) == ((2, 128, 2), "BF16")
    for expert in range(2):
        for row in range(2):
            groups = [by_hand(blocks[expert, row, g].tolist(), int(scales[expert, row, g])) for g in range(4)]
            assert plain.read()[expert, :, row].double().tolist() == [one for group in groups for one in group]


@pytest.mark.parametrize("damage", ["nibbles", "bias", "sign"])
def test_a_decode_with_an_error_is_not_what_the_format_says(monkeypatch, damage):
    """The twin: each part of the rule counts."""
    blocks = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 1, 16) + 0x21
    if damage == "bias":
        monkeypatch.setattr(module, "_BIAS", 128)
    elif damage == "sign":
        monkeypatch.setattr(module, "_E2M1", (*module._E2M1[:-1], 8.0))
    else:
        blocks = blocks >> 4 | blocks << 4
    plain = decoded(mxfp4(blocks, torch.full((1, 1, 1), 127, dtype=torch.uint8)), MXFP4)["x"].read()
    expected = by_hand([code + 0x21 for code in range(16)], 127)
    assert plain[0, :, 0].double().tolist() != expected


def test_fp8_by_hand():
    """3 x 3 in blocks of 2 x 2: the last row and column have blocks of their own."""
    numbers = torch.tensor([[1.0, -2.0, 0.5], [448.0, 0.0, 1.125], [-0.25, 3.0, 16.0]])
    factors = torch.tensor([[2.0, 0.5], [4.0, 0.25]])
    tensors = {"a.weight": held(numbers.to(torch.float8_e4m3fn)), "a.weight_scale_inv": held(factors)}
    plain = decoded(tensors, FP8)
    assert list(plain) == ["a.weight"]
    assert plain["a.weight"].dtype == "F32"
    expected = [[2.0, -4.0, 0.25], [896.0, 0.0, 0.5625], [-1.0, 12.0, 4.0]]
    assert plain["a.weight"].read().tolist() == expected


@pytest.mark.parametrize(
    ("tensors", "stored"),
    [
        ({"x_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8)}, MXFP4),
        (
            {
                "x_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8),
                "x_scales": torch.zeros(1, 3, 3, dtype=torch.uint8),
            },
            MXFP4,
        ),
        ({"x_blocks": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, FP8),
        (
            {
                "x_blocks": torch.zeros(4, 4).to(torch.float8_e4m3fn),
                "x_blocks_scale_inv": torch.ones(2, 1),
            },
            FP8,
        ),
    ],
)
def test_numbers_without_their_factors_are_refused(tensors, stored):
    with raises_fault("SF-CONVERT-LAYOUT", "x_blocks"):
        decoded({name: held(tensor) for name, tensor in tensors.items()}, stored)


@pytest.mark.parametrize(
    ("stored", "form"),
    [
        (MXFP4, "MXFP4"),
        (FP8, "FP8"),
        (FP8 | {"activation_scheme": "static"}, ""),
        (FP8 | {"weight_block_size": None}, ""),
        (FP8 | {"expert_dtype": "fp4"}, ""),
        ({"quant_method": "gptq"}, ""),
        (gptq(4), "GPTQ"),
        (gptq(8, desc_act=True), "GPTQ"),
        (gptq(3), ""),
        (gptq(4, checkpoint_format="marlin"), ""),
        ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, "AWQ"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ""),
        (CASES["packed-4"], "compressed-tensors"),
        (CASES["fp8"], "compressed-tensors"),
        (compressed("float-quantized", FLOAT, DYNAMIC | {"dynamic": False}), ""),  # a factor of the activations each
        (compressed("nvfp4-pack-quantized", FLOAT | {"num_bits": 4}), ""),
        (compressed("pack-quantized", integers(3, "channel")), ""),
        (CASES["packed-4"] | {"kv_cache_scheme": {"num_bits": 8}}, ""),
        (CASES["packed-4"] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ""),
        (None, ""),
    ],
)
def test_which_forms_are_read(stored, form):
    assert stored_form(stored) == form


@pytest.mark.parametrize(
    "stored",
    [
        compressed("float-quantized", FLOAT, DYNAMIC | {"dynamic": False}),
        compressed("nvfp4-pack-quantized", FLOAT | {"num_bits": 4}),
        compressed("pack-quantized", integers(3, "channel")),
        CASES["packed-4"] | {"kv_cache_scheme": {"num_bits": 8}},
        CASES["packed-4"] | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        CASES["packed-4"] | {"transform_config": {"config_groups": {}}},
        CASES["packed-4"] | {"config_groups": {"group_0": {}}},
        CASES["packed-4"] | {"config_groups": None},
    ],
)
def test_what_is_not_read_of_compressed_tensors_is_named(stored):
    assert obstacle(stored)
    assert not obstacle(CASES["packed-4"])
    assert not obstacle(gptq(3))  # its bits are named


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_loaded_as_transformers_decodes_it(gpt_oss, dtype):
    reference = AutoModelForCausalLM.from_pretrained(
        gpt_oss, quantization_config=Mxfp4Config(dequantize=True), dtype=dtype
    )
    assert_same(gpt_oss, reference, dtype)
    assert facts_of(gpt_oss).stored_form == "MXFP4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_loaded_as_transformers_decodes_it(fp8, dtype):
    config = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(fp8, quantization_config=config, dtype=dtype)
    assert_same(fp8, reference, dtype)


def assert_same(folder, reference, dtype):
    model = load_model(folder, dtype=dtype, attention_implementation="eager", device=CPU)
    theirs, ours = reference.state_dict(), model.state_dict()
    assert theirs.keys() == ours.keys()
    # What was not quantized transformers leaves in the file's type.
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor.to(ours[name].dtype), ours[name])] == []
    assert ours["model.layers.1.self_attn.o_proj.weight"].dtype == dtype


def test_what_is_saved_is_plain_and_loads_without_a_word_of_its_form(gpt_oss, tmp_path):
    model = load_model(gpt_oss, dtype=torch.float32, attention_implementation="eager", device=CPU)
    save_full(model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert getattr(again.config, "quantization_config", None) is None
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(name.endswith(("_blocks", "_scales")) for name in load_file(tmp_path / "model.safetensors"))


def test_a_file_without_its_factors_is_one_line(gpt_oss, tmp_path):
    for path in gpt_oss.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    factors = next(name for name in sorted(tensors) if name.endswith("_scales"))
    del tensors[factors]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises_fault("SF-CONVERT-LAYOUT", factors.replace("_scales", "_blocks")):
        load_model(tmp_path, dtype=torch.float32, attention_implementation="eager", device=CPU)
