"""A NaN or an infinity in loss, activation or gradient is caught in its step; in a moment, before it is saved."""

from __future__ import annotations

import pytest

from faults.poison import poison_moment_once, poison_once
from faults.trials import many

SHORT, LONG = 12, 100


def test_poison_is_caught_in_its_step(tmp_path):
    assert many("NaN or infinity", SHORT, poison_once, tmp_path) == []


def test_a_poisoned_moment_is_never_saved_and_caught_in_the_next_step(tmp_path):
    assert many("NaN in a moment", SHORT, poison_moment_once, tmp_path) == []


@pytest.mark.soak
def test_much_poison_is_caught_in_its_step(tmp_path):
    assert many("NaN or infinity", LONG, poison_once, tmp_path) == []


@pytest.mark.soak
def test_many_poisoned_moments_are_never_saved(tmp_path):
    assert many("NaN in a moment", LONG, poison_moment_once, tmp_path) == []
