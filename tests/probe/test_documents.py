"""The accuracy gate for packed documents: forms that are right pass and are timed, forms that are wrong do not."""

import pytest
import torch
from torch.nn import functional as F

from surefoot.kernels.documents import FORMS, documents_of
from surefoot.probe import documents as module
from surefoot.probe.attention import GATE
from surefoot.probe.documents import PADDED, document_trials, timed_lengths

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
    found = document_trials(
        forms, mix=(30, 20, 10), heads=2, kv_heads=1, head_dim=D, dtype=dtype, device=CPU, budget=0.0
    )
    return {trial.form: trial for trial in found}


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


def test_lengths_are_taken_from_all_of_the_mix():
    assert timed_lengths((10, 20)) == (20, 10) * 34  # about a thousand tokens, and as many of each
    assert timed_lengths((5000, 3000)) == (1024,)
    found = timed_lengths(tuple(range(100, 132)))
    assert 7 <= len(found) <= 10
    assert found == tuple(sorted(found, reverse=True))
