"""Triton's norms, turns and gates against float64: in its interpreter, compiled for GPUs that are not here, and on one.

Where Triton is not installed, all but the last of these say so and are skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from helpers import triton_cases
from helpers.triton_cases import BROKEN, Case, by_interpreter, has_triton, measured, names, said_with_triton
from surefoot.kernels import forms

with_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not installed (make test does)")
EXACT = 1e-12  # float64 in another order of sums; 3e-16 seen
# Error against float64 as a multiple of the plain path's, and an ulp or two where that one happens to be nearly exact.
NO_WORSE = 1.25
NEARLY = {"fp32": 2e-7, "fp16": 5e-5, "bf16": 4e-4}
# Triton 3.7's interpreter cuts numbers off where a GPU rounds them to bf16, three times in a row for a gate.
CUT = 6.0
SAME = 0.98  # of numbers in fp16 that are the plain path's: another order of sums moves one in some hundreds


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return {name: Case(**case) for name, case in by_interpreter("kernels", tmp_path_factory.mktemp("k")).items()}


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    return {name: Case(**case) for name, case in by_interpreter("broken", tmp_path_factory.mktemp("b")).items()}


def is_right(name: str, case: Case, *, rounds: bool) -> bool:
    """rounds: to bf16, as a GPU does."""
    dtype = next(one for one in ("fp64", "fp32", "fp16", "bf16") if one in name.split())
    if not case.types:
        return False
    if dtype == "fp64":
        return case.error < EXACT
    more = CUT if dtype == "bf16" and not rounds else NO_WORSE
    return case.error < more * case.plain + NEARLY[dtype] and (dtype != "fp16" or case.same > SAME)


@with_triton
@pytest.mark.parametrize("name", names())
def test_every_kernel_is_as_near_to_float64_as_the_plain_path(found, name):
    assert is_right(name, found[name], rounds=False), found[name]


@with_triton
@pytest.mark.parametrize("name", BROKEN)
def test_twin_one_line_that_is_wrong_is_seen(spoiled, name):
    assert not is_right(BROKEN[name][2], spoiled[name], rounds=False), spoiled[name]


@with_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus_that_are_not_here(capability, tmp_path):
    program = Path(triton_cases.__file__).with_name("triton_compiled.py")
    sizes = said_with_triton([str(program), str(capability)], TRITON_CACHE_DIR=str(tmp_path))
    assert len(sizes) == 7
    assert min(sizes.values()) > 1000  # bytes of machine code


def test_without_triton_there_is_no_arithmetic_of_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "surefoot.kernels.triton_pointwise", raising=False)
    assert forms.arithmetic_for("cpu") is forms.BLOCKS
    with pytest.raises(ImportError, match="triton"):
        forms.arithmetic_for("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    wrong = {
        name: case
        for name, case in measured(forms.triton_arithmetic(), "cuda").items()
        if not is_right(name, case, rounds=True)
    }
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_more_numbers_than_32_bits_count():
    """2^31 of them and some rows more, in bf16: 4 GiB for x, and as much again for y."""
    from surefoot.kernels.blocks import NormForm

    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free memory")
    by, form, width = forms.triton_arithmetic(), NormForm(1e-5, 0.0, narrow_first=True), 4096
    x = torch.ones(2**31 // width + 8, width, dtype=torch.bfloat16, device="cuda")
    x[-1].copy_(torch.linspace(-3, 3, width))
    weight = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    y, _ = by.norm_forward(x, weight, form)
    assert torch.equal(y[-1], by.norm_forward(x[-1:], weight, form)[0][0])
    assert torch.equal(y[0], y[-2])
