"""`adapter.modules_to_save: rest`: LoRA, and beside it everything that has none, each at its rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from helpers.growing_records import sky_workplace
from helpers.model_layouts import run_config
from helpers.path_runs import path_config, start
from helpers.tiny_models import tiny_llama
from surefoot.runs.load_models import load_models
from surefoot.runs.make_plan import make_plan

RANK, LR, LORA_LR, DECAY, BETAS = 4, 1e-4, 1e-2, 0.1, [0.9, 0.95]
# Gradients of the same products in another order differ by some 1e-6 of the largest; AdamW divides each by its size.
GRADIENTS, WEIGHTS = 1e-5, 1e-5
ADAPTER = {"kind": "lora", "rank": RANK, "alpha": 1.0, "targets": ["layers."], "modules_to_save": "rest"}
OPTIM = {"lr": LR, "weight_decay": DECAY, "betas": BETAS, "rates": [{"of": "lora_", "lr": LORA_LR}]}


class Factors(nn.Module):
    """DeepSpeed-Chat's layer: W x + (x R L) / rank, W frozen. R [inputs, rank], L [rank, outputs]."""

    def __init__(self, linear: nn.Linear, right: torch.Tensor, left: torch.Tensor):
        super().__init__()
        self.weight = linear.weight.requires_grad_(False)
        self.right, self.left = nn.Parameter(right.clone()), nn.Parameter(left.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + (x @ self.right @ self.left) / RANK


def reference(base: Path, ours: dict[str, torch.Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model as DeepSpeed-Chat trains it without only_optimize_lora, and its groups of parameters."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, module in [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]:
        if "layers." in name:
            layer = Factors(module, ours[f"{name}.lora_A.weight"].T, ours[f"{name}.lora_B.weight"].T)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer)
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    factors = [name for name in named if name.endswith((".right", ".left"))]
    norms = [name for name in named if "norm" in name]
    others = [name for name in named if name not in (*factors, *norms)]
    groups = [
        {"params": [named[name] for name in names], "weight_decay": decay, "lr": lr}
        for names, decay, lr in ((others, DECAY, LR), (norms, 0.0, LR), (factors, DECAY, LORA_LR))
    ]
    return model, torch.optim.AdamW(groups, betas=(0.9, 0.95))


def plain(name: str) -> str:
    """A parameter's name without PEFT's additions."""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "").replace(".default", "")


def theirs(model: nn.Module, grad: bool) -> dict[str, torch.Tensor]:
    names = {".right": ".lora_A.weight", ".left": ".lora_B.weight"}
    found = {}
    for name, one in model.named_parameters():
        if one.requires_grad:
            value = one.grad if grad else one.detach()
            end = next((end for end in names if name.endswith(end)), "")
            found[name.removesuffix(end) + names[end] if end else name] = value.T if end else value
    return found


def furthest(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The largest distance, in units of the largest number of each tensor."""
    assert ours.keys() == others.keys()
    return max(float((ours[name] - others[name]).abs().max() / others[name].abs().max()) for name in ours)


def steps(base: Path, *, adapter: dict[str, Any] | None = None, **optim: Any) -> tuple[float, float]:
    """Return how far gradients and weights are from the reference's, at most, over three steps."""
    data = {"train": "unused.jsonl", "max_length": 64}
    config = run_config(model=str(base), data=data, adapter=ADAPTER | (adapter or {}), optim=OPTIM | optim)
    loaded = load_models(config, make_plan(config), base, None)
    engine = loaded.engine
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():  # away from zero, so that both factors have gradients
        for name, one in engine.parameters.items():
            if "lora_B" in name:
                one.copy_(torch.randn(one.shape, generator=draw) / 10)
    model, optimizer = reference(base, {plain(name): one.detach() for name, one in engine.parameters.items()})
    gradients = weights = 0.0
    for _ in range(3):
        ids = torch.randint(3, 60, (2, 12), generator=draw)
        engine.backward(loaded.model(input_ids=ids, labels=ids).loss, None)
        model(input_ids=ids, labels=ids).loss.backward()
        ours = {plain(name): one for name, one in engine.gradients().items()}
        gradients = max(gradients, furthest(ours, theirs(model, True)))
        engine.apply(LR, engine.grad_norms(), None)
        optimizer.step(), optimizer.zero_grad()
        now = {plain(name): one.detach() for name, one in engine.parameters.items()}
        weights = max(weights, furthest(now, theirs(model, False)))
    return gradients, weights


def test_it_is_deepspeed_chats_lora_with_everything_else(tmp_path):
    base = tiny_llama(tmp_path / "base")
    gradients, weights = steps(base)
    assert (gradients < GRADIENTS, weights < WEIGHTS) == (True, True), (gradients, weights)
    assert steps(base, rates=[])[1] > 100 * WEIGHTS  # twin: one rate
    with pytest.raises(AssertionError):  # twin: the norms stay frozen
        steps(base, adapter={"modules_to_save": ["embed_tokens", "lm_head"]})


def saved(base: Path, stage: str = "sft", **adapter: Any) -> tuple[str, ...]:
    data = {"train": "unused.jsonl"}
    plan = make_plan(run_config(stage=stage, model=str(base), data=data, adapter=ADAPTER | adapter))
    assert plan.adapter is not None
    return plan.adapter.modules_to_save


NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


def test_which_modules_have_no_adapter(tmp_path):
    base, tied = tiny_llama(tmp_path / "base"), tiny_llama(tmp_path / "tied", tied=True)
    assert saved(base) == ("embed_tokens", *NORMS, "lm_head")
    assert set(saved(tied)) - {"lm_head"} == {"embed_tokens", *NORMS}
    assert saved(base, stage="reward") == ("embed_tokens", *NORMS)
    few = saved(base, targets=["q_proj", "v_proj"])
    assert {"k_proj", "o_proj", "up_proj"} <= set(few)
    assert not {"q_proj", "v_proj"} & set(few)
    one = saved(base, targets=["model.layers.0.self_attn.q_proj"])  # q_proj of the other layer trains in full
    assert "model.layers.1.self_attn.q_proj" in one
    assert "model.layers.0.self_attn.q_proj" not in one


def test_all_of_it_is_published(tmp_path_factory, tmp_path):
    workplace = sky_workplace(tmp_path_factory, 12)
    wanted = path_config(workplace, tmp_path / "run", adapter=ADAPTER | {"publish": "merged"}, optim={"lr": 1e-2})
    start(wanted)
    before, after = (load_file(f"{folder}/model.safetensors") for folder in (wanted.model.path, tmp_path / "run"))
    checkpoint = load_file(tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors")
    trained = {plain(name): one for name, one in checkpoint.items()}
    for name, one in after.items():
        if name in trained:
            assert torch.equal(one, trained[name]), name
        else:
            layer = name.removesuffix(".weight")
            change = trained[f"{layer}.lora_B.weight"] @ trained[f"{layer}.lora_A.weight"] / RANK
            assert torch.allclose(one, before[name] + change, atol=1e-6), name
        assert not torch.equal(one, before[name]), name
