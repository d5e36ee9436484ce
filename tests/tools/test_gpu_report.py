"""The report of a GPU: its parts keep what they found however they end, and its page shows it."""

import json
import os
import re
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import gpu_cells
import gpu_data
import gpu_measures
import gpu_page
import gpu_parts
from gpu_parts import Call, Part
from helpers.benchmark_programs import RECORDS
from surefoot.system import hardware


@pytest.fixture
def call(tmp_path) -> Call:
    (tmp_path / "parts").mkdir()
    return Call(tmp_path, rehearse=False, end=time.monotonic() + 60)


def part(program: str, minutes: float = 0.0, name: str = "one") -> Part:
    """Of a Python program that knows its result file as `place`."""
    begin = "import json, os, pathlib, sys, time\nplace = pathlib.Path(sys.argv[1])\n"
    return Part(name, "a part", minutes, lambda call, result: [sys.executable, "-c", begin + program, str(result)])


TELL = "place.write_text(json.dumps({'found': 3}))\n"
ENDINGS = {
    "done": ("done", TELL, {"found": 3}),
    "fails with something": ("failed", TELL + "print('the last word')\nsys.exit(4)", {"found": 3}),
    "fails with nothing": ("failed", "os.abort()", None),
    "half a result": ("failed", "place.write_text('{\"found\"')", None),
    "says that it cannot": ("left out", "place.write_text(json.dumps({'left out': 'too large'}))", None),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_part_keeps_what_it_found(call, ending):
    state, program, found = ENDINGS[ending]
    told = gpu_parts.run_part(call, part(program))
    assert (told["state"], told["found"]) == (state, found)
    assert gpu_parts.read(call, part("")) == told
    assert bool(told["log"]) is (state == "failed")
    if ending == "fails with something":
        assert told["why"].endswith("the last word")


@pytest.mark.slow
def test_a_part_ends_with_its_children_when_the_minutes_are_over(call, monkeypatch):
    """It is cut off, keeps what it had, and leaves no process behind."""
    monkeypatch.setattr(gpu_parts, "_LEAST", 0.0)
    child = "import subprocess\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    tell = "place.write_text(json.dumps({'child': child.pid}))\ntime.sleep(60)\n"
    told = gpu_parts.run_part(replace(call, end=time.monotonic() + 1.5), part(child + tell))
    assert told["state"] == "cut off"
    for _ in range(100):
        if not Path(f"/proc/{told['found']['child']}").exists():
            return
        os.sched_yield()
        time.sleep(0.05)
    pytest.fail("a child outlived its part")


def test_what_does_not_fit_into_the_minutes_is_not_begun(call):
    told = gpu_parts.run_part(call, part("raise SystemExit(9)", minutes=5))
    assert (told["state"], told["seconds"]) == ("left out", 0.0)
    assert "5.0 minutes" in told["why"]


def test_tests_are_told_by_name(tmp_path):
    suite = ElementTree.Element("testsuite")
    for name, kind, why in (("a", None, ""), ("b", "failure", "off by 2\nmore"), ("c", "skipped", "no cuDNN")):
        case = ElementTree.SubElement(suite, "testcase", classname="tests.gpu", name=name)
        if kind:
            ElementTree.SubElement(case, kind, message=why)
    ElementTree.ElementTree(suite).write(tmp_path / "found.xml")
    assert gpu_parts._passed(tmp_path / "found.xml") == {
        "passed": ["tests.gpu::a"],
        "failed": {"tests.gpu::b": "off by 2"},
        "skipped": {"tests.gpu::c": "no cuDNN"},
    }


def test_the_data_is_made_of_the_repositorys_pages(tmp_path):
    gpu_data.write_data(tmp_path)
    instructions, dialogues = (json.loads((tmp_path / name).read_text()) for name in gpu_data.NAMES.values())
    assert len(instructions) > 300
    assert all(row["instruction"] and row["output"] for row in instructions)
    turns = [turn for row in dialogues for turn in row["conversations"]]
    assert [turn["value"] for turn in turns[1::2]] == [row["output"] for row in instructions]
    assert set(gpu_data.NAMES) == {cell.data for cell in gpu_cells.CELLS.values()}


def cell_on(memory: int, folder: Path, monkeypatch, **asked: Any) -> dict[str, Any]:
    """What the part of a small cell says on a GPU with so many bytes; peers.py itself is not run."""
    (folder / "data.json").write_text(json.dumps(RECORDS))
    words = ["--size", "tiny", "--adapter", "lora", "--batch", "8", "--steps", "5"]
    monkeypatch.setattr(gpu_cells, "CELLS", {"one": gpu_cells.Cell(words, "data.json", "an aim")})
    monkeypatch.setattr(hardware, "detect", lambda: replace(hardware.preset("h100"), memory=memory))
    monkeypatch.setattr(gpu_measures.subprocess, "run", lambda *_, **__: Namespace(returncode=7))
    found: list[Any] = []
    usual = {"cell": "one", "small": False, "out": folder, "data": folder, "minutes": 60.0, "words": []}
    gpu_measures.cell(Namespace(**usual | {"result": folder / "found.json"} | asked), found.append)
    return found[0]


def test_a_cell_that_does_not_fit_says_so(tmp_path, monkeypatch):
    assert "1.0 MiB" in cell_on(1 << 20, tmp_path, monkeypatch)["left out"]
    assert "minutes" in cell_on(80 << 30, tmp_path, monkeypatch, minutes=0.01)["left out"]
    with pytest.raises(SystemExit) as ended:  # one that fits begins
        cell_on(80 << 30, tmp_path, monkeypatch)
    assert ended.value.code == 7


def test_a_slower_gpu_is_given_more_minutes(tmp_path):
    (tmp_path / "parts").mkdir()
    assert gpu_measures.slower(tmp_path) == 1.0
    found = {"dtype": "bf16", "shapes": {"8B": {"products": {"bf16": gpu_cells.PRODUCTS / 4, "fp32": 1.0}}}}
    (tmp_path / "parts" / "probes.json").write_text(json.dumps({"found": found}))
    assert gpu_measures.slower(tmp_path) == 4.0


def row(name: str, rate: float, parity: bool = True) -> dict[str, Any]:
    figures = {"of_limit": 0.4, "memory": 2**30, "reserved": 2**30, "first_step": 9.0, "off": 1e-5, "norm_off": 1e-3}
    return {"name": name, "rate": rate, "has_parity": parity, **figures}


def report(**found: Any) -> dict[str, Any]:
    """As __main__ writes it: of each part what is given, and else that it was left out."""
    parts = {
        one.name: {"what": one.what, "state": "done", "why": "", "seconds": 1.0, "log": [], "found": found[one.name]}
        if one.name in found
        else {"what": one.what, "state": "left out", "why": "no time", "seconds": 0.0, "log": [], "found": None}
        for one in gpu_parts.PARTS
    }
    identity = {"device": "a GPU", "torch": "2.13", "surefoot": "abc", "kind": "measurement"}
    return {"format": 1, "identity": identity, "notes": ["without Unsloth"], "parts": parts}


CELL = {
    "asked": {"batch": "8", "adapter": "lora", "size": "8b"},
    "aim": "an aim",
    "limit": 21_780.0,
    "rows": [row("surefoot", 200.0), row("HF", 100.0), row("HF + Liger", 400.0, parity=False)],
    "broken": {"TRL": "broke off: out of memory"},
}
RUN = {"losses": [9.0], "attention": "flash", "kernels": {"loss": "chunked"}, "repeats": True, "resumed": []}


def test_a_rehearsal_says_what_it_did_of_a_part():
    methods = next(one for one in gpu_parts.PARTS if one.name == "methods")
    assert methods.shown(True) != methods.shown(False) == methods.what
    machine = gpu_parts.PARTS[0]
    assert machine.shown(True) == machine.what


def test_a_page_of_nothing_names_what_was_left_out():
    page = gpu_page.page_of(report())
    assert page.count("left out: no time") == len(gpu_parts.PARTS)
    assert "A rehearsal" not in page


def test_the_page_shows_figures_and_fetches_nothing():
    found = {"tests": {"passed": ["a"], "failed": {"<script>": "off"}, "skipped": {}}, "cell-8b-lora": CELL}
    page = gpu_page.page_of(report(**found, runs={"lora": RUN}))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=", page)
    assert "2.00 times the fastest peer" in page  # HF's: one without parity does not count
    bars = dict(re.findall(r'<rect class="(\w+)".* width="([\d.]+)"', page))
    assert float(bars["own"]) == pytest.approx(2 * float(bars["peer"]), rel=0.01)
    assert {"wrong", "own", "peer"} == set(bars)
    assert "equal bit for bit" in page


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"resumed": ["weights of lora_A"]}, "DIFFERS: weights of lora_A"),
        ({"resumed": ["weights"], "repeats": False}, "not comparable"),
        ({"resumed": None, "fault": "KeyError: x"}, "KeyError: x"),
    ],
)
def test_twin_a_resume_that_is_not_equal_is_not_called_so(change, wanted):
    page = gpu_page.page_of(report(runs={"lora": RUN | change}))
    assert wanted in page
    assert "equal bit for bit" not in page


def test_memory_is_shown_as_a_share_of_the_peak():
    case = {"size": "1.2 B", "length": 1024, "adapter": "lora", "again": "off"}
    case |= {"forecast": 90 * 2**20, "peak": 100 * 2**20, "reserved": 2**27, "off": -0.1}
    page = gpu_page.page_of(report(**{"memory-lora": [case]}))
    assert "-10.0 %" in page
    assert "1.2 B, 1024, lora, once" in page
    assert page.count("<rect") == 2
