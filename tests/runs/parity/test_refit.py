"""A fast path that is taken out before step 1 takes its room with it: the plan is made again for the plain one."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.growing_records import write_sky
from helpers.path_runs import losses, path_config, saved_plan, start
from helpers.tiny_models import tiny_llama
from surefoot.methods.losses import sft
from surefoot.planning.memory import fits
from surefoot.runs import steps
from surefoot.system import hardware
from surefoot.system.hardware import GIB

SIZE = 16


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_sky(folder, 39, more=8)
    tiny_llama(folder / "base", hidden=32)
    return folder


def config(workplace, output, **way):
    return path_config(workplace, output, batch={"size": SIZE} | way.pop("batch", {}), **way)


def run(wanted):
    said = start(wanted)
    return saved_plan(Path(wanted.output)), said


@pytest.fixture(scope="module")
def middle(workplace, tmp_path_factory):
    """Bytes of memory that have room for a whole step with the loss in pieces, and not for one with all logits."""
    folder = tmp_path_factory.mktemp("forecasts")
    fast, plain = (
        run(config(workplace, folder / way, kernels={"loss": way}))[0].memory.total for way in ("chunked", "plain")
    )
    assert fast < plain
    return int(((fast + plain) / 2 + GIB) / 0.9)


@pytest.fixture
def tight(middle, monkeypatch):
    own = hardware.detect()
    monkeypatch.setattr(hardware, "detect", lambda: replace(own, memory=middle, free=middle))


def fail(*_given, **_named):
    raise RuntimeError("does not work here")


@pytest.mark.usefixtures("tight")
class TestTight:
    def test_micro_batches_shrink_with_a_line_where_the_plain_path_does_not_fit(self, workplace, tmp_path, monkeypatch):
        whole, screen = run(config(workplace, tmp_path / "whole"))
        assert (whole.batch.micro.value, whole.kernels.loss.value) == (SIZE, "chunked")
        assert "batch.micro:" not in screen
        monkeypatch.setattr(sft, "summed_loss", fail)
        plan, screen = run(config(workplace, tmp_path / "run"))
        assert plan.kernels.loss.value == "plain"
        assert plan.batch.micro.value < SIZE
        assert fits(plan.memory)
        assert screen.count("caution: batch.micro: ") == 1
        assert any(line.startswith("batch.micro: ") for line in plan.cautions)
        assert len(losses(tmp_path / "run")) == 2

    def test_twin_without_the_second_look_it_would_not_fit(self, workplace, tmp_path, monkeypatch):
        monkeypatch.setattr(sft, "summed_loss", fail)
        monkeypatch.setattr(steps, "refit_micro_batches", lambda run, plan, *_: plan)
        with pytest.raises(AssertionError):
            TestTight().test_micro_batches_shrink_with_a_line_where_the_plain_path_does_not_fit(
                workplace, tmp_path, monkeypatch
            )

    def test_what_was_asked_for_stays_and_is_told(self, workplace, tmp_path, monkeypatch):
        monkeypatch.setattr(sft, "summed_loss", fail)
        plan, screen = run(config(workplace, tmp_path / "run", batch={"micro": SIZE}))
        assert plan.batch.micro.value == SIZE
        assert "caution: batch.micro: " in screen


def test_with_room_for_both_micro_batches_stay_and_the_forecast_is_the_plain_one(workplace, tmp_path, monkeypatch):
    fast, _ = run(config(workplace, tmp_path / "fast"))
    monkeypatch.setattr(sft, "summed_loss", fail)
    plan, screen = run(config(workplace, tmp_path / "run"))
    assert plan.batch == fast.batch
    assert plan.memory.total > fast.memory.total
    assert "caution: batch.micro" not in screen
