"""A small run that has nothing wrong, ready to take the doctor's steps."""

import os

import pytest

from helpers.doctor_runs import clean_base, clean_run
from surefoot.commands.doctor.steps import STEPS
from surefoot.runs.trial import ready
from surefoot.system import process

# Set by `make test-older-cpus`: the processor that a test shall have, and nothing that its run has wrong.
OLDER_CPU = [(name, os.environ.get(name)) for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")]


@pytest.fixture(autouse=True)
def _older_cpu_is_no_finding(monkeypatch):
    read = process.read_environment
    monkeypatch.setattr(
        process, "read_environment", lambda: dict(one for one in read().items() if one not in OLDER_CPU)
    )


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
