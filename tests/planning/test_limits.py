"""Arithmetic of a step: against a table worked out by hand, and against what torch counts."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from helpers.experts import moe_facts
from helpers.model_layouts import LLAMA31_8B, model_facts
from helpers.plans import adapter_plan
from helpers.tiny_models import tiny_llama
from surefoot.config.sections import AdapterShape
from surefoot.families.model_facts import read_model_facts
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.limits import (
    NO_WORK,
    Work,
    attention_flops,
    layer_flops,
    step_flops,
    work_of,
)
from surefoot.planning.notes import Notes

# GFLOP per token of Llama-3.1-8B by the formulas of the module's docstring, worked out apart and rounded to 0.1.
TABLE = [
    ("lora", 4096, 1.0, 33.7),
    ("lora", 1024, 1.0, 31.3),
    ("lora", 1024, 0.25, 29.1),
    ("full", 4096, 1.0, 48.2),
]


def adapter_of(facts, kind="lora", rank=32, **changes):
    return adapter_plan([module.name for module in facts.layer_linears], kind, rank=rank, **changes)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return model_facts(tmp_path_factory.mktemp("llama"), LLAMA31_8B)


@pytest.mark.parametrize(("kind", "length", "share", "expected"), TABLE)
def test_a_table_worked_out_apart(large, kind, length, share, expected):
    work = work_of([length] * 8, round(8 * length * share))
    adapter = None if kind == "full" else adapter_of(large)
    per_token = step_flops(large, work, adapter).needed / work.tokens / 1e9
    assert round(per_token, 1) == expected


def counted(folder, length, adapter=False):
    """FLOPs that torch sees in a forward and backward pass of one example, attention written out."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    if adapter:
        from surefoot.models.peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, length, dtype=torch.long), use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def test_full_as_torch_counts_it(tmp_path):
    facts = read_model_facts(tiny_llama(tmp_path))
    work = work_of([48], 48)
    found = step_flops(facts, work, None, pruned=False).needed
    causal = attention_flops(facts, work.squares, work.tokens)
    whole = attention_flops(facts, 2 * work.squares, 0)  # written out, both halves are computed
    assert found - 3 * causal + 3 * whole == counted(tmp_path, 48)


def test_lora_as_torch_counts_it(tmp_path):
    facts = read_model_facts(tiny_llama(tmp_path))
    work, rank = work_of([48], 48), 4
    found = step_flops(facts, work, adapter_of(facts, rank=rank)).needed  # no position without label: only the first dX
    causal = attention_flops(facts, work.squares, work.tokens)
    whole = attention_flops(facts, 2 * work.squares, 0)
    into_first = 2 * 3 * facts.hidden * rank * work.tokens  # back through A of the first q, k and v: nobody asks for it
    assert found - 3 * causal + 3 * whole - into_first == counted(tmp_path, 48, adapter=True)


def test_dora_adds_its_row_norms_once_a_step(large):
    work = work_of([512, 100], 200)
    lora, dora = (step_flops(large, work, adapter_of(large, kind)) for kind in ("lora", "dora"))
    shapes = [module.linear for module in large.layer_linears]
    by_hand = sum(2 * 32 * a * b + 2 * 32 * 32 * (a + b) for a, b in shapes)
    assert dora.needed - lora.needed == by_hand
    twice = step_flops(large, work + work, adapter_of(large, "dora"))
    assert twice.needed == pytest.approx(2 * lora.needed + by_hand, rel=1e-12)  # rounding of float sums


def test_what_a_label_and_a_checkpointed_layer_cost(large):
    work = Work(1000, 1000 * 500, 1000)
    plain = step_flops(large, work, adapter_of(large))
    headless = step_flops(large, work, adapter_of(large), head=False)
    assert step_flops(large, work, adapter_of(large), checkpointed=0.5).recomputed == headless.forward / 2
    product = 2 * large.vocab * large.hidden * work.supervised
    assert plain.forward - headless.forward == product
    assert plain.backward - headless.backward == product
    assert step_flops(large, work, adapter_of(large, modules_to_save=("lm_head",))).needed - plain.needed == product
    fewer = step_flops(large, dataclasses.replace(work, supervised=100), adapter_of(large))
    assert fewer.forward < plain.forward
    assert fewer.backward < plain.backward


def test_work_is_summed():
    assert work_of([], 0) == NO_WORK
    assert work_of([3, 4], 2) == Work(7, 25, 2)


def test_twin_a_forgotten_half_of_the_attention_is_noticed(large, monkeypatch):
    monkeypatch.setattr("surefoot.planning.limits.attention_flops", lambda *of: 2 * attention_flops(*of))
    with pytest.raises(AssertionError):
        test_a_table_worked_out_apart(large, "lora", 4096, 1.0, 33.7)


@pytest.mark.parametrize("active", [1, 2])
def test_of_a_mixtures_experts_those_that_a_token_goes_to_are_counted(active, tmp_path):
    facts = moe_facts(tmp_path, "mixtral", num_experts_per_tok=active)
    attention, router, expert = 2 * 32 * 32 + 2 * 32 * 16, 32 * 6, 32 * 96 + 48 * 32
    assert layer_flops(facts, 7) == 2 * 7 * 2 * (attention + router + active * expert)
    plan = plan_adapter(AdapterShape(kind="lora", rank=4), facts, 0, Notes())
    without = dataclasses.replace(plan, parameters=())
    work = Work(tokens=7, squares=49, supervised=7)
    more = step_flops(facts, work, plan, pruned=False).needed - step_flops(facts, work, without, pruned=False).needed
    assert more == 6 * 7 * 2 * 4 * active * (32 + 96 + 48 + 32)
