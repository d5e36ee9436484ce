"""A fast path that is taken out before step 1 takes its room with it: the plan is made again for the plain one."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.growing_records import write_sky
from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.methods.losses import sft
from surefoot.planning.memory import fits
from surefoot.planning.plan import plan_from_json
from surefoot.report.console import Console
from surefoot.runs import steps
from surefoot.runs.run import train_run
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
    return run_config(
        model=str(workplace / "base"),
        data={"train": str(workplace / "rows.json"), "max_length": 64},
        adapter={"kind": "lora", "rank": 4},
        batch={"size": SIZE} | way.pop("batch", {}),
        duration="2 steps",
        output=str(output),
        **way,
    )


def run(wanted):
    screen = io.StringIO()
    assert train_run(wanted, "new", Console(screen, width=1000)) == 0
    saved = json.loads((Path(wanted.output) / "plan.json").read_text())
    return plan_from_json(saved["plan"]), screen.getvalue()


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
        rows = [json.loads(line) for line in (tmp_path / "run" / "trainer_log.jsonl").read_text().splitlines()]
        assert len([row for row in rows if "loss" in row]) == 2

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
        assert "caution: batch.micro: with the plain path the forecast is" in screen


def test_with_room_for_both_micro_batches_stay_and_the_forecast_is_the_plain_one(workplace, tmp_path, monkeypatch):
    fast, _ = run(config(workplace, tmp_path / "fast"))
    monkeypatch.setattr(sft, "summed_loss", fail)
    plan, screen = run(config(workplace, tmp_path / "run"))
    assert plan.batch == fast.batch
    assert plan.memory.total > fast.memory.total
    assert "caution: batch.micro" not in screen
