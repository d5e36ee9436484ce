"""PiSSA and OLoRA against PEFT: first values, unchanged answers, and a folder for the unchanged base."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from helpers.faults import raises_fault
from helpers.plans import adapter_plan, linear_names
from helpers.tiny_models import tiny_llama
from helpers.zoo import ZOO
from surefoot.models.adapters import add_adapter
from surefoot.models.save import adapter_tensors, remember_start, resume_started, save_adapter
from surefoot.planning.plan import ZERO

RANK, ALPHA, SEED = 4, 6.0, 7
FP32 = 2e-5  # products of tiny matrices in fp32, in two orders
IDS = torch.arange(5, 29).reshape(2, 12)
CASES = [
    ("llama", "pissa", False),
    ("llama", "pissa_niter_4", True),
    ("gpt2", "pissa", True),
    ("llama", "olora", False),
]


def opened(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def moved(model):
    """After what stands for training: other numbers in A and B."""
    draw = torch.Generator().manual_seed(1)
    for name, one in model.named_parameters():
        if "lora_" in name:
            one.data += 0.1 * torch.randn(one.shape, generator=draw)
    return model


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= FP32 * other.abs().max())


@pytest.mark.parametrize(("family", "start", "rslora"), CASES)
def test_against_peft(tmp_path, family, start, rslora):
    base = tmp_path / "base"
    tiny_llama(base) if family == "llama" else ZOO["gpt2"](base)
    model = opened(base)
    turned = [name for name, one in model.named_modules() if isinstance(one, Conv1D)]
    names = [*linear_names(model), *turned]
    plan = replace(adapter_plan(names, rank=RANK, alpha=ALPHA, rslora=rslora), start=start)
    ours = add_adapter(model, plan, seed=SEED, base=str(base))
    torch.manual_seed(SEED)
    shape = LoraConfig(
        r=RANK, lora_alpha=6, target_modules=names, use_rslora=rslora, init_lora_weights=start,
        fan_in_fan_out=bool(turned), task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = get_peft_model(opened(base), shape)
    wanted = dict(theirs.named_parameters())
    assert all(torch.equal(one, wanted[name]) for name, one in ours.named_parameters())
    untouched = opened(base)
    assert close(logits(ours), logits(untouched))
    assert not torch.equal(dict(ours.named_parameters())[f"base_model.model.{names[0]}.base_layer.weight"],
                           untouched.get_submodule(names[0]).weight)  # fmt: skip

    remember_start(ours)
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "first")
    theirs.peft_config["default"].init_lora_weights = start
    trained = logits(moved(ours))
    save_adapter(ours, tmp_path / "ours", save_embedding=False)
    moved(theirs).save_pretrained(tmp_path / "theirs", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    for name in ("ours", "theirs"):
        again = PeftModel.from_pretrained(opened(base), tmp_path / name)
        assert again.peft_config["default"].r == 2 * RANK
        assert close(logits(again), trained)
    assert not close(logits(untouched), trained)  # twin

    back = add_adapter(opened(base), replace(plan, start=ZERO), seed=SEED, base=str(base))
    resume_started(back, tmp_path / "ours", save_embedding=False)
    now = dict(back.named_parameters())
    assert all(torch.equal(one, now[name]) for name, one in ours.named_parameters())
    save_adapter(back, tmp_path / "again", save_embedding=False)
    assert all(
        (tmp_path / "again" / one.name).read_bytes() == one.read_bytes() for one in (tmp_path / "ours").iterdir()
    )
    assert adapter_tensors(back, False).keys() == adapter_tensors(ours, False).keys()


def test_a_transposed_layer_has_no_olora(tmp_path):
    model = opened(ZOO["gpt2"](tmp_path / "base"))
    turned = [name for name, one in model.named_modules() if isinstance(one, Conv1D)]
    with raises_fault("SF-CONFIG-CONFLICT", "adapter.start"):
        add_adapter(model, replace(adapter_plan(turned), start="olora"), seed=SEED, base="base")
