"""`optim.rates`: parts of the weights have a learning rate of their own, as in optimizers of other libraries."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from transformers import get_scheduler

from helpers.faults import raises_fault
from helpers.growing_records import sky_workplace
from helpers.path_runs import path_config, saved_plan, start
from surefoot.config.contradictions import contradictions
from surefoot.runs.make_plan import make_plan
from surefoot.training.engine.base import Stepping

STEPS, LR, RATIO, LIMIT, DECAY = 4, 1e-3, 16.0, 0.05, 0.1
# Weights near 0.1, and steps of 1e-2 in fp32: a few units in the last place of their sums.
ROUNDING = 1e-7
LINEAR = {"lr": LR, "schedule": "linear", "warmup": 0, "max_grad_norm": LIMIT, "weight_decay": DECAY}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return sky_workplace(tmp_path_factory, 12)


def listed(rates: dict[str, float]) -> list[dict[str, Any]]:
    return [{"of": part, "lr": rate} for part, rate in rates.items()]


def loraplus(model: Any) -> torch.optim.Optimizer:
    """PEFT's own LoRA+."""
    more = {"loraplus_lr_ratio": RATIO, "loraplus_weight_decay": DECAY}
    return create_loraplus_optimizer(model, torch.optim.AdamW, lr=LR, betas=(0.9, 0.999), eps=1e-8, **more)


def by_hand(model: Any) -> torch.optim.Optimizer:
    """The head and the norms beside LoRA, each at its rate, as plain param groups."""
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    groups = [
        {"params": [one for name, one in named if "lora_" in name], "lr": LR, "weight_decay": DECAY},
        {"params": [one for name, one in named if "lm_head" in name], "lr": LR / 10, "weight_decay": DECAY},
        {"params": [one for name, one in named if "norm" in name], "lr": LR * 4, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


CASES = {
    "LoRA+": (loraplus, {"lora_B": LR * RATIO}, ["k_proj"]),
    "beside LoRA": (by_hand, {r"^lm_head": LR / 10, r"norm\.weight$": LR * 4}, ["lm_head", "norm"]),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_move_as_in_plain_param_groups(workplace, tmp_path, monkeypatch, name):
    """The same gradients, clipped by the norm of all, at the rates of transformers' schedule."""
    make, rates, saved = CASES[name]
    theirs: dict[str, Any] = {}
    apart: list[float] = []
    apply = Stepping.apply

    def applied(engine: Any, lr: Any, norms: Any, limit: Any) -> None:
        if not theirs:
            theirs["model"] = copy.deepcopy(engine.model)
            theirs["optimizer"] = make(theirs["model"])
            theirs["schedule"] = get_scheduler("linear", theirs["optimizer"], 0, STEPS)
        reference = dict(theirs["model"].named_parameters())
        for key, gradient in engine.gradients().items():
            reference[key].grad = gradient.clone()
        apply(engine, lr, norms, limit)
        torch.nn.utils.clip_grad_norm_(theirs["model"].parameters(), LIMIT)
        theirs["optimizer"].step(), theirs["schedule"].step()
        apart.append(max(float((one - reference[key]).detach().abs().max()) for key, one in engine.parameters.items()))

    monkeypatch.setattr(Stepping, "apply", applied)
    adapter = {"kind": "lora", "rank": 4, "targets": ["q_proj", "v_proj"], "modules_to_save": saved}
    adapter |= {"modules_to_save": []} if name == "LoRA+" else {}
    times = {"duration": f"{STEPS} steps", "adapter": adapter}
    start(path_config(workplace, tmp_path / "run", optim=LINEAR | {"rates": listed(rates)}, **times))
    assert len(apart) == STEPS
    assert max(apart) < ROUNDING
    planned = saved_plan(tmp_path / "run").rates
    assert all(pattern in planned.value for pattern in rates)
    theirs.clear(), apart.clear()
    start(path_config(workplace, tmp_path / "twin", optim=LINEAR, **times))  # twin: one rate for all
    assert max(apart) > 100 * ROUNDING


def test_a_pattern_that_fits_nothing_ends_the_plan(workplace, tmp_path):
    def config(rates, **more):
        return path_config(workplace, tmp_path / "run", optim={"rates": listed(rates)}, **more)

    for rates, more in (({"lm_head": 1e-4}, {}), ({"lora_B": 1e-3}, {"adapter": None}), ({"lora_b": 1e-3}, {})):
        with raises_fault("SF-CONFIG-CONFLICT", "optim.rates"):
            make_plan(config(rates, **more))
    assert make_plan(config({"lora_B": 1e-3, r"layers\.0\..*q_proj": 1e-5}))
    assert make_plan(config({"embed_tokens": 1e-5}, adapter=None))
    assert [problem.key for problem in contradictions(config({"lora_(B": 1e-3}))] == ["optim.rates.0.of"]
