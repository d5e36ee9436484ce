"""Layers that round in training, against float64 and against what torchao converts them to."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from surefoot.models.load import load_model
from surefoot.models.qat import convert, emulate, not_rounded, round_weights, rounds, save_converted, unrounded

pytest.importorskip("torchao", reason="make qat installs it")

CPU = torch.device("cpu")
SCHEMES = [("int4", 8), ("int4", 32), ("int8-int4", 8), ("int8-int4", 32), ("int8", None)]
BLOCKS = [("nvfp4", 16), ("mxfp4", 32)]
BITS = {"int4": 4, "int8-int4": 4, "int8": 8}
# fp32 against float64: a product of 32 to 96 terms, and a scale.
FP32 = 2e-6
HALFWAY = 1e-4  # a number halfway between two integers may go to either


@pytest.fixture
def model(folder):
    return load_model(folder, dtype=torch.float32, attention_implementation="eager", device=CPU)


@pytest.fixture
def ids():
    return torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))


def grid(weight, group, bits):
    """Scales and exact places on the grid, in float64: [outputs, groups, weights of one]."""
    parts = weight.detach().double().reshape(weight.shape[0], -1, group or weight.shape[1])
    scale = parts.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    return scale, parts / scale


def rounded(weight, group, bits, like):
    """The float64 reference of w'. like: a layer's own w', which decides where a number stands halfway."""
    scale, exact = grid(weight, group, bits)
    integers = like.detach().double().reshape(exact.shape) / scale
    assert (integers - integers.round()).abs().max() < HALFWAY, "not on the grid"
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert integers.min() >= low - HALFWAY
    assert integers.max() <= high + HALFWAY
    nearest = (integers - exact.clamp(low, high)).abs()
    assert nearest.max() <= 0.5 + HALFWAY, "not the nearest number of the grid"
    return (integers.round() * scale).reshape(weight.shape)


def of_tokens(x):
    """Activations in int8 with a scale and a zero point for each token, in float64."""
    x = x.double()
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-128 - (low / scale).round()).clamp(-128, 127)
    return ((x / scale).round() + zero).clamp(-128, 127).sub(zero) * scale


@pytest.mark.parametrize(("to", "group"), SCHEMES)
def test_a_layer_is_the_float64_reference(model, to, group):
    layer = model.model.layers[1].mlp.gate_proj
    weight = layer.weight
    round_weights(model, to, group)
    layer = model.model.layers[1].mlp.gate_proj
    assert layer.weight is weight
    own = layer.weight_fake_quantizer(weight)
    reference = rounded(weight, group, BITS[to], own)
    assert (own.double() - reference).abs().max() <= FP32 * reference.abs().max()
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1))
    seen = of_tokens(x) if to == "int8-int4" else x.double()
    expected = seen @ reference.T
    assert (layer(x).double() - expected).abs().max() <= 4 * FP32 * expected.abs().max()
    # The twin: another size of groups is another grid.
    with pytest.raises(AssertionError):
        rounded(weight, 16 if group != 16 else 8, BITS[to], own)


@pytest.mark.parametrize(("to", "group"), SCHEMES)
def test_gradients_go_straight_through_where_nothing_was_clamped(model, to, group):
    round_weights(model, to, group)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1), requires_grad=True)
    layer(x).sum().backward()
    seen = of_tokens(x.detach()) if to == "int8-int4" else x.detach().double()
    bits = BITS[to]
    _, exact = grid(layer.weight, group, bits)
    inside = (exact.round() <= 2 ** (bits - 1) - 1).reshape(layer.weight.shape)
    expected = seen.sum(0).expand_as(layer.weight) * inside
    off = (layer.weight.grad.double() - expected).abs() > FP32 * 8 * expected.abs().max()
    halfway = ((exact - 2 ** (bits - 1) + 0.5).abs() < HALFWAY).reshape(layer.weight.shape)
    assert not (off & ~halfway).any()


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("to", "group"), SCHEMES + BLOCKS)
def test_what_is_converted_computes_the_same_bits(model, ids, to, group, compute):
    plain = logits_of(model, ids, compute)
    round_weights(model, to, group)
    trained = logits_of(model, ids, compute)
    assert not torch.equal(plain, trained)
    assert convert(model, to, group) == 14
    assert not any(map(rounds, model.modules()))
    assert torch.equal(trained, logits_of(model, ids, compute))


@pytest.mark.parametrize(("to", "group"), [("int4", 32), ("int8-int4", 8), *BLOCKS])
def test_without_rounding_the_layers_are_plain(model, ids, to, group):
    plain = logits_of(model, ids)
    round_weights(model, to, group)
    rounded = logits_of(model, ids)
    with unrounded(model):
        with unrounded(model):
            pass
        assert torch.equal(plain, logits_of(model, ids))
    assert torch.equal(rounded, logits_of(model, ids))


@pytest.mark.parametrize(("to", "group"), [("int4", 32), ("int8-int4", 8), ("int8", None)])
def test_a_conversion_with_other_groups_is_noticed(model, ids, to, group):
    round_weights(model, to, group)
    trained = logits_of(model, ids)
    convert(model, "int4", 16)
    assert not torch.equal(trained, logits_of(model, ids))


@pytest.mark.parametrize(("to", "group"), [("int4", 8), ("int8-int4", 32), ("int8", None), *BLOCKS])
def test_transformers_reads_what_was_converted(model, ids, to, group, tmp_path):
    round_weights(model, to, group)
    trained = logits_of(model, ids)
    convert(model, to, group)
    save_converted(model, to, group, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", use_safetensors=True)
    emulate(again, to)
    assert torch.equal(trained, logits_of(again.eval(), ids))
    assert [path.name for path in tmp_path.iterdir() if path.suffix in (".bin", ".pt", ".pth")] == []


def test_the_head_and_what_is_not_rounded(model):
    assert len(not_rounded(model)) == 14
    round_weights(model, "int4", 8)
    assert not_rounded(model) == []
    assert not rounds(model.lm_head)
    layer = model.model.layers[0]
    layer.mlp.up_proj = copy.deepcopy(layer.self_attn.q_proj).to_linear()
    assert not_rounded(model) == ["0.mlp.up_proj"]


def logits_of(model, ids, compute=torch.float32):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=compute == torch.bfloat16):
        return model(input_ids=ids, use_cache=False).logits
