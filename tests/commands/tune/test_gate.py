"""Which numbers let a setting through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.commands.tune.gate import LOSS_GATE, NORM_GATE, Numbers, failure

WANTED = Numbers((2.0, 1.9, 1.8), (3.0, 2.9, 2.8))


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_within_the_gate_passes_and_beyond_it_does_not(compute):
    losses, norms = (2.0 * (1 + LOSS_GATE[compute] / 2), 1.9, 1.8), (3.0 * (1 - NORM_GATE[compute] / 2), 0.0, 0.0)
    assert failure(Numbers(losses, norms, compute), WANTED) == ""
    loss = Numbers((2.0, 1.9 * (1 + 2 * LOSS_GATE[compute]), 1.8), WANTED.grad_norms, compute)
    assert "the loss of step 2 is off" in failure(loss, WANTED)
    norm = Numbers(WANTED.losses, (3.0 * (1 + 2 * NORM_GATE[compute]), 2.9, 2.8), compute)
    assert "the gradient norm of step 1 is off" in failure(norm, WANTED)


def test_the_coarser_type_of_both_has_the_say():
    off = Numbers((2.0 * (1 + LOSS_GATE["bf16"] / 2), 1.9, 1.8), WANTED.grad_norms)
    assert failure(off, WANTED)
    assert failure(off, replace(WANTED, compute="bf16")) == ""


def test_later_steps_are_not_compared():
    assert failure(Numbers((2.0, 1.9, 9.0), (3.0, 9.0, 9.0)), WANTED) == ""


def test_what_is_not_finite_does_not_pass_unless_the_plain_path_is_not_either():
    broken = Numbers((None, 1.9, 1.8), WANTED.grad_norms)
    assert failure(broken, WANTED) == "the loss of step 1 is not finite"
    assert failure(broken, broken) == ""
