"""`surefoot train --profile N`: what lies in the run folder afterwards, and that the run is the same without."""

import dataclasses
import gzip
import json
import re
import shutil
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from helpers.faults import gives
from helpers.plans import run_plan
from helpers.toy_model import toy_examples
from helpers.trained_runs import heron_folder, heron_trained
from surefoot.data.batching.batch import collate
from surefoot.families.model_facts import read_model_facts
from surefoot.planning.limits import Work, step_flops
from surefoot.report import profile as profile_picture
from surefoot.report.html import write_report
from surefoot.report.profile import _LONGEST, ProfileReport, _fitted, disturbance, headline, notes, profile_table
from surefoot.report.record import read_run
from surefoot.report.trainer_log import read_rows, without_timing
from surefoot.report.views import memory_forecast
from surefoot.runs import profiling
from surefoot.runs.profiling import Arithmetic, Phases, step_work
from surefoot.system.counters import Counters
from surefoot.system.messages import size_text
from surefoot.training.profile import Operator, Recorded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return heron_folder(tmp_path_factory.mktemp("profiling"))


def run(folder, name, *arguments, **changes):
    ways = {"duration": "7 steps", "checkpoint": {"every": "4 steps"}} | changes
    return heron_trained(folder, name, *arguments, **ways)


@pytest.fixture(scope="module")
def profiled(folder):
    """What it said."""
    return run(folder, "profiled", "--profile", "3")


def test_a_profiled_run_is_the_same_run_and_leaves_table_trace_and_picture(folder, profiled):
    run(folder, "plain")
    one, other = (load_file(folder / name / "adapter_model.safetensors") for name in ("plain", "profiled"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    logs = [
        [without_timing(row) for row in read_rows(folder / name / "trainer_log.jsonl")]
        for name in ("plain", "profiled")
    ]
    assert logs[0] == logs[1]
    assert not (folder / "plain" / "profile").exists()
    written = folder / "profiled" / "profile"
    report = ProfileReport.from_json(json.loads((written / "profile.json").read_text()))
    assert (report.first, report.last, report.traced) == (3, 5, 2)
    assert report.between["checkpoint"] > 0  # after step 4
    assert 0 < report.limit.of_step < 1
    assert report.parts["forward"] > 0
    assert report.parts["optimizer"] > 0
    assert sum(report.parts.values()) == pytest.approx(report.step_seconds)
    assert headline(report) in " ".join(profiled.split())
    assert "aten::" in profiled
    assert (written / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(gzip.decompress((written / "trace.json.gz").read_bytes()))["traceEvents"]
    page = (folder / "profiled" / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "data:image/png" not in (folder / "plain" / "report.html").read_text()


@pytest.mark.usefixtures("profiled")
def test_a_damaged_profile_is_left_out_of_the_report(folder, tmp_path):
    damaged = shutil.copytree(folder / "profiled", tmp_path / "damaged")
    (damaged / "profile" / "profile.json").write_text('{"first": 1}')
    assert "data:image/png" not in write_report(damaged).read_text()
    assert "data:image/png" in (folder / "profiled" / "report.html").read_text()  # twin


def test_a_profile_that_cannot_be_written_ends_nothing(folder, monkeypatch):
    def full(*arguments, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiling, "draw_profile", full)
    run(folder, "full", "--profile", "1")
    assert not (folder / "full" / "profile").exists()


@pytest.fixture(scope="module")
def arithmetic(folder):
    return Arithmetic(read_model_facts(folder / "base"), run_plan(trainable=10, parameters=100), "sft")


def recorded(**changes):
    parts = {"data": 0.1, "forward": 1.0, "backward": 2.0, "optimizer": 0.4, "evaluation": 0.0, "checkpoint": 9.0}
    operators = (Operator("aten::mm", 3.0, 40), Operator("aten::add", 1.0, 10))
    made = Recorded(3, 4, parts, 4.0, Counters(seconds=4.0, own=7.9), 2, operators, lambda path: None)
    return dataclasses.replace(made, **changes)


def test_a_report_worked_out_by_hand(arithmetic, monkeypatch):
    work = Work(1000, 20_000, 400)
    flops = step_flops(arithmetic.model, work, arithmetic.plan.adapter).needed
    monkeypatch.setattr(profiling, "product_rate", lambda arithmetic: flops)  # one second of work
    report = profiling.profile_report(recorded(), work, arithmetic)
    assert report.tokens_per_second == 250
    assert report.parts == pytest.approx(
        {"data": 0.05, "forward": 0.5, "backward": 1.0, "optimizer": 0.2, "other": 0.25}
    )
    assert report.limit.of_step == pytest.approx(0.25)  # in four
    assert report.limit.of_forward * 1.0 + report.limit.of_backward * 2.0 == pytest.approx(1.0, rel=0.05)  # but norms
    assert [(one.name, one.seconds, one.calls) for one in report.operators] == [
        ("aten::mm", 1.5, 20),
        ("aten::add", 0.5, 5),
    ]
    assert ProfileReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert all(gives(headline(report), value) for value in (3, 4, 250, "2,000.0", "25%"))
    profile_table(report)


def test_it_is_said_that_others_had_the_processor(arithmetic):
    def told(**counted):
        one = recorded(counted=Counters(seconds=4.0, own=5.5, **counted))
        report = profiling.profile_report(one, Work(10, 100, 5), arithmetic)
        said = disturbance(report)
        assert (said in notes(report)) == bool(said)
        return re.findall(r"\d+\.\d+", said)

    assert told(waited=2.0, throttled=0.5) == ["4.0", "5.5", "2.5"]  # seconds: all, the run's own, waited
    assert told(waited=0.3) == []  # twin: a little is nothing


@pytest.mark.parametrize(("waited", "disturbed"), [(2.0, True), (0.3, False)])
def test_the_picture_says_it_too(arithmetic, monkeypatch, waited, disturbed):
    monkeypatch.setattr(profile_picture, "png", lambda figure: figure)
    one = recorded(counted=Counters(seconds=4.0, own=5.5, waited=waited))
    figure = profile_picture.draw_profile(profiling.profile_report(one, Work(10, 100, 5), arithmetic))
    first, *more = figure.get_suptitle().splitlines()
    assert all(gives(first, step) for step in (3, 4))
    assert bool(more) == disturbed
    assert all(len(line) < 100 for line in more)


@pytest.mark.usefixtures("profiled")
def test_a_profile_has_what_the_system_counted(folder):
    report = ProfileReport.from_json(json.loads((folder / "profiled" / "profile" / "profile.json").read_text()))
    assert report.clocked >= 2 * report.step_seconds > 0
    assert report.processor > 0
    before = {key: value for key, value in report.to_json().items() if key not in ("clocked", "processor", "waited")}
    assert ProfileReport.from_json(before).clocked == 0  # of a version that did not count


def test_long_names_are_whole_in_the_picture():
    long = "autograd::engine::evaluate_function: MmBackward0Backward"
    assert _fitted(long) == "autograd::engine::evaluate_function:\nMmBackward0Backward"
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert _fitted(kernel) == "aten::_scaled_dot_product_flash_attention\n_for_cpu_backward"
    assert _fitted("aten::mm") == "aten::mm"
    lines = _fitted("a" * 200).split("\n")
    assert [len(line) for line in lines] == [_LONGEST, _LONGEST]
    assert lines[1].endswith("…")  # twin: what is too long for two is cut, and shows it


def test_a_stage_with_other_passes_is_told_no_limit(arithmetic):
    report = profiling.profile_report(recorded(), Work(10, 100, 5), dataclasses.replace(arithmetic, stage="dpo"))
    assert report.limit is None
    assert gives(headline(report), "dpo")


def test_work_counts_real_tokens_and_labels():
    examples = toy_examples(5)
    lengths = [len(example.ids) for example in examples]
    labels = sum(int(example.supervised[1:].sum()) for example in examples)
    batches = [collate(examples[:3], 0), collate(examples[3:], 0, side="left")]
    assert step_work(batches) == Work(sum(lengths), sum(one * one for one in lengths), labels)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """What `Phases` takes the time to be."""
    now = [100.0]
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: now[0])
    return now


def test_each_phase_has_what_went_by_since_the_last(clock):
    found = Phases(imports=5.0)
    for phase, seconds in (("data", 0.25), ("probes", 0.01), ("model", 1.5), ("data", 0.5)):
        clock[0] += seconds
        found.end(phase)
    assert found.to_json() == {"imports": 5.0, "data": 0.75, "probes": 0.01, "model": 1.5}
    assert re.findall(r"[\d.]+", found.sentence()) == ["7.3", "5.0", "0.8", "1.5"]
    assert re.findall(r"imports|data|probes|model", found.sentence()) == ["imports", "data", "model"]


@pytest.mark.parametrize("ends", ["late", "in time", "in an error"])
def test_a_phase_that_takes_long_is_told_with_the_seconds_so_far(clock, monkeypatch, ends):
    told, timers = [], []

    class Timer(SimpleNamespace):
        """Goes off when the test says so, unless it was canceled."""

        def __init__(self, seconds, function):
            super().__init__(after=seconds, function=function, on=False)
            timers.append(self)

        def start(self):
            self.on = True

        def cancel(self):
            self.on = False

    monkeypatch.setattr(profiling.threading, "Timer", Timer)
    found = Phases(imports=5.0, tell=told.append)
    with suppress(ValueError), found.during("weights", "loading"):
        [timer] = timers
        if ends == "in an error":
            raise ValueError
        clock[0] += 7.0
        if ends == "late" and timer.on:
            timer.function()
    assert not timer.on
    assert [gives(line, 12) and gives(line, "loading") for line in told] == [True] * (ends == "late")
    assert found.to_json() == {"imports": 5.0} | ({} if ends == "in an error" else {"weights": 7.0})


def test_without_a_process_of_its_own_imports_are_not_told(clock):
    found = Phases()
    assert re.findall(r"[\d.]+", found.sentence()) == ["0.0"]
    assert "imports" not in found.sentence()
    assert found.to_json() == {}


def test_the_report_compares_the_peak_with_what_the_process_held_before(folder, profiled):
    record = read_run(folder / "profiled")
    assert record.plan is not None
    [rank] = record.environment["ranks"]
    peak = json.loads((folder / "profiled" / "trainer_log.jsonl").read_text().splitlines()[-1])["peak_memory"]
    assert 0 < rank["memory_before"] < peak
    sizes = [size_text(record.plan.memory.total), size_text(rank["memory_before"])]
    assert [size for size in sizes if size in memory_forecast(record)] == sizes
    without = dataclasses.replace(record, environment={})  # of an older run, and on a GPU
    assert sizes[1] not in memory_forecast(without)


def test_a_run_tells_its_phases_and_records_them(folder, profiled):
    [rank] = json.loads((folder / "profiled" / "environment.json").read_text())["ranks"]
    assert rank["start_seconds"].keys() == {
        "imports",
        "planning",
        "data",
        "probes",
        "weights",
        "model",
        "comparison",
        "hashes",
    }
    [told] = re.findall(r"ready in ([\d.]+) s", profiled)
    assert float(told) == pytest.approx(sum(rank["start_seconds"].values()), abs=0.06)  # rounded to a tenth
