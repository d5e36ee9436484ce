"""NVFP4 and MXFP4: numbers of the formulas in float64, straight-through gradients, and what torchao computes."""

import copy

import pytest
import torch
from torch import nn

from surefoot.models import block_floats
from surefoot.models.block_floats import ROUND, BlockFloatLinear
from surefoot.planning.plan import QAT_BLOCKS

FORMS = list(QAT_BLOCKS)
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
EVEN = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])  # mantissa bit of each
FP32 = 3e-7  # three roundings of fp32 beside float64


def numbers(shape=(37, 64), dtype=torch.float32, seed=0):
    """Rows of very different sizes, a block of zeros, numbers halfway between two of the grid, and outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).exp() ** 2
    x[2, :32] = 0
    x[:, ::5] = (x[:, ::5] * 4).round() / 4
    x[3, 7] = 40
    return x.to(dtype)


def nearest(x):
    """e2m1 by search in the table: x in float64, at most 6."""
    distance = (x.abs()[..., None] - GRID).abs()
    least = distance.amin(-1, keepdim=True)
    tied = distance <= least * (1 + 1e-6) + 1e-9
    return GRID[(tied * (2 - EVEN)).argmax(-1)] * x.sign()


def reference(x, form):
    """The formulas of the module, in float64, with the scales as they are stored."""
    blocks = x.double().unflatten(-1, (-1, QAT_BLOCKS[form]))
    largest = blocks.abs().amax(-1, keepdim=True)
    if form == "nvfp4":
        whole = x.double().abs().max() / (6 * 448)
        scale = (largest / 6 / whole).clamp(2**-6, 448).to(torch.float8_e4m3fn).double() * whole
    else:
        scale = 2.0 ** torch.ceil(torch.log2(largest / 6)).clamp(min=-127)
    return (nearest((blocks / scale).clamp(-6, 6)) * scale).flatten(-2)


@pytest.mark.parametrize("form", FORMS)
def test_rounded_numbers_are_the_formulas(form):
    x = numbers()
    expected = reference(x, form)
    assert (ROUND[form](x).double() - expected).abs().max() <= FP32 * expected.abs().max()
    # The twin: blocks of the other size.
    other = reference(x, next(one for one in FORMS if one != form))
    assert (ROUND[form](x).double() - other).abs().max() > 1e-2 * expected.abs().max()


def test_halfway_goes_to_the_even_mantissa():
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert block_floats._e2m1(halfway).tolist() == expected
    assert block_floats._e2m1(-halfway).tolist() == [-one for one in expected]
    assert nearest(halfway.double()).tolist() == expected


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zeros_and_what_is_rounded_stays(form):
    assert torch.equal(ROUND[form](torch.zeros(4, 64)), torch.zeros(4, 64))
    once = ROUND["mxfp4"](numbers())
    assert torch.equal(ROUND["mxfp4"](once), once)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_product_of_rounded_numbers(form):
    linear = nn.Linear(64, 48)
    layer = BlockFloatLinear(linear, form)
    assert layer.weight is linear.weight
    x = numbers().requires_grad_()
    y = layer(x)
    seen, weight = ROUND[form](x.detach()), ROUND[form](linear.weight.detach())
    assert torch.equal(y, nn.functional.linear(seen, weight, linear.bias))
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(gradient)
    assert torch.equal(x.grad, gradient @ weight)
    assert torch.equal(layer.weight.grad, gradient.T @ seen)
    assert torch.allclose(layer.bias.grad, gradient.sum(0))
    assert not torch.equal(layer.weight.grad, gradient.T @ x.detach())  # the twin: of inputs that are not rounded


def torchao_rounds(x, form):
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor

    if form == "nvfp4":
        scale = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
        return nvfp4_tensor.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize()
    mode = mx_tensor.ScaleCalculationMode.RCEIL
    return mx_tensor.MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, mode).dequantize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_torchao_rounds_to_the_same_bits(form, dtype):
    pytest.importorskip("torchao", reason="make qat installs it")
    for seed in range(3):
        x = numbers((129, 256), dtype, seed)
        assert torch.equal(ROUND[form](x), torchao_rounds(x, form))
    assert not torch.equal(ROUND[form](x), torchao_rounds(x * 1.01, form))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_torchaos_layer_in_training_has_the_same_bits(autocast, bias):
    """Of mxfp4: torchao's layer of nvfp4 needs a GPU that multiplies 4-bit numbers."""
    pytest.importorskip("torchao", reason="make qat installs it")
    from torchao.prototype.qat import MXFakeQuantizeConfig
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    linear = nn.Linear(64, 48, bias).bfloat16()
    ours, config = BlockFloatLinear(copy.deepcopy(linear), "mxfp4"), MXFakeQuantizeConfig()
    theirs = nn.Sequential(linear)
    quantize_(theirs, QATConfig(activation_config=config, weight_config=config))
    found = []
    for layer in (ours, theirs):
        x = numbers(dtype=torch.bfloat16).view(1, 37, 64).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x)
        (y.float() ** 2).sum().backward()
        weight = ours.weight if layer is ours else theirs[0].weight
        found.append((y, x.grad, weight.grad))
    assert [torch.equal(a, b) for a, b in zip(*found, strict=True)] == [True, True, True]


def test_torchao_does_not_train_nvfp4_of_weights_alone():
    """The config that Axolotl 0.18 builds for its nvfp4."""
    pytest.importorskip("torchao", reason="make qat installs it")
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    with pytest.raises(ValueError, match="NVFP4WeightOnlyConfig"):
        quantize_(nn.Sequential(nn.Linear(32, 32)), QATConfig(NVFP4WeightOnlyConfig()))
