"""A compiled model is held against itself as written before step 1. The compilers are stand-ins that take no time:
the real one trains in the long tier.

torch.compile against eager: the same losses, names and bits after a resume, and no new graph for a new length.
"""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from helpers.clock import settable_clock
from helpers.faults import lines_giving, raises_fault
from helpers.growing_records import sky_workplace
from helpers.model_layouts import run_config
from helpers.path_runs import path_config, start
from helpers.tiny_models import tiny_llama
from helpers.toy_model import bits, same_bits
from surefoot.data.batching.batch import Example, collate
from surefoot.methods.losses.sft import sft_loss
from surefoot.runs import requirements as required
from surefoot.runs import steps
from surefoot.runs.load_models import load_models
from surefoot.runs.make_plan import make_plan
from surefoot.training.optimizer_state import load_optimizer_tensors
from surefoot.training.step import train_step

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


def test_what_gains_nothing_is_a_caution(workplace, tmp_path, compiler, monkeypatch):
    wait = settable_clock(monkeypatch)

    def slow(forward, *args, **kwargs):
        wait(0.2)
        return forward(*args, **kwargs)

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


FUSED_ROUNDING = 5e-6  # fused kernels add in another order; losses are near 6
LENGTHS = (11, 24, 17, 9, 30)


def batches(step):
    draw = np.random.default_rng(step)
    length = LENGTHS[step - 1]
    rows = [Example(draw.integers(0, 300, n), np.ones(n, dtype=bool), n) for n in (length, length - 3)]
    return [collate(rows, 0)]


def built(base, adapter, compile_mode):
    config = run_config(
        model=str(base),
        data={"train": "unused.jsonl", "max_length": 64},
        adapter=adapter,
        precision="fp32",
        compile=compile_mode,
    )
    plan = make_plan(config)
    return load_models(config, plan, Path(base), None)


def run(loaded, first, last):
    """Losses, and the number of graphs after each step."""
    seen = []
    for step in range(first, last + 1):
        report = train_step(
            loaded.engine, sft_loss, batches(step), step=step, lr=1e-3, scale=None, settings=loaded.settings
        )
        seen.append((report.loss, counters["stats"]["unique_graphs"]))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "rank": 4}], ids=["full", "lora"])
def test_compiled_training_is_training(tmp_path, adapter, mode):
    base = tiny_llama(tmp_path / "base", layers=1)
    eager = built(base, adapter, "off")
    wanted = run(eager, 1, len(LENGTHS))
    torch._dynamo.reset()
    counters.clear()
    compiled = built(base, adapter, mode)
    found = run(compiled, 1, 2)
    middle = bits(compiled.engine)
    moments = {name: tensor.clone() for name, tensor in compiled.engine.gather_state().items()}
    found += run(compiled, 3, len(LENGTHS))
    for (loss, _), (same, _) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(same, abs=FUSED_ROUNDING)
    graphs = [count for _, count in found]
    assert 0 < graphs[1] == graphs[-1]  # twin: 0 would be a run that was never compiled
    assert list(compiled.engine.parameters) == list(eager.engine.parameters)
    assert compiled.model.state_dict().keys() == eager.model.state_dict().keys()
    again = built(base, adapter, mode)
    with torch.no_grad():
        for name, parameter in again.engine.parameters.items():
            parameter.copy_(middle[name])
    load_optimizer_tensors(again.engine.optimizer, again.engine.parameters, moments)
    run(again, 3, len(LENGTHS))
    assert same_bits(bits(again.engine), bits(compiled.engine))
