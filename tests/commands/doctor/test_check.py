"""The first steps of a run, as `--check N` judges them."""

from __future__ import annotations

import pytest

from helpers.doctor_runs import clean_base, clean_run
from surefoot.commands.doctor import check as check_module
from surefoot.commands.doctor.steps import STEPS
from surefoot.commands.doctor.check import check_steps



@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    return clean_run(folder, clean_base(folder / "base"))


def judged(config, steps=STEPS):
    lines = []
    return {one.code: one.verdict for one in check_steps(config, steps, lines.append)}, lines


def test_a_sound_run_is_finite_and_falls_and_nothing_is_written(config, tmp_path):
    run = config.model_copy(update={"output": str(tmp_path / "out")})
    found, lines = judged(run)
    assert set(found.values()) == {"ok"}
    assert {"LOSS-FINITE", "LOSS-FALLING", "GRAD-NORM"} <= found.keys()
    assert [line.split(" ")[1] for line in lines] == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    assert not (tmp_path / "out").exists()


def test_twin_steps_that_climb_are_told(config, monkeypatch):
    honest = check_module.take

    def climbing(one, *args):
        return honest(one, *args).__class__(**{**vars(honest(one, *args)), "again": 99.0})

    monkeypatch.setattr(check_module, "take", climbing)
    assert judged(config, 2)[0]["LOSS-FALLING"] == "caution"
