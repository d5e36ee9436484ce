"""Models, a probe and a run with Triton's norms, turns and gates: a program for `triton_cases.by_interpreter`.

TRITON_INTERPRET=1 python triton_models.py models FOLDER     # families of the zoo, learning with and without
TRITON_INTERPRET=1 python triton_models.py run FOLDER        # a probe of the kernels, and two steps of LoRA
"""

from __future__ import annotations

import copy
import io
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.growing_records import write_sky
from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from helpers.zoo_adapters import a_batch
from surefoot.kernels.forms import triton_arithmetic
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.fast import pointwise as fast_pointwise
from surefoot.models.fast.gates import gates
from surefoot.models.fast.pointwise import install
from surefoot.planning.measurements import PointwiseSizes
from surefoot.planning.probes.limits import LIMITS
from surefoot.planning.probes.pointwise import PointwiseRequest, pointwise_trials
from surefoot.report.console import Console
from surefoot.runs.kernel_probes import pointwise_ways
from surefoot.runs.run import train_run

FAMILIES = ("llama3", "qwen2", "gemma2", "mistral", "phi3")


def models(folder: Path) -> dict[str, Any]:
    return {family: _learned(zoo.ZOO[family](folder / family)) for family in FAMILIES}


def _learned(folder: Path) -> dict[str, Any]:
    """gates: how many are found. patched: modules with another forward. fp32: how far gradients are from the plain
    path's. fp16, plain_fp16: under autocast from float64's. undone, again: as fp32, after taking it out, and from those
    with layers that are computed again. broken: as fp32, with gradients of norms and gates that are doubled."""
    by = triton_arithmetic()
    assert by.gates is not None
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain, exact = _gradients(model), _gradients(copy.deepcopy(model).double())
    narrow = partial(_gradients, context=lambda: torch.autocast("cpu", dtype=torch.float16))
    found: dict[str, Any] = {"plain_fp16": _difference(narrow(model), exact)}
    found["gates"] = len(list(gates(model, by.gates)))
    undo = install(model, by)
    ours = _gradients(model)
    found |= {
        "patched": len(_patched(model)),
        "fp32": _difference(ours, plain),
        "fp16": _difference(narrow(model), exact),
    }
    recomputing = copy.deepcopy(model)
    enable_gradient_checkpointing(recomputing)
    found["again"] = _difference(_gradients(recomputing), ours)
    undo()
    found |= {"undone": _difference(_gradients(model), plain), "left": len(_patched(model))}
    right = by.gates.backward
    doubled = replace(by.gates, backward=lambda *given: tuple(2 * one for one in right(*given)))
    install(model, replace(by, gates=doubled, norm_backward=_doubled(by.norm_backward)))
    return found | {"broken": _difference(_gradients(model), plain)}


def _doubled(backward: Any) -> Any:
    def broken(*given: Any, **how: Any) -> Any:
        dx, dw = backward(*given, **how)
        return 2 * dx, dw

    return broken


def _gradients(model: nn.Module, context: Any = nullcontext) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with context():
        loss = sft_loss(model, a_batch()).loss
    loss.backward()
    return {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}


def _difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Of all gradients together, as a share: some, as of a bias of keys, are rounding alone."""
    assert found.keys() == wanted.keys()
    squares = sum(float((found[name] - one).norm() ** 2) for name, one in wanted.items())
    return (squares / sum(float(one.norm() ** 2) for one in wanted.values())) ** 0.5


def _patched(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "forward" in vars(module)]


def run(folder: Path) -> dict[str, Any]:
    """What a probe says of the kernels, right and wrong, and what two steps record."""
    by, sizes = triton_arithmetic(), PointwiseSizes(96, 4, 24, gate=80)
    assert by.gates is not None
    wrong = replace(by, gates=replace(by.gates, forward=lambda gate, up: by.gates.forward(up, gate)))
    LIMITS["cpu"] = replace(LIMITS["cpu"], pointwise_rows=(64, 64))  # that are timed
    request = PointwiseRequest(("norm", "rotary", "gate"), sizes, "fp16", "cpu")
    probed = {
        name: {trial.part: trial.failure for trial in pointwise_trials(request, ways, budget=0.0)}
        for name, ways in (("right", pointwise_ways(by)), ("wrong", pointwise_ways(wrong)))
    }
    write_sky(folder, 8)
    tiny_llama(folder / "base")
    recorded = {way: _trained(folder, way) for way in ("plain", "fused")}
    return {"probed": probed, "recorded": recorded}


CPU = torch.device("cpu")


def _trained(folder: Path, way: str) -> dict[str, Any]:
    """Losses of two steps, and environment.json's record of the path, as if this CPU were a GPU for it."""
    fast_pointwise.arithmetic_for = lambda kind: triton_arithmetic()
    wanted = run_config(
        model=str(folder / "base"),
        data={"train": str(folder / "rows.json"), "max_length": 64},
        output=str(folder / way),
        adapter={"kind": "lora", "rank": 4},
        duration="2 steps",
        batch={"size": 2, "micro": 1},
        kernels={"pointwise": way},
    )
    assert train_run(wanted, "new", Console(io.StringIO()), typed=()) == 0
    [rank] = json.loads((folder / way / "environment.json").read_text())["ranks"]
    log = [json.loads(line) for line in (folder / way / "trainer_log.jsonl").read_text().splitlines()]
    return {"losses": [line["loss"] for line in log if "loss" in line], "path": rank["fast_paths"].get("pointwise")}


def main() -> None:
    asked, folder = sys.argv[1:]
    print(json.dumps({"models": models, "run": run}[asked](Path(folder))))


if __name__ == "__main__":
    main()
