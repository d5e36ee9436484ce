"""The accuracy gate: forms that are right pass, forms that are wrong in one place do not. cuDNN's attention on a GPU:
where its gradients are not finite, the probe has to say so (PyTorch issue 196678)."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama.modeling_llama import eager_attention_forward

from helpers.faults import gives
from surefoot.planning.deterministic import with_deterministic
from surefoot.planning.measurements import times_of
from surefoot.planning.plan import DType
from surefoot.planning.probes import attention
from surefoot.planning.probes.attention import GATE, attention_trials, check, check_cases, eager, form_named
from surefoot.planning.probes.sizes import AttentionRequest

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cases():
    return {dtype: check_cases(2, 16, dtype, CPU) for dtype in ("fp32", "bf16", "fp16")}


def test_torchs_kernels_pass(cases):
    for form in ["flash", "math"]:
        for dtype in ["fp32", "bf16", "fp16"]:
            failure, errors = check(form_named(form, masked=False), cases[dtype], dtype)
            assert failure == ""
            assert set(errors) == {"output", "gradient of q", "gradient of k", "gradient of v"}
            assert all(0 < error < GATE[dtype] for error in errors.values())


def test_eager_passes_in_fp32_and_fails_in_bf16_where_far_logits_are_rounded(cases):
    assert check(eager, cases["fp32"], "fp32")[0] == ""
    failure, _ = check(eager, cases["bf16"], "bf16")
    assert "logits of -120" in failure
    assert check(eager, cases["bf16"][:1], "bf16")[0] == ""  # near logits are no trouble


def _half_gradient(q, k, v):
    out = form_named("flash", masked=False)(q, k, v)
    return out.detach() + (out - out.detach()) / 2


def _looks_ahead(q, k, v):
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _nan_gradient_far_below(q, k, v):
    """What the cuDNN kernel was seen to do: right output, NaN gradient of q, only with far logits."""
    far = (q.detach() @ k.detach().transpose(2, 3)).min() / q.shape[-1] ** 0.5 < -88.7
    return form_named("flash", masked=False)(_NanGradient.apply(q) if far else q, k, v)


class _NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def _refuses(q, k, v):
    raise RuntimeError("sm_20\nmore text")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (_half_gradient, ["gradient", "q", 0.5]),
        (_looks_ahead, ["output", f"{GATE['fp32']:.2g}"]),
        (_nan_gradient_far_below, ["gradient", "q", 704, -120]),  # so many tokens, with such logits
        (_refuses, ["sm_20"]),
    ],
)
def test_a_broken_form_is_found_and_the_failure_says_where(cases, form, says):
    failure = check(form, cases["fp32"], "fp32")[0]
    assert [value for value in says if not gives(failure, value)] == [], failure


def test_without_the_far_case_the_nan_would_be_missed(cases):
    assert check(_nan_gradient_far_below, cases["fp32"][:1], "fp32")[0] == ""


def test_eager_is_transformers_eager():
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.full((9, 9), torch.finfo(q.dtype).min).triu(1)[None, None]
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    theirs, _ = eager_attention_forward(module, q, k, v, mask, scaling=8**-0.5)
    torch.testing.assert_close(eager(q, k, v), theirs.transpose(1, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "masked", "heads"), [("mem_efficient", False, 4), ("flash", True, 4), ("flash", False, 2)]
)
def test_grouped_heads_are_handed_over_as_a_run_does(monkeypatch, name, masked, heads):
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setitem(attention._BACKEND, "mem_efficient", attention._BACKEND["math"])  # which a CPU has

    def sdpa(q, k, v, **named):
        seen.append((k.shape[1], named["enable_gqa"]))
        return real(q, k, v, **named)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", sdpa)
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(form_named(name, masked=masked)(q, k, v), eager(q, k, v), rtol=1e-5, atol=1e-6)
    assert seen == [(heads, heads == 2)]


def test_a_mask_tensor_gives_the_same_as_causality():
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    for name in ("flash", "math"):
        plain, masked = form_named(name, masked=False), form_named(name, masked=True)
        torch.testing.assert_close(plain(q, k, v), masked(q, k, v), rtol=1e-5, atol=1e-6)


def test_trials_time_what_passed_and_explain_what_did_not():
    trials = attention_trials(
        AttentionRequest(("flash", "eager", "mem_efficient"), 4, 2, 16, 64, "bf16", "cpu"), budget=0.05
    )
    found = {trial.form: trial for trial in trials}
    assert found["flash"].passed
    assert found["flash"].seconds > 0
    assert "logits of -120" in found["eager"].failure
    assert found["mem_efficient"].failure.startswith("cannot run:")
    assert found["eager"].seconds == found["mem_efficient"].seconds == 0


@pytest.mark.parametrize(
    ("length", "heads", "says"),
    [
        (64, 4, ""),
        (64, 8, "at 4 of 8 heads"),
        (1100, 4, "at 1024 of 1100 tokens"),
        (1100, 8, "at 1024 of 1100 tokens and 4 of 8 heads"),
    ],
)
def test_a_trial_says_what_it_was_timed_at_and_that_is_what_was_computed(monkeypatch, length, heads, says):
    shapes = set()
    real = attention.forward_backward
    monkeypatch.setattr(
        attention, "forward_backward", lambda form, given: shapes.add(tuple(given[0].shape)) or real(form, given)
    )
    (trial,) = attention_trials(AttentionRequest(("math",), heads, 2, 8, length, "fp32", "cpu"), budget=0.0)
    assert trial.timed == says
    [timed] = [shape for shape in shapes if shape[2] not in (333, 704)]
    assert timed[1:3] == (4, min(length, 1024))
    reason = times_of([trial])
    assert says in reason
    assert ("at" in reason.split()) == bool(says)


def test_random_state_and_kernel_switches_are_left_as_they_were():
    state = torch.get_rng_state()
    attention_trials(AttentionRequest(("math",), 2, 2, 8, 32, "fp32", "cpu"), budget=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize(
    ("name", "masks", "found"), [("cudnn", True, True), ("cudnn", False, False), ("flash", True, False)]
)
def test_a_fault_that_needs_a_mask_tensor_is_looked_for_in_cudnn(cases, monkeypatch, name, masks, found):
    """Its NaN came only with a mask, which texts alone never give it in training."""
    right = form_named("flash", masked=False)
    monkeypatch.setattr(
        attention, "form_named", lambda name, *, masked, window: _nan_gradient_far_below if masked else right
    )
    request = AttentionRequest((name,), 2, 1, 16, 64, "fp32", "cpu", masks=masks)
    assert bool(attention._checked(name, cases["fp32"], request)[0]) is found


def windowed(q, k, v, window):
    """The textbook formula again, row by row."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    rows = []
    for place in range(q.shape[2]):
        seen = slice(max(0, place - window + 1), place + 1)
        weights = (q[:, :, place, None] @ k[:, :, seen].transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
        rows.append(weights @ v[:, :, seen])
    return torch.cat(rows, dim=2)


@pytest.mark.parametrize("name", ["flash", "math", "eager"])
def test_a_window_is_the_tokens_that_a_query_sees_its_own_among_them(name):
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    found = form_named(name, masked=True, window=3)(q, k, v)
    torch.testing.assert_close(found, windowed(q, k, v, 3), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, windowed(q, k, v, 4), rtol=1e-3)


@pytest.mark.parametrize(("window", "masked"), [(None, False), (200, True)])
def test_a_windowed_model_is_checked_and_timed_with_its_mask(monkeypatch, window, masked):
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def sdpa(q, k, v, **named):
        seen.append((q.shape[2], named["attn_mask"] is not None))
        return real(q, k, v, **named)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", sdpa)
    (trial,) = attention_trials(AttentionRequest(("flash",), 4, 2, 16, 256, "fp32", "cpu", window), budget=0.01)
    assert trial.passed
    assert set(seen) == {(length, masked) for length in (333, 704, 256)}


def test_a_form_that_forgets_the_window_does_not_pass():
    cases = check_cases(2, 16, "fp32", CPU, 200)
    failure = check(form_named("flash", masked=False), cases, "fp32")[0]
    assert gives(failure, "output")
    assert gives(failure, f"{GATE['fp32']:.2g}")
    assert check(form_named("flash", masked=True, window=200), cases, "fp32")[0] == ""


@pytest.mark.parametrize(("what", "lost"), [("random_inputs", "cannot be timed"), ("check_cases", "cannot be checked")])
def test_memory_that_ends_where_inputs_are_made_says_nothing_of_the_forms(monkeypatch, what, lost):
    """Of 640 tokens; both checks have other numbers of them."""
    real = getattr(attention, what)

    def make(*given, **named):
        if what == "check_cases" or given[3] == 640:
            raise torch.OutOfMemoryError("OOM\nmore")
        return real(*given, **named)

    monkeypatch.setattr(attention, what, make)
    found = attention_trials(AttentionRequest(("flash", "math"), 2, 1, 8, 640, "fp32", "cpu"), budget=0.0)
    assert [(one.failure, one.untimed) for one in found] == [("", f"{lost}: OOM")] * 2


FORMS = tuple(with_deterministic(["flash"]))
TWICE = AttentionRequest(FORMS, 4, 2, 16, 64, "fp32", "cpu")


def test_a_deterministic_form_that_is_not_does_not_pass(monkeypatch):
    assert [one.trouble for one in attention_trials(TWICE, budget=0.01)] == ["", ""]
    draws = torch.Generator().manual_seed(0)

    def unsteady(form):
        def attention(q, k, v):
            return form(q, k, v) * (1 + 1e-6 * torch.rand((), generator=draws))

        return attention

    monkeypatch.setattr(attention, "deterministic", unsteady)
    first, second = attention_trials(TWICE, budget=0.01)
    assert first.passed
    assert all(gives(second.failure, one) for one in ("output", "q", "k", "v"))


def test_one_that_finds_no_memory_to_be_repeated_is_not_called_wrong(monkeypatch):
    real, passes = attention.repeat, []

    def full(makers, checked, untimed):
        def make():
            passes.append(1)
            raise torch.OutOfMemoryError("OOM")

        real({name: lambda: make for name in makers}, checked, untimed)

    monkeypatch.setattr(attention, "repeat", full)
    first, second = attention_trials(TWICE, budget=0.01)
    assert first.passed
    assert second.failure == ""
    assert gives(second.untimed, "OOM")
    assert len(passes) == 1


def test_an_error_in_a_deterministic_forms_backward_pass_leaves_the_switch_off():
    def broken(q, k, v):
        out = form_named("flash", masked=False)(_Failing.apply(q), k, v)
        torch._C._set_deterministic_algorithms(True, warn_only=False)  # as the hook before the kernel does
        return out

    assert check(broken, check_cases(2, 16, "fp32", CPU)[:1], "fp32")[0]
    assert not torch.are_deterministic_algorithms_enabled()


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("not on this GPU")  # as packages say what they do not support


FAR = 120.0  # logits of -FAR everywhere: beyond -88.7, the logarithm of the smallest normal number of fp32
LENGTHS = (64, 192, 704)  # each leaves 64 modulo 128


def gradients_are_finite(dtype: torch.dtype, length: int) -> bool:
    """By torch alone. Raises RuntimeError where cuDNN does not take these shapes."""
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(1, 4, length, 64, device="cuda", dtype=dtype) for _ in range(4))
    shift = (FAR * 64**0.5) ** 0.5
    q[..., 0], k[..., 0] = shift, -shift
    inputs = [one.requires_grad_() for one in (q, k, v)]
    mask = torch.ones(length, length, device="cuda", dtype=torch.bool).tril()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    return all(torch.isfinite(one).all() for one in torch.autograd.grad(output, inputs, gradient))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_cudnn_is_found_out_where_its_gradients_are_not_finite(dtype: DType) -> None:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    try:
        finite = all(gradients_are_finite(kind, length) for length in LENGTHS)
    except RuntimeError as error:
        pytest.skip(f"cuDNN does not run here: {error}")
    (trial,) = attention_trials(AttentionRequest(("cudnn",), 4, 4, 64, 704, dtype, "cuda", masks=True))
    if not finite:
        assert "not finite" in trial.failure
