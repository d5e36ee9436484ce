"""A NaN or an infinity in loss, activation, gradient or moment is caught in its step and costs nothing but that."""

from __future__ import annotations

import pytest

from faults.poison import poison_moment_once, poison_once
from faults.trials import many

SHORT = 12


def test_poison_is_caught_in_its_step(tmp_path):
    assert many("NaN or infinity", SHORT, poison_once, tmp_path) == []


def test_a_poisoned_moment_is_caught_in_its_step_and_never_saved(tmp_path):
    assert many("NaN in a moment", SHORT, poison_moment_once, tmp_path) == []


@pytest.mark.soak("NaN and infinity")
def test_much_poison_is_caught_in_its_step(trials, tmp_path):
    assert many("NaN or infinity", trials, poison_once, tmp_path) == []


@pytest.mark.soak("NaN and infinity")
def test_many_poisoned_moments_are_caught_in_their_step(trials, tmp_path):
    assert many("NaN in a moment", trials, poison_moment_once, tmp_path) == []
