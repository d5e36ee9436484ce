"""Versions that are known to go wrong."""

import importlib.metadata
from dataclasses import replace

import pytest
import torch

from surefoot.commands.doctor import libraries
from surefoot.commands.doctor.libraries import installed_version, library_findings, minimums, numbers
from surefoot.system import hardware

CPU = hardware.preset("cpu")
GOOD = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "jinja2": "3.1.6"}


def found(versions, machine=CPU, accelerators=0):
    lines = library_findings(machine, accelerators, versions.get)
    return [(line.where, line.verdict) for line in lines if line.verdict != "ok"]


def test_good_versions():
    assert found(GOOD) == []
    assert [line.code for line in library_findings(CPU, 0, GOOD.get)] == ["LIB-KNOWN-BAD", "LIB-BUILD"]


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        ({"jinja2": "3.1.5"}, [("jinja2", "fault"), ("jinja2", "fault")]),  # a row of the table, and below the minimum
        ({"deepspeed": "0.15.0"}, [("deepspeed", "fault")]),
        ({"deepspeed": "0.15.1"}, []),
        ({"litellm": "1.82.8"}, [("litellm", "fault")]),
        ({"litellm": "1.82.9"}, []),
        ({"litellm": "1.82.6"}, []),
        ({"peft": "0.20.0"}, [("peft", "fault")]),
    ],
)
def test_rows_and_minimums(versions, wanted):
    assert found(GOOD | versions) == wanted


def test_minimums_are_those_of_the_package():
    assert minimums()["transformers"] == "5.23"
    assert "pyarrow" not in minimums()  # of an extra


def test_what_is_compiled_for_another_torch(monkeypatch):
    requires = {"torchvision": ["numpy", "torch==2.12.1"], "surefoot": []}
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires[name])
    assert found(GOOD | {"torchvision": "0.27.0"}) == [("torchvision", "caution")]
    requires["torchvision"] = ["numpy", "torch (==2.13.0)"]
    assert found(GOOD | {"torchvision": "0.28.0"}) == []


def test_flash_attn_that_cannot_be_imported(monkeypatch):
    def broken(name):
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(libraries.importlib, "import_module", broken)
    assert found(GOOD | {"flash-attn": "2.8"}) == [("flash-attn", "caution")]
    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: None)
    assert found(GOOD | {"flash-attn": "2.8"}) == []


@pytest.mark.parametrize(
    ("built", "accelerators", "words"), [(False, 2, "build for CPUs"), (True, 2, "does not see"), (False, 0, "")]
)
def test_builds(monkeypatch, built, accelerators, words):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    line = library_findings(CPU, accelerators, GOOD.get)[-1]
    assert (line.code, line.verdict) == ("LIB-BUILD", "caution" if words else "ok")
    assert words in line.value


@pytest.mark.parametrize("flash", [True, False])
def test_a_wheel_without_flash_attention(monkeypatch, flash):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
    gpu = replace(hardware.preset("h100"), preset=False)
    assert found(GOOD, gpu, 1) == ([] if flash else [("torch", "caution")])


@pytest.mark.parametrize(("text", "version"), [("2.13.0+cpu", (2, 13, 0)), ("5.23.0.dev0", (5, 23, 0)), ("x", ())])
def test_numbers(text, version):
    assert numbers(text) == version


def test_a_library_that_is_not_installed_has_no_version():
    assert installed_version("torch")
    assert installed_version("no-such-library") is None
