"""torch.compile against eager: the same losses, names and bits after a resume, and no new graph for a new length."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from helpers.toy_model import bits, same_bits
from surefoot.data.batching.batch import Example, collate
from surefoot.methods.losses.sft import sft_loss
from surefoot.runs.load_models import load_models
from surefoot.runs.make_plan import make_plan
from surefoot.training.optimizer_state import load_optimizer_tensors
from surefoot.training.step import train_step

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
