"""The accuracy gate for norms and turns: ours pass and are timed, wrong ones do not and are not."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers import stand_in_kernels
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
    request = PointwiseRequest(("norm", "rotary"), PointwiseSizes(96, 4, 24, 2), dtype, "cpu")
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
    found = trials(turn=lambda ours: lambda q, k, cos, sin: ours(q, k, cos, -sin))
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


def of_a_gate(tmp_path, kind, activation="silu"):
    """The probe of a GPU's gated activation, on a CPU, with a package that stands in."""
    sizes = PointwiseSizes(96, 4, 24, 2, 40, activation)
    request = PointwiseRequest(("norm", "rotary", "gated"), sizes, "fp32", "cpu")
    with stand_in_kernels.liger_installed(tmp_path, kind):
        return {trial.part: trial for trial in pointwise_trials(request, pointwise_ways("cuda"), budget=0.0)}


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_what_overwrites_its_inputs_is_timed_and_checked_with_fresh_ones(monkeypatch, tmp_path, activation):
    found = of_a_gate(tmp_path, "right", activation)
    assert list(found) == ["norm", "rotary", "gated"]
    for trial in found.values():
        assert (trial.failure, min(trial.plain, trial.fused) > 0) == ("", True)
        assert max(trial.errors.values()) < 1e-6


@pytest.mark.parametrize("kind", ["rotary wrong", "gated wrong"])
def test_twin_a_wrong_one_does_not_take_the_others_with_it(monkeypatch, tmp_path, kind):
    found = of_a_gate(tmp_path, kind)
    assert [part for part, trial in found.items() if trial.failure] == [kind.split()[0]]
