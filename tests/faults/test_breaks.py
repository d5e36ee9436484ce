"""Each protection taken out turns the harness red: a harness that stays green over a broken build proves nothing."""

from __future__ import annotations

import pytest

from faults.breaks import BREAKS, broken
from faults.mutations import mutate_once
from faults.outages import fail_everywhere, toy_outage
from faults.poison import poison_once
from faults.trials import Trial, many
from surefoot.system import folder_lock
from surefoot.system.errors import EnvironmentFault

TRIALS = 20
SEED = 0  # the same trials in each build and at any time: whether a build is noticed is not left to chance


def lock_once(trial: Trial) -> str:
    """A second one in the same folder is refused, and gets in after the first."""
    with folder_lock.locked(trial.folder):
        try:
            with folder_lock.locked(trial.folder):
                return "two are at work in one folder"
        except EnvironmentFault:
            pass
    with folder_lock.locked(trial.folder):
        return ""


def harness(without, folder):
    """Everything that one build must pass; returns what was wrong."""
    (folder / "outage").mkdir()
    outage = toy_outage(folder / "outage", without)
    with broken(without):
        return [
            *fail_everywhere(outage, folder / "outage"),
            *many("mutations", TRIALS, mutate_once, folder, SEED),
            *many("poison", TRIALS, poison_once, folder, SEED),
            *many("locks", 1, lock_once, folder / "lock", SEED),
        ]


@pytest.mark.parametrize("without", [None, *BREAKS])
def test_only_the_whole_build_is_green(without, tmp_path):
    wrong = harness(without, tmp_path)
    assert bool(wrong) == (without is not None), wrong[:3]
