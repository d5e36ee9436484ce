"""Each form against the textbook formula in float64: output and gradients, short and long documents, grouped heads."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import stand_in_kernels
from surefoot.kernels import packed_attention as documents
from surefoot.kernels.packed_attention import FORMS, SHORT, documents_of, plain
from surefoot.system.deterministic import deterministic_attention
from surefoot.system.hardware import ATTENTION_PACKAGES

CPU = torch.device("cpu")
HEADS, WIDTH = 6, 16
SCALE = 0.25
LENGTHS = (SHORT + 30, 100, 3, 1, SHORT, SHORT + 1, 64)
# Relative error of sums of up to 542 products: units in the last place of the type, times a few.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 4 * 2.0**-8}


def inputs(dtype, kv_heads=2, lengths=LENGTHS, seed=0):
    """q, k, v as a projection leaves them, token by token in memory, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    made = [torch.randn(1, tokens, heads, WIDTH, generator=generator) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    q, k, v, gradient = (tensor.to(dtype).transpose(1, 2) for tensor in made)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()], gradient


def run(form, qkv, gradient, lengths=LENGTHS, scale=SCALE):
    output = form(*qkv, documents_of(lengths, CPU), scale)
    return [output.detach(), *torch.autograd.grad(output, qkv, gradient)]


def in_double(qkv, gradient):
    return [tensor.detach().double().requires_grad_() for tensor in qkv], gradient.double()


def worst(found, wanted):
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["matmul", "sdpa"])
def test_a_form_is_the_formula(name, dtype, kv_heads):
    given = inputs(dtype, kv_heads)
    assert worst(run(FORMS[name], *given), run(plain, *in_double(*given))) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["matmul", "sdpa"])
def test_inputs_may_lie_transposed_in_memory(name):
    qkv, gradient = inputs(torch.float32)
    turned = [one.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for one in qkv]
    assert turned[0].stride(-1) != 1
    wanted = run(plain, *in_double(qkv, gradient))
    assert worst(run(FORMS[name], turned, gradient), wanted) < TOLERANCE[torch.float32]


def test_the_formula_by_hand():
    """Two documents of two tokens, one head of one number: every softmax is of at most two numbers."""
    q, k, v = ([2.0, 1.0, 3.0, -1.0], [1.0, 0.5, 2.0, 1.0], [10.0, 20.0, 30.0, 40.0])
    found = plain(*(torch.tensor(one).view(1, 1, 4, 1) for one in (q, k, v)), documents_of((2, 2), CPU), 0.5)
    second = (math.exp(0.5) * 10 + math.exp(0.25) * 20) / (math.exp(0.5) + math.exp(0.25))
    fourth = (math.exp(-1.0) * 30 + math.exp(-0.5) * 40) / (math.exp(-1.0) + math.exp(-0.5))
    assert found.flatten().tolist() == pytest.approx([10.0, second, 30.0, fourth])


@pytest.mark.parametrize("name", ["matmul", "sdpa"])
def test_gradients_are_those_of_finite_differences(name):
    lengths = (3, 1, 4)
    qkv, _ = inputs(torch.float64, lengths=lengths)
    found = documents_of(lengths, CPU)
    assert torch.autograd.gradcheck(lambda q, k, v: FORMS[name](q, k, v, found, SCALE), qkv, fast_mode=True)


@pytest.mark.parametrize("name", ["matmul", "sdpa"])
def test_no_document_feels_another(name):
    (q, k, v), gradient = inputs(torch.float32)
    other = [tensor.detach().clone() for tensor in (q, k, v)]
    begin, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    for tensor in other:
        tensor[:, :, begin:end] *= 1000  # the second document
    pairs = zip(
        run(FORMS[name], [q, k, v], gradient),
        run(FORMS[name], [tensor.requires_grad_() for tensor in other], gradient),
        strict=True,
    )
    for one, two in pairs:
        assert not torch.equal(one[:, :, begin:end], two[:, :, begin:end])
        assert torch.equal(one[:, :, :begin], two[:, :, :begin])
        assert torch.equal(one[:, :, end:], two[:, :, end:])


TWINS = {
    "one document": lambda q, k, v, found, scale: documents.sdpa(
        q, k, v, documents_of([sum(found.lengths)], CPU), scale
    ),
    "another scale": lambda q, k, v, found, scale: documents.matmul(q, k, v, found, 1.01 * scale),
    "half the gradient": lambda *given: documents.matmul(*given).detach() / 2 + documents.matmul(*given) / 2,
}


@pytest.mark.parametrize("twin", TWINS)
def test_twins_are_far_off(twin):
    given = inputs(torch.float32)
    assert worst(run(TWINS[twin], *given), run(plain, *in_double(*given))) > 1000 * TOLERANCE[torch.float32]


def _unmasked(queries, keys, sums, scale):
    """Of documents without anything behind them."""
    return (queries @ keys.transpose(1, 2) * scale - sums.unsqueeze(2)).exp()


def test_twin_a_backward_pass_that_sees_the_future_is_far_off(monkeypatch):
    given = inputs(torch.float32)
    wanted = run(plain, *in_double(*given))
    monkeypatch.setattr(documents, "_probabilities", _unmasked)
    assert worst(run(FORMS["matmul"], *given)[1:], wanted[1:]) > 1000 * TOLERANCE[torch.float32]


class _Products(TorchDispatchMode):
    """The shapes of batched products."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, given=(), named=None):
        if function is torch.ops.aten.bmm.default:
            self.seen.add((given[0].dtype, *(tuple(one.shape) for one in given)))
        return function(*given, **(named or {}))


def _products_of(lengths):
    qkv, gradient = inputs(torch.bfloat16, lengths=lengths)
    with _Products() as products:
        run(FORMS["matmul"], qkv, gradient, lengths)
    return products.seen


NEIGHBORS = (70, 75, 81, 90, 96)  # two and a bit to three times 32 tokens


def test_lengths_that_are_alike_share_their_products():
    assert _products_of(NEIGHBORS) == _products_of((96,))


def test_twin_each_length_for_itself_has_products_of_its_own(monkeypatch):
    monkeypatch.setattr(documents, "round_up_tokens", lambda tokens, dtype, device: tokens)
    assert len(_products_of(NEIGHBORS)) == len(NEIGHBORS) * len(_products_of((96,)))


def test_nothing_as_large_as_tokens_times_tokens_is_kept():
    qkv, _ = inputs(torch.bfloat16, lengths=(SHORT,) * 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda one: one
    ):
        FORMS["matmul"](*qkv, documents_of((SHORT,) * 4, CPU), SCALE)
    assert sum(kept) == sum(tensor.numel() for tensor in qkv) + HEADS * 4 * SHORT


def test_how_products_of_fp32_are_computed_elsewhere_stays_as_it_was():
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    _products_of((40,))
    assert setting.fp32_precision == before


def test_logits_far_from_zero_are_kept_in_fp32():
    """In bf16 a logit of -120 is a multiple of one half."""
    lengths = (100, 30)
    (q, k, v), gradient = inputs(torch.bfloat16, lengths=lengths)
    shift = math.sqrt(120 / SCALE)
    with torch.no_grad():
        q[..., 0], k[..., 0] = shift, -shift
    given = [q, k, v], gradient
    error = worst(run(FORMS["matmul"], *given, lengths), run(plain, *in_double(*given), lengths))
    assert error < 16 * 2.0**-8


def test_autocast_does_not_reach_inside():
    given = inputs(torch.float32)
    wanted = run(FORMS["matmul"], *given)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(FORMS["matmul"], *given)
    short = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    assert torch.equal(found[0][:, :, short], wanted[0][:, :, short])


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Called with a form and a kind of package, which is there until the test ends."""

    def install(form, kind):
        monkeypatch.syspath_prepend(stand_in_kernels.install(form, tmp_path, kind))
        return FORMS[form]

    before = set(sys.modules)
    yield install
    for name in set(sys.modules) - before:
        if name.startswith("flash_attn"):
            del sys.modules[name]


@pytest.mark.parametrize("form", ATTENTION_PACKAGES)
def test_a_package_gets_what_its_function_asks_for(installed, form):
    qkv, gradient = inputs(torch.bfloat16)
    found = run(installed(form, "right"), qkv, gradient)
    assert worst(found, run(plain, *in_double(qkv, gradient))) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("form", ATTENTION_PACKAGES)
def test_a_package_is_told_whether_gradients_are_to_be_the_same_each_time(installed, form):
    attend, (qkv, gradient) = installed(form, "right"), inputs(torch.bfloat16)
    with deterministic_attention():
        run(attend, qkv, gradient)
    run(attend, qkv, gradient)
    assert sys.modules[ATTENTION_PACKAGES[form]].asked == [True, False]


def test_twin_a_package_that_scales_otherwise_is_far_off(installed):
    qkv, gradient = inputs(torch.bfloat16)
    found = run(installed("flash_attn_3", "wrong"), qkv, gradient)
    assert worst(found, run(plain, *in_double(qkv, gradient))) > TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kind", ["cannot be imported", "without the function"])
def test_a_package_that_is_broken_fails_as_a_kernel_does(installed, kind):
    with pytest.raises(RuntimeError, match="flash_attn_interface"):
        run(installed("flash_attn_3", kind), *inputs(torch.bfloat16))


def test_a_kernel_without_a_word_for_grouped_heads_is_not_given_one():
    """torch 2.10 and 2.11: their kernel takes fewer key heads as they come."""
    (q, k, _), _ = inputs(torch.bfloat16)
    assert documents._grouped(lambda query, key: None, q, k) == {}
    grouped = documents._grouped(lambda query, key, enable_gqa=False: None, q, k)
    assert grouped == {"enable_gqa": q.shape[1] != k.shape[1]}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_kernel_for_the_row_on_a_gpu():
    qkv, gradient = inputs(torch.bfloat16)
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in qkv]
    output = FORMS["varlen"](*on_gpu, documents_of(LENGTHS, torch.device("cuda")), SCALE)
    found = [output.detach().cpu(), *(one.cpu() for one in torch.autograd.grad(output, on_gpu, gradient.cuda()))]
    assert worst(found, run(plain, *in_double(qkv, gradient))) < TOLERANCE[torch.bfloat16]
