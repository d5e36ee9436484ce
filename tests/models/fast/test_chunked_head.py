"""The chunked loss in real models: every family against the plain path, and those that it must keep away from."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from helpers.architectures import TINY, build
from helpers.faults import gives
from helpers.plans import adapter_plan, linear_names
from helpers.tiers import diagonal
from surefoot.data.batching.batch import Example, collate
from surefoot.methods.losses.logprobs import token_logprobs
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.adapters import add_adapter
from surefoot.models.fast import chunked_head as chunked_head_module
from surefoot.models.fast.chunked_head import chunked_head, head_obstacle, loss_path
from surefoot.models.forward import hidden_at, output_head

FP32 = 1e-5  # the same sums in another order
BF16 = 2e-2  # gradients of 8 bits, which the plain path multiplies by the loss's factor before it rounds
# Gemma 2 caps its logits. Cohere multiplies them by a number; Granite divides.
CHANGED = ("gemma2", "cohere", "granite")
SCALED = {
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "granite": {"model_type": "granite", "logits_scaling": 8.0},
}
_SIZES = {key: TINY["llama"][key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}


def model_of(name, kind="full"):
    config = TINY.get(name) or _SIZES | SCALED[name] | {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = build(config | {"use_cache": False}, device="cpu")
    if kind != "full":
        model = add_adapter(model, adapter_plan(linear_names(model), kind), seed=1, base="base")
    return model.eval()  # without the dropout that some families have


def batch_of(*lengths):
    draw = np.random.default_rng(2)
    return collate([Example(draw.integers(4, 60, n), np.arange(n) >= n // 3, i) for i, n in enumerate(lengths)], 0)


BATCH = batch_of(9, 23, 17)


def measured(model, loss):
    model.zero_grad()
    found = loss(model)
    found.backward()
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def summed(model):
    return sft_loss(model, BATCH).loss / BATCH.weight


def weighed(model):
    """Answers count for different amounts, as in DPO."""
    return (token_logprobs(model, BATCH).sum(1) * torch.tensor([0.3, -1.0, 0.7])).sum()


def difference(one, two):
    assert one[1].keys() == two[1].keys()
    whole = max(float(gradient.norm()) for gradient in one[1].values())
    shares = [
        float((two[1][name] - one[1][name]).norm()) / max(float(one[1][name].norm()), 1e-3 * whole) for name in one[1]
    ]
    return max([abs(float((two[0] - one[0]) / one[0])), *shares])


CASES = [(name, "full") for name in sorted({*TINY, *CHANGED})]
CASES += [("llama", "lora"), ("opt", "lora"), ("qwen2", "dora"), ("gemma2", "lora"), ("granite", "lora")]


@pytest.mark.parametrize(("case", "loss"), diagonal(CASES, [summed, weighed]))
def test_every_family(case, loss):
    name, kind = case
    model = model_of(name, kind)
    assert not head_obstacle(model)
    plain = measured(model, loss)
    undo = loss_path(5).install(model)
    assert difference(plain, measured(model, loss)) <= FP32
    undo()
    assert chunked_head(model) is None


@pytest.mark.parametrize("case", ["llama full", "llama lora", "llama dora", "gemma2 lora", "granite full"])
def test_under_autocast(case):
    model = model_of(*case.split())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = measured(model, summed)
        loss_path(5).install(model)
        assert difference(plain, measured(model, summed)) <= BF16


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_that_changes_its_logits_otherwise_than_config_json_says_is_left_alone(name, monkeypatch):
    model = model_of(name)
    monkeypatch.setattr(chunked_head_module, "read_logit_change", lambda get: (1.0, None))
    assert head_obstacle(model)
    assert loss_path(5).obstacle(model) == head_obstacle(model)
    plain = measured(model, summed)
    loss_path(5).install(model)  # the twin: what would happen without the obstacle
    assert difference(plain, measured(model, summed)) > FP32


def test_a_head_with_an_adapter_is_left_alone():
    base = model_of("llama")
    names = [*linear_names(base), "lm_head"]
    model = add_adapter(base, adapter_plan(names, "lora"), seed=1, base="base")
    assert gives(head_obstacle(model), type(model.get_output_embeddings()).__name__)


def test_a_head_with_a_hook_is_left_alone():
    model = model_of("llama")
    hook = output_head(model).register_forward_hook(lambda *given: None)
    assert "has hooks" in head_obstacle(model)
    hook.remove()
    assert not head_obstacle(model)


def test_the_trial_leaves_no_trace():
    model = model_of("llama").train()
    before = measured(model, summed)
    assert not head_obstacle(model)
    assert model.training
    assert not output_head(model)._forward_hooks
    assert difference(before, measured(model, summed)) == 0


def modes_after_the_trial():
    """Of a model, of which one layer alone is held in the other mode, before and after the trial."""
    model = model_of("llama").train()
    model.get_submodule("model.layers.0").eval()
    before = {name: module.training for name, module in model.named_modules()}
    head_obstacle(model)
    return before, {name: module.training for name, module in model.named_modules()}


def test_the_trial_leaves_every_module_in_its_mode():
    before, after = modes_after_the_trial()
    assert len(set(before.values())) == 2
    assert after == before


def test_twin_one_mode_for_the_whole_model_would_be_seen(monkeypatch):
    @contextmanager
    def whole(model):
        was_training = model.training
        model.eval()
        yield
        model.train(was_training)

    monkeypatch.setattr(chunked_head_module, "eval_mode", whole)
    before, after = modes_after_the_trial()
    assert after != before


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_evaluation_counts_first_choices(name):
    model = model_of(name)
    with torch.no_grad():
        plain = sft_loss(model, BATCH)
        loss_path(5).install(model)
        ours = sft_loss(model, BATCH)
    assert ours.sums["correct"] == plain.sums["correct"]
    assert float(ours.loss) == pytest.approx(float(plain.loss), rel=FP32)


def test_a_head_that_trains_takes_the_plain_path_where_answers_are_weighed(monkeypatch):
    model = model_of("llama")
    loss_path(5).install(model)
    monkeypatch.setattr("surefoot.methods.losses.logprobs.token_losses", None)
    measured(model, weighed)
    for parameter in output_head(model).parameters():
        parameter.requires_grad_(False)
    with pytest.raises(TypeError):  # the twin: a frozen one does not
        measured(model, weighed)


def test_hidden_states_of_other_places_would_be_seen(monkeypatch):
    """The twin of the families above."""
    model = model_of("llama")
    plain = measured(model, summed)
    loss_path(5).install(model)
    monkeypatch.setattr(
        "surefoot.methods.losses.sft.hidden_at", lambda model, batch, places: hidden_at(model, batch, places.roll(1))
    )
    assert difference(plain, measured(model, summed)) > FP32
