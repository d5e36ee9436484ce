"""The accuracy gate for norms and turns: ours pass and are timed, wrong ones do not and are not."""

import pytest
import torch

from surefoot.probe import pointwise
from surefoot.probe.attention import GATE
from surefoot.probe.pointwise import pointwise_trials

CPU = torch.device("cpu")


def trials(dtype="fp32"):
    found = pointwise_trials(96, 4, 24, dtype, CPU, budget=0.0)
    return {trial.part: trial for trial in found}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_ours_pass_and_are_timed_beside_the_plain_ones(dtype):
    found = trials(dtype)
    assert list(found) == ["norm", "rotary"]
    for trial in found.values():
        assert not trial.failure
        assert min(trial.plain, trial.fused) > 0
        assert all(0 < error < GATE[dtype] for error in trial.errors.values())


def test_twin_a_norm_without_its_eps_is_not_timed(monkeypatch):
    """It shows in the smallest rows alone."""
    right = pointwise.rms_norm
    wrong = lambda x, weight, form: right(x, weight, pointwise.NormForm(1e-12, form.shift, form.narrow_first))  # noqa: E731
    monkeypatch.setattr(pointwise, "rms_norm", wrong)
    found = trials()
    assert "is off by" in found["norm"].failure
    assert "for numbers about 0.001" in found["norm"].failure
    assert found["norm"].fused == 0
    assert not found["rotary"].failure


def test_twin_a_turn_the_other_way_is_not_timed(monkeypatch):
    right = pointwise.turned
    monkeypatch.setattr(pointwise, "turned", lambda q, k, cos, sin: right(q, k, cos, -sin))
    assert "the output is off by" in trials()["rotary"].failure


def test_one_that_fails_is_named(monkeypatch):
    def fail(*given, **how):
        raise RuntimeError("no such operator\nmore")

    monkeypatch.setattr(pointwise, "rms_norm", fail)
    assert trials()["norm"].failure.startswith("cannot run: no such operator for numbers")
