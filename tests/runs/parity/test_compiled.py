"""A compiled model is held against itself as written before step 1. The compilers are stand-ins that take no time:
`test_compile.py` has the real one."""

import json
import re
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from helpers.faults import lines_giving, raises_fault
from helpers.growing_records import sky_workplace
from helpers.path_runs import path_config, start
from surefoot.runs import requirements as required
from surefoot.runs import steps

DIFFERENT = 1.02  # within what bf16 allows, and far outside of what fp32 does


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return sky_workplace(tmp_path_factory, 16, layers=1)


def train(workplace, output, mode="new", **way):
    usual = {"adapter": {"kind": "lora", "rank": 16}, "batch": {"size": 8, "micro": 4}, "compile": "default"}
    said = start(path_config(workplace, output, precision="fp32", **(usual | way)), mode)
    return json.loads((output / "plan.json").read_text())["verified"], said


@pytest.fixture
def compiler(monkeypatch):
    """A stand-in for torch.compile: `compiler(run)` has run(forward, *args, **kwargs) take a forward pass's place."""
    written = [False]

    @contextmanager
    def stance(name):
        assert name == "force_eager"
        written[0] = True
        yield
        written[0] = False

    def with_run(run):
        def compile(self, mode, dynamic):
            assert (mode, dynamic) == ("default", True)
            own = self._call_impl
            self._compiled_call_impl = lambda *args, **kwargs: (
                own(*args, **kwargs) if written[0] else run(own, *args, **kwargs)
            )

        monkeypatch.setattr(nn.Module, "compile", compile)

    monkeypatch.setattr(required, "compiler_obstacle", lambda kind: "")
    monkeypatch.setattr(torch.compiler, "set_stance", stance)
    return with_run


def same(forward, *args, **kwargs):
    return forward(*args, **kwargs)


def slow(forward, *args, **kwargs):
    time.sleep(0.2)
    return forward(*args, **kwargs)


def wrong(forward, *args, **kwargs):
    found = forward(*args, **kwargs)
    found.last_hidden_state = found.last_hidden_state * DIFFERENT
    return found


def broken(forward, *args, **kwargs):
    raise RuntimeError("no such instruction\nand forty lines more")


def test_it_is_tried_recorded_and_told(workplace, tmp_path, compiler):
    compiler(same)
    verified, said = train(workplace, tmp_path / "run")
    tried = verified["compile"]
    assert tried["used"]
    assert not tried["outside"]
    assert all(tried["differs"][name] <= limit == 1e-3 for name, limit in tried["limits"].items())
    assert min(tried["seconds"], tried["eager_seconds"]) > 0
    assert lines_giving(said, "compile:", "default")


def test_what_gains_nothing_is_a_caution(workplace, tmp_path, compiler):
    compiler(slow)
    _, said = train(workplace, tmp_path / "run")
    assert lines_giving(said, "caution:", "compile:", "default")


def test_twin_code_that_computes_something_else_ends_the_run_before_step_1(workplace, tmp_path, compiler):
    compiler(wrong)
    with raises_fault("SF-FAST-PATH", "compile", "default"):
        train(workplace, tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_compiler_that_fails_is_one_line(workplace, tmp_path, compiler):
    compiler(broken)
    with raises_fault("SF-FAST-PATH", "compile", "default", "instruction", remedy=["off"]):
        train(workplace, tmp_path / "run")


def test_a_resumed_run_stays_with_it(workplace, tmp_path, compiler):
    compiler(same)
    train(workplace, tmp_path / "run")
    compiler(wrong)
    _, said = train(workplace, tmp_path / "run", mode="resume", duration="3 steps")
    assert any(re.search(r" 0\.0\d", line) for line in lines_giving(said, "caution:", "compile:", "default"))


def test_what_is_not_compiled_is_not_tried(workplace, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "try_compiled", None)
    train(workplace, tmp_path / "run", compile="off")
