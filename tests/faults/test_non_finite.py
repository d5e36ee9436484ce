"""A NaN or an infinity in loss, activation, gradient or moment is caught in its step and costs nothing but that."""

from faults.poison import poison_moment_once, poison_once
from faults.soak import short_and_soak
from faults.trials import many

SHORT = 12


@short_and_soak("NaN and infinity", SHORT)
def test_poison_is_caught_in_its_step(trials, tmp_path):
    assert many("NaN or infinity", trials, poison_once, tmp_path) == []


@short_and_soak("NaN and infinity", SHORT)
def test_a_poisoned_moment_is_caught_in_its_step_and_never_saved(trials, tmp_path):
    assert many("NaN in a moment", trials, poison_moment_once, tmp_path) == []
