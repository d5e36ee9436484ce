"""A layer in int8 against float64, beside LLM.int8() as bitsandbytes computes it, whose activations are rounded too."""

import copy

import pytest
import torch
from torch import nn

from surefoot.models import int8
from surefoot.models.int8 import Int8Linear
from surefoot.system.libraries import import_bitsandbytes

CPU = torch.device("cpu")
IN, OUT, OUTLIER = 96, 40, 6.0  # the paper's threshold
# An fp32 product of 96 terms against float64.
FP32 = 1e-5
# bitsandbytes takes fp16 activations and writes 1 / 127² with seven digits.
LLM_INT8 = 2e-3
# What rounding activations to 8 bits changes at the least.
ROUNDED = 2e-3


@pytest.fixture
def linear():
    torch.manual_seed(0)
    made = nn.Linear(IN, OUT)
    made.weight.data[7] = 0  # a row of zeros has the scale 0
    return made


@pytest.fixture
def tokens():
    """[12, IN]; the last token has outliers in two columns."""
    made = torch.randn(12, IN, generator=torch.Generator().manual_seed(1)).clamp(-4, 4)
    made[-1, 3], made[-1, 50] = 40.0, -25.0
    return made


def codes_of(linear):
    """[OUT, IN] whole numbers and [OUT] scales, in float64; a number halfway between two may go to either."""
    weight = linear.weight.detach().half().double()
    scale = weight.abs().amax(1)
    exact = torch.nan_to_num(weight * 127 / scale[:, None])
    codes = Int8Linear(copy.deepcopy(linear), CPU).weight.data.double()
    assert (codes - exact).abs().max() < 0.5 + 1e-4
    return codes, scale


def whole(linear, x):
    """x times the dequantized weight, in float64."""
    codes, scale = codes_of(linear)
    return x.double() @ (codes * scale[:, None] / 127).T + linear.bias.detach().double()


def llm_int8(linear, x):
    """Dettmers et al. 2022, in float64: columns with an outlier apart, the rest as products of 8-bit numbers."""
    codes, scale = codes_of(linear)
    x = x.half().double()
    apart = (x.abs() >= OUTLIER).any(0)
    inside = torch.where(x.abs() >= OUTLIER, 0, x)
    largest = inside.abs().amax(1, keepdim=True)
    rounded = torch.round(inside * 127 / largest)
    rounded[:, apart] = 0
    product = (rounded @ codes.T) * (largest * scale) / 127**2
    return product + x[:, apart] @ (codes * scale[:, None] / 127)[:, apart].T + linear.bias.detach().double()


def bitsandbytes_own(linear):
    library = import_bitsandbytes()
    made = library.nn.Linear8bitLt(IN, OUT, has_fp16_weights=False, threshold=OUTLIER)
    made.weight = library.nn.Int8Params(linear.weight.data.clone(), requires_grad=False).to("cpu")
    made.bias = linear.bias
    return made


def error(found, wanted):
    return float((found.detach().double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("training", [True, False])
def test_the_product_is_that_of_the_dequantized_weight_in_training_and_evaluation(linear, tokens, training):
    layer = Int8Linear(copy.deepcopy(linear), CPU).train(training)
    assert error(layer(tokens), whole(linear, tokens)) < FP32
    assert error(linear(tokens), whole(linear, tokens)) > ROUNDED  # twin: the weights as they were


def test_it_is_what_bitsandbytes_trains_with_on_a_cpu_and_not_what_it_evaluates_with(linear, tokens):
    ours, own = Int8Linear(copy.deepcopy(linear), CPU), bitsandbytes_own(linear)
    assert torch.equal(ours(tokens), own.train()(tokens))
    assert error(own.eval()(tokens), whole(linear, tokens)) > ROUNDED
    if multiplies_bytes_exactly():
        assert error(own(tokens), llm_int8(linear, tokens)) < LLM_INT8


def multiplies_bytes_exactly():
    """Without VNNI, oneDNN adds products of bytes up in 16 bits, where they overflow."""
    most = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(most, most) == 64 * 127**2).all())


def test_a_token_has_the_same_numbers_beside_any_others(linear, tokens):
    """LLM.int8() takes the outlier's columns of all tokens apart, so the others are rounded differently."""
    ours, own = Int8Linear(copy.deepcopy(linear), CPU), bitsandbytes_own(linear).eval()
    assert error(ours(tokens)[:11], ours(tokens[:11]).detach().double()) < FP32
    assert error(own(tokens)[:11], own(tokens[:11]).detach().double()) > FP32


def test_the_gradient_is_that_of_the_dequantized_weight(linear, tokens):
    found, wanted = tokens.clone().requires_grad_(), tokens.double().requires_grad_()
    Int8Linear(copy.deepcopy(linear), CPU)(found).square().sum().backward()
    whole(linear, wanted).square().sum().backward()
    assert error(found.grad, wanted.grad) < FP32


def test_twin_another_scale_would_be_noticed(linear, tokens, monkeypatch):
    monkeypatch.setattr(int8, "_LARGEST", 128)
    with pytest.raises(AssertionError):
        test_the_gradient_is_that_of_the_dequantized_weight(linear, tokens)


def test_nothing_of_16_bits_or_more_is_kept_for_the_backward_pass(tokens):
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    layer = Int8Linear(nn.Linear(IN, 4000, bias=False), CPU)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(tokens.requires_grad_())
    assert sum(one.nbytes for one in kept) == IN * 4000 + 4 * 4000


def test_under_autocast_it_computes_in_its_type(linear, tokens):
    layer = Int8Linear(copy.deepcopy(linear), CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(tokens).dtype == linear(tokens).dtype == torch.bfloat16


def test_a_copy_has_its_own_codes_once(linear, tokens):
    layer = Int8Linear(copy.deepcopy(linear), CPU)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(tokens), layer(tokens))
    assert copied.weight.data_ptr() != layer.weight.data_ptr()
    assert copied.weight.CB is None
