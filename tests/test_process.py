"""The environment that this process reads, and the launcher that started it."""

import os

import pytest

from surefoot import process
from surefoot.process import ENVIRONMENT_NAMES, read_environment


def test_only_names_that_matter_are_read(monkeypatch):
    monkeypatch.setenv("SDPA_BACKEND", "flash")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen = read_environment()
    assert seen["SDPA_BACKEND"] == "flash"
    assert set(seen) <= set(ENVIRONMENT_NAMES)
    assert not [name for name in ENVIRONMENT_NAMES if "TOKEN" in name or "KEY" in name or "DIR" in name]


@pytest.mark.parametrize(
    ("told", "parent"),
    [
        ({process.LAUNCHER: "77"}, 77),
        ({"TORCHELASTIC_RUN_ID": "none"}, os.getppid()),  # torchrun's ranks are its children
        ({process.LAUNCHER: "77", "TORCHELASTIC_RUN_ID": "none"}, 77),
        ({}, None),  # started by hand: whoever did may leave
    ],
    ids=["surefoot", "torchrun", "surefoot under torchrun", "by hand"],
)
def test_a_rank_knows_the_launcher_that_it_ends_with(monkeypatch, told, parent):
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name in (process.LAUNCHER, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**rank, **told}.items():
        monkeypatch.setenv(name, value)
    launch = process.find_launch()
    assert launch is not None
    assert launch.parent == parent
