"""The accuracy gate for packed documents: forms that are right pass and are timed, forms that are wrong do not."""

import pytest
import torch
from torch.nn import functional as F

from helpers.faults import gives
from surefoot.kernels.packed_attention import FORMS, documents_of
from surefoot.planning.measurements import PADDED
from surefoot.planning.probes import documents as module
from surefoot.planning.probes.attention import GATE
from surefoot.planning.probes.documents import DocumentsRequest, document_trials
from surefoot.planning.probes.timing import LIMITS

CPU = torch.device("cpu")
D = 16


def ours(name):
    def of(lengths):
        found = documents_of(lengths, CPU)
        return lambda q, k, v: FORMS[name](q, k, v, found, D**-0.5)

    return of


def leaks(lengths):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def trials(forms, dtype="fp32"):
    request = DocumentsRequest((*forms, PADDED), (30, 20, 10), 2, 1, D, dtype, "cpu")
    return {trial.form: trial for trial in document_trials(request, forms, budget=0.0)}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_our_forms_pass_and_are_timed_beside_padded_rows(dtype):
    found = trials({name: ours(name) for name in ("matmul", "sdpa")}, dtype)
    assert list(found) == ["matmul", "sdpa", PADDED]
    assert all(trial.passed and trial.seconds > 0 for trial in found.values())
    assert all(0 < error < GATE[dtype] for name in ("matmul", "sdpa") for error in found[name].errors.values())


def test_twin_that_lets_documents_see_each_other_is_not_timed():
    found = trials({"leaks": leaks, "sdpa": ours("sdpa")})
    assert gives(found["leaks"].failure, f"{GATE['fp32']:.2g}")
    assert found["leaks"].seconds == 0
    assert found["sdpa"].passed


def test_padded_rows_are_timed_with_the_math_kernel_where_the_usual_one_raises(monkeypatch):
    """As flash does in bf16 under ATEN_CPU_CAPABILITY=default on a CPU with AMX."""
    real = module.F.scaled_dot_product_attention

    def failing(*given, **named):
        if torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")
        return real(*given, **named)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", failing)
    assert trials({})[PADDED].seconds > 0


def test_padded_rows_are_timed_without_cudnn_which_they_do_not_take(monkeypatch):
    real, seen = module.F.scaled_dot_product_attention, []

    def spying(*given, **named):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        return real(*given, **named)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", spying)
    trials({})
    assert set(seen) == {(False, True)}


@pytest.mark.parametrize(
    ("mix", "says"),
    [(tuple(range(100, 132)), ""), ((*range(100, 131), 2000), "at 1024 of 2000 tokens")],
    ids=["taken at even distances", "cut"],
)
def test_documents_that_were_left_out_are_not_cut_ones(mix, says):
    """Of these at even distances, the longest is none."""
    (padded,) = document_trials(DocumentsRequest((PADDED,), mix, 2, 1, D, "fp32", "cpu"), {}, budget=0.0)
    assert padded.timed == says


@pytest.mark.parametrize(("lost", "left"), [("sdpa", PADDED), (PADDED, "sdpa")])
def test_memory_that_ends_where_inputs_are_made_is_no_fault_of_the_form(monkeypatch, lost, left):
    """Documents of 30, 20 and 10 tokens: packed a row of 60, padded two rows of 30 and one of 10."""
    real, shape = module.random_inputs, (1, 60) if lost == "sdpa" else (2, 30)

    def make(rows, groups, kv_heads, tokens, *rest, **named):
        if (rows, tokens) == shape:
            raise torch.OutOfMemoryError("OOM\nmore")
        return real(rows, groups, kv_heads, tokens, *rest, **named)

    monkeypatch.setattr(module, "random_inputs", make)
    request = DocumentsRequest(("sdpa", PADDED), (30, 20, 10), 4, 1, D, "fp32", "cpu", tokens=60)
    gpu = {"limits": LIMITS["cuda"], "free": 2**30}
    found = {trial.form: trial for trial in document_trials(request, {"sdpa": ours("sdpa")}, **gpu, budget=0.0)}
    assert found[lost].failure == ""
    assert found[lost].untimed.endswith(": OOM")
    assert found[left].passed


def test_memory_that_ends_in_the_check_fails_that_form_alone(monkeypatch):
    """One that could not be checked is not packed with."""
    real = module.in_float64
    turns = iter([True])

    def in_float64(form, inputs):
        if next(turns, False):
            raise torch.OutOfMemoryError("OOM\nmore")
        return real(form, inputs)

    monkeypatch.setattr(module, "in_float64", in_float64)
    found = trials({"matmul": ours("matmul"), "sdpa": ours("sdpa")})
    assert found["matmul"].failure.endswith(": OOM")
    assert found["sdpa"].passed
