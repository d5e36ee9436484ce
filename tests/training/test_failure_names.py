"""Names of the folders that record a failure: every one is read as it was written, in the order of the run."""

import itertools

import pytest

from surefoot.training.failure_names import failure_name, failures_in, moment, newest_failure
from surefoot.training.manifest import MANIFEST

PHASES = ("batches", "step", "memory", "evaluation")
IN_ORDER = [
    failure_name(step, phase, rollbacks) for rollbacks, step, phase in itertools.product((0, 1, 2), (4, 5, 12), PHASES)
]


def folders(run, names):
    for name in names:
        (run / name).mkdir()
        (run / name / MANIFEST).write_text("{}")


def test_the_folder_of_a_step_keeps_its_plain_name():
    assert failure_name(12, "step", 0) == "failure-12"
    assert failure_name(12, "evaluation", 0) == "failure-12-evaluation"
    assert failure_name(12, "batches", 2) == "failure-12-batches-rollback-2"
    assert len(set(IN_ORDER)) == len(IN_ORDER)


def test_they_come_in_the_order_of_the_run(tmp_path):
    folders(tmp_path, sorted(IN_ORDER))
    (tmp_path / "failure-3").mkdir()  # twins: not whole, and no name of one
    folders(tmp_path, ["failure-3-supper", "failure-evaluation"])
    assert [path.name for path in failures_in(tmp_path)] == IN_ORDER
    assert sorted(IN_ORDER) != IN_ORDER


@pytest.mark.parametrize("phase", PHASES)
def test_the_newest_of_a_step_or_a_later_one(tmp_path, phase):
    folders(tmp_path, ["failure-2", failure_name(4, phase, 0)])
    assert newest_failure(tmp_path, 4) == tmp_path / failure_name(4, phase, 0)
    assert newest_failure(tmp_path, 5) is None


def test_every_phase_has_words_of_its_own():
    assert len({moment(4, phase) for phase in PHASES}) == len(PHASES)
    assert moment(4, "step") == "step 4"
