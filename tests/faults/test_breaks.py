"""Each protection taken out turns the harness red: a harness that stays green over a broken build proves nothing."""

from itertools import islice

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


def first_outage(without, folder):
    (folder / "outage").mkdir()
    outage = toy_outage(folder / "outage", without)
    with broken(without):
        return list(islice(fail_everywhere(outage, folder / "outage"), 1))


def trials_of(name, count, once):
    def run(without, folder):
        with broken(without):
            return many(name, count, once, folder, SEED)

    return run


OUTAGES, LOCKS = first_outage, trials_of("locks", 1, lock_once)
POISON, MUTATIONS = trials_of("poison", TRIALS, poison_once), trials_of("mutations", TRIALS, mutate_once)
NOTICED_BY = {  # which part of the harness notices what is taken out
    "fsync": OUTAGES,
    "hash": MUTATIONS,
    "lock": LOCKS,
    "guard": POISON,
    "parents": OUTAGES,
    "order": OUTAGES,
}


def test_the_whole_build_is_green(tmp_path):
    """And OUTAGES, in test_power_loss.py."""
    for number, part in enumerate((MUTATIONS, POISON, LOCKS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert list(part(None, folder)) == []


@pytest.mark.parametrize("without", BREAKS)
def test_no_broken_build_is_green(without, tmp_path):
    assert list(NOTICED_BY[without](without, tmp_path))
