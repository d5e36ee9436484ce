"""What went wrong in a run that compiles is run again: a step that is not finite as the model is written, where modules
can be watched, and a step that ended its process as it was compiled. The compiler is torch's own, up to the code that
it writes, which takes a minute: its graphs are run as they are."""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch._dynamo.utils import counters

from helpers.trained_runs import heron_folder, heron_train
from surefoot.commands.main import main
from surefoot.report import journal
from surefoot.report.flight import FLIGHT, recent
from surefoot.runs.failures.replay_run import rerun_step
from surefoot.training import diagnose
from surefoot.training import loop as loop_module
from surefoot.training.failure import read_failure

pytestmark = pytest.mark.slow  # tracing takes half a minute of processor time a run
BAD_STEP = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return heron_folder(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    real = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda own, mode, dynamic: real(own, backend="eager", dynamic=dynamic))
    counters.clear()
    yield
    torch._dynamo.reset()


def train(folder, name, **changes):
    ways = {"duration": "6 steps", "checkpoint": {"every": "2 steps"}, "guard": {"max_consecutive": 2}}
    return heron_train(folder, name, **(ways | {"compile": "default", "precision": "fp32"} | changes))


def spoilt_from(step, patch):
    real = loop_module.train_step

    def spoilt(engine, *arguments, **named):
        if named["step"] == step:
            bad = next(one for name, one in engine.parameters.items() if "layers.1.mlp.up_proj.lora_B" in name)
            bad.data[0, 0] = float("nan")
        return real(engine, *arguments, **named)

    patch.setattr(loop_module, "train_step", spoilt)


def test_a_step_that_is_not_finite_is_looked_into_as_the_model_is_written(folder, monkeypatch):
    with monkeypatch.context() as patch:
        spoilt_from(BAD_STEP, patch)
        result = train(folder, "weight")
    assert result.exit_code == 5, result.output
    assert counters["stats"]["unique_graphs"] > 0
    kept = folder / "weight" / f"failure-{BAD_STEP}"
    origin = read_failure(kept).failure.finding.origin
    assert origin.module.endswith("layers.1.mlp.up_proj.lora_B.default")
    result = CliRunner().invoke(main, ["replay", str(kept), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["same_bits"]


def test_twin_a_look_at_compiled_code_does_not_find_it(folder, monkeypatch):
    with monkeypatch.context() as patch:
        spoilt_from(BAD_STEP, patch)
        patch.setattr(diagnose, "eager_mode", lambda model: nullcontext())
        train(folder, "twin")
    finding = read_failure(folder / "twin" / f"failure-{BAD_STEP}").failure.finding
    assert not (finding.origin and finding.origin.module.endswith("lora_B.default"))


def test_a_killed_step_is_taken_again_compiled_bit_for_bit(folder):
    assert train(folder, "whole").exit_code == 0
    whole, died = folder / "whole", folder / "died"
    shutil.copytree(whole, died, ignore=shutil.ignore_patterns("checkpoint-4", "checkpoint-6"))
    (begun,) = [line for line in journal.salvage(whole / FLIGHT)[0] if line.get("begins") == 4]
    heard: dict[str, str] = {}
    entered = set()

    def tell(word, text):
        heard[word] = text
        if word == "enters":
            entered.add(text)

    torch._dynamo.reset()
    counters.clear()
    rerun_step(died, begun, tell)
    assert counters["stats"]["unique_graphs"] > 0
    lines = {line["step"]: line for line in recent(whole)}
    numbers = [json.loads(heard["done"])[name] for name in ("loss", "grad_norm")]
    assert (heard["starts"], numbers) == ("2", [lines[4]["loss"], lines[4]["grad_norm"]])
    assert numbers != [lines[3]["loss"], lines[3]["grad_norm"]]  # twin
    assert "base_model.model.model" in entered  # the decoder, which is one piece of code
