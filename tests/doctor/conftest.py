"""A small run that has nothing wrong, ready to take the doctor's steps."""

from __future__ import annotations

import pytest

from doctor_runs import clean_base, clean_run
from surefoot.doctor.steps import STEPS
from surefoot.stages.trial import ready


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return clean_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def one(folder, base):
    with ready(clean_run(folder, base), STEPS) as prepared:
        yield prepared
