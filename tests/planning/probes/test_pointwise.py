"""The accuracy gate for norms and turns: ours pass and are timed, wrong ones do not and are not."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers.faults import gives
from surefoot.planning.measurements import PointwiseSizes
from surefoot.planning.probes.attention import GATE
from surefoot.planning.probes.pointwise import PointwiseRequest, pointwise_trials
from surefoot.runs.kernel_probes import pointwise_ways

CPU = torch.device("cpu")


def trials(dtype="fp32", *, norm=None, turn=None):
    """norm, turn: in place of ours."""
    ways = pointwise_ways()
    if norm:
        ways = replace(ways, norms=[(plain, norm(ours)) for plain, ours in ways.norms])
    if turn:
        ways = replace(ways, turn=(ways.turn[0], turn(ways.turn[1])))
    request = PointwiseRequest(("norm", "rotary"), PointwiseSizes(96, 4, 24), dtype, "cpu")
    found = pointwise_trials(request, ways, budget=0.0)
    return {trial.part: trial for trial in found}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_ours_pass_and_are_timed_beside_the_plain_ones(dtype):
    found = trials(dtype)
    assert list(found) == ["norm", "rotary"]
    for trial in found.values():
        assert not trial.failure
        assert min(trial.plain, trial.fused) > 0
        assert all(0 < error < GATE[dtype] for error in trial.errors.values())


def test_twin_a_norm_without_its_eps_is_not_timed():
    """It shows in the smallest rows alone."""

    def without(ours):
        form = replace(ours.keywords["form"], eps=1e-12)
        return partial(ours.func, form=form)

    found = trials(norm=without)
    assert gives(found["norm"].failure, f"{GATE['fp32']:.2g}")
    assert gives(found["norm"].failure, 0.001)  # the size of the numbers in those rows
    assert found["norm"].fused == 0
    assert not found["rotary"].failure


def test_twin_a_turn_the_other_way_is_not_timed():
    found = trials(turn=lambda ours: lambda x, cos, sin: ours(x, cos, -sin))
    assert gives(found["rotary"].failure, "output")
    assert gives(found["rotary"].failure, f"{GATE['fp32']:.2g}")


def test_one_that_is_not_finite_is_named_and_has_no_error_that_json_cannot_hold():
    found = trials(norm=lambda ours: lambda *given: ours(*given) * float("nan"))["norm"]
    assert (gives(found.failure, "output"), found.fused, dict(found.errors)) == (True, 0, {})


def test_one_that_fails_is_named():
    def fail(*given):
        raise RuntimeError("sm_20\nmore")

    failure = trials(norm=lambda ours: fail)["norm"].failure
    assert gives(failure, "sm_20")
    assert "more" not in failure
