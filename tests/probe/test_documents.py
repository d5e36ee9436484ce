"""The accuracy gate for packed documents: forms that are right pass and are timed, forms that are wrong do not."""

import pytest
import torch
from torch.nn import functional as F

from surefoot.kernels.documents import FORMS, documents_of
from surefoot.probe import documents as module
from surefoot.probe.attention import GATE
from surefoot.probe.documents import PADDED, DocumentsRequest, document_trials

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
    assert "is off by" in found["leaks"].failure
    assert found["leaks"].seconds == 0
    assert found["sdpa"].passed


def test_padded_rows_are_timed_with_the_math_kernel_where_the_usual_one_raises(monkeypatch):
    """As flash does in bf16 under ATEN_CPU_CAPABILITY=default on a CPU with AMX."""
    real = module._sdpa

    def failing(q, k, v):
        if torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")
        return real(q, k, v)

    monkeypatch.setattr(module, "_sdpa", failing)
    assert trials({"matmul": ours("matmul")})[PADDED].seconds > 0
