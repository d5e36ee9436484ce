"""Whole models, a probe and a run with Triton's kernels, in its interpreter. Where Triton is not installed, skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import triton_cases
from helpers.triton_cases import by_interpreter, has_triton

pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed (make test does)")
PROGRAM = Path(triton_cases.__file__).with_name("triton_models.py")
# norms, attention layers and gates of 2 layers; Gemma's gates are no SwiGLU
FOUND = {"llama3": (5, 2, 2), "qwen2": (5, 2, 2), "gemma2": (9, 2, 0), "mistral": (5, 2, 2), "phi3": (5, 2, 2)}
FP32 = 5e-6  # of the norm of all gradients; 4.8e-7 seen
NO_WORSE = 1.15  # error against float64 in fp16, as a multiple of the plain path's; up to 1.03 seen


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    return by_interpreter("models", tmp_path_factory.mktemp("models"), PROGRAM)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return by_interpreter("run", tmp_path_factory.mktemp("run"), PROGRAM)


@pytest.mark.parametrize("family", FOUND)
def test_every_family_learns_the_same(learned, family):
    found = learned[family]
    assert (found["patched"], found["gates"]) == (sum(FOUND[family]), FOUND[family][2])
    assert 0 < found["fp32"] < FP32
    assert found["fp16"] < NO_WORSE * found["plain_fp16"]
    assert found["broken"] > 1e4 * FP32  # twin


@pytest.mark.parametrize("family", FOUND)
def test_taken_out_or_computed_again_the_bits_are_the_same(learned, family):
    assert [learned[family][name] for name in ("undone", "left", "again")] == [0, 0, 0]


def test_the_probe_passes_what_is_right_and_nothing_else(ran):
    assert ran["probed"]["right"] == {"norm": "", "rotary": "", "gate": ""}
    wrong = ran["probed"]["wrong"]
    assert (wrong["norm"], wrong["rotary"]) == ("", "")
    assert "the output is off by" in wrong["gate"]


def test_a_run_is_compared_before_step_1_and_records_which_form_it_has(ran):
    plain, fused = ran["recorded"]["plain"], ran["recorded"]["fused"]
    assert plain["path"] is None
    assert fused["path"]["used"]
    assert 0 < fused["path"]["differs"]["gradient"] < fused["path"]["limits"]["gradient"]
    assert fused["path"]["form"].startswith("triton 3")
    assert fused["losses"] == pytest.approx(plain["losses"], rel=1e-5)
