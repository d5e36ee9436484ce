"""Measurements that are kept: taken for the same question on the same machine, and for no other."""

import json
import os

import pytest

from surefoot.planning.probes.kept import Kept, open_kept
from surefoot.runs.measured import measured_threads
from surefoot.system import counters

MACHINE = {"cpu": "one", "versions": {"torch": "2.13.0"}}
QUESTION = {"shape": (64, 32)}


class Probe:
    """Answers with the number of times that it was asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return {"fp32": float(self.asked)}


def ask(folder, probe, *, machine=MACHINE, question=QUESTION, name="products", **more):
    return Kept(folder, machine).get(name, question, dict[str, float], probe, **more)


def only_file(folder):
    (path,) = folder.glob("*.json")
    return path


def test_the_same_question_is_measured_once(tmp_path):
    probe = Probe()
    assert ask(tmp_path, probe) == ask(tmp_path, probe) == {"fp32": 1.0}
    assert probe.asked == 1


@pytest.mark.parametrize(
    "other",
    [
        {"machine": {**MACHINE, "cpu": "another"}},
        {"machine": {**MACHINE, "versions": {"torch": "2.14.0"}}},
        {"question": {"shape": (64, 33)}},
        {"name": "threads"},
    ],
)
def test_another_machine_version_shape_or_probe_is_measured(tmp_path, other):
    probe = Probe()
    ask(tmp_path, probe)
    assert ask(tmp_path, probe, **other) == {"fp32": 2.0}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: text.replace('"fp32": 1.0', '"fp32": "fast"'),
        lambda text: text.replace("2.13.0", "2.12.0"),
        lambda text: json.dumps({"asked": json.loads(text)["asked"]}),
    ],
)
def test_what_is_damaged_or_answers_another_question_is_measured_anew_and_replaced(tmp_path, damage):
    probe = Probe()
    ask(tmp_path, probe)
    path = only_file(tmp_path)
    path.write_text(damage(path.read_text()))
    assert ask(tmp_path, probe) == {"fp32": 2.0}
    assert ask(tmp_path, probe) == {"fp32": 2.0}
    assert only_file(tmp_path) == path


def test_forgetting_measures_anew(tmp_path):
    probe = Probe()
    ask(tmp_path, probe)
    Kept(tmp_path, MACHINE).forget()
    assert ask(tmp_path, probe) == {"fp32": 2.0}


def test_a_passing_failure_is_not_kept(tmp_path):
    probe = Probe()
    ask(tmp_path, probe, lasting=lambda answer: False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path):
    (tmp_path / "file").write_text("")
    assert ask(tmp_path / "file" / "probes", Probe()) == {"fp32": 1.0}


def test_an_environment_variable_that_matters_is_part_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probe = Probe()
    for isa in ("AVX2", "AVX2", "AVX512_CORE"):
        monkeypatch.setenv("DNNL_MAX_CPU_ISA", isa)
        open_kept().get("products", QUESTION, dict[str, float], probe)
    assert probe.asked == 2


def test_other_kernels_or_probes_are_measured_anew(monkeypatch):
    before = open_kept().machine["code"]
    assert open_kept().machine["code"] == before
    monkeypatch.setattr("surefoot.planning.probes.kept._MEASURED_BY", ("kernels",))  # as if the probes had changed
    without_probes = open_kept().machine["code"]
    assert without_probes != before
    monkeypatch.setattr("surefoot.planning.probes.kept._MEASURED_BY", ())  # nor the kernels: both folders are read
    assert open_kept().machine["code"] not in (before, without_probes)


@pytest.mark.parametrize(
    ("cores", "busy", "load", "asked"),
    [
        (2, 0.0, 0.1, 1),  # alone
        (2, 1.0, 1.8, 1),  # beside a program that is still there
        (2, 1.0, 0.1, 2),  # which has gone
        (1, 1.0, 0.1, 1),  # one thread had a core of its own
        (1, 2.0, 0.1, 2),
    ],
)
def test_what_was_measured_beside_other_programs_stands_while_they_run(tmp_path, monkeypatch, cores, busy, load, asked):
    """A measurement of one second on a machine with two cores, of which others have `busy`."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(counters.psutil, "getloadavg", lambda: (load, 0, 0))
    moments = iter(range(100))

    def reading():
        now = float(next(moments))
        return counters.Counters(seconds=now, own=now * cores, busy=now * (cores + busy))

    monkeypatch.setattr(counters, "read_counters", reading)
    probe = Probe()
    for _ in range(2):
        ask(tmp_path, probe, cores=cores)
    assert probe.asked == asked


def test_measuring_threads_takes_as_many_cores_as_there_are_threads(monkeypatch):
    monkeypatch.setattr("surefoot.planning.probes.matmul.thread_rates", lambda shape, counts: {})
    asked = []

    class Told:
        def get(self, *arguments, **named):
            asked.append(named["cores"])
            return {}

    measured_threads([(64, 64)], 6, Told())
    assert asked == [6]


def test_of_a_moment_nobody_can_tell_who_had_the_cores():
    assert counters.Counters(seconds=0.01, busy=0.02).left(2)
    assert not counters.Counters(seconds=0.2, busy=0.4 * (os.cpu_count() or 1)).left(1)
