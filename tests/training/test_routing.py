"""The load-balancing loss of a step against transformers' own on one batch, whichever way the step is split; loads."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from helpers.experts import moe_model
from helpers.toy_model import settings
from surefoot.data.batching.batch import Example, collate, pack
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.facts import is_router, layer_name
from surefoot.models.forward import register
from surefoot.training import routing, step
from surefoot.training.engine import SingleEngine
from surefoot.training.optimizer import adamw, trainable_parameters
from surefoot.training.report import added_loads
from surefoot.training.routing import AUX_LOSS, Balance, Routing, spread
from surefoot.training.state import RunState
from surefoot.training.step import accumulate_gradients, add_gradient, train_step

COEFFICIENT = 0.3
# fp32, sums in another order: a few ulps (6e-8) times the depth of this tiny model.
FP32_RELATIVE = 1e-5
FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe"]


def examples(count: int = 4) -> list[Example]:
    draw = np.random.default_rng(3)
    lengths = [5, 9, 3, 8][:count]
    return [Example(draw.integers(3, 70, n), np.ones(n, dtype=bool), i) for i, n in enumerate(lengths)]


def routed(name: str, attention: str = "eager"):
    model = moe_model(name).train()
    model.set_attn_implementation(attention)
    parameters = trainable_parameters(model)
    engine = SingleEngine(model, parameters, adamw(parameters, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0))
    routers = {layer_name(key): module for key, module in model.named_modules() if is_router(module)}
    watching = dataclasses.replace(settings(), routing=Routing(routers, COEFFICIENT))
    return model, engine, watching


def gradients(engine: SingleEngine) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in engine.parameters.values() if one.grad is not None])


def reference(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """aux_loss of one forward pass over all examples by transformers, and the gradient of the whole loss."""
    model = moe_model(name).train()
    batch = collate(examples(), 0, "left")
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    inputs["position_ids"] = (batch.attention_mask.cumsum(-1) - 1).clamp(min=0)
    out = model(**inputs, output_router_logits=True, use_cache=False)
    logits = out.logits.flatten(0, 1).float()
    loss = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="sum") / batch.weight
    config, routers = model.config, out.router_logits
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    aux = load_balancing_loss_func(routers, experts, config.num_experts_per_tok, batch.attention_mask)
    assert torch.equal(aux, out.aux_loss)
    (loss + COEFFICIENT * aux).backward()
    return aux.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def measured(name: str, split, attention: str = "eager", **changes) -> tuple[torch.Tensor, torch.Tensor]:
    model, engine, chosen = routed(name, attention)
    if changes.pop("recompute", False):
        enable_gradient_checkpointing(model)
    batches = split(examples())
    weight = sum(batch.weight for batch in batches)
    sums = accumulate_gradients(engine, sft_loss, batches, weight=weight, step=1, scale=None, settings=chosen)
    return sums[AUX_LOSS] / weight, gradients(engine)


def by(count: int, side="right"):
    return lambda chosen: [collate(chosen[at : at + count], 0, side) for at in range(0, len(chosen), count)]


SPLITS = {"one batch": by(4), "left padding": by(4, "left"), "two": by(2), "three and one": by(3), "each alone": by(1)}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("split", ["two", "left padding"])
def test_it_is_transformers_own_over_the_step(name, split):
    aux, gradient = measured(name, SPLITS[split])
    expected, wanted = reference(name)
    assert relative(aux, expected) <= FP32_RELATIVE
    assert relative(gradient, wanted) <= FP32_RELATIVE


@pytest.mark.parametrize("split", SPLITS)
def test_neither_split_nor_padding_changes_it(split):
    aux, gradient = measured("mixtral", SPLITS[split])
    expected, wanted = reference("mixtral")
    assert relative(aux, expected) <= FP32_RELATIVE
    assert relative(gradient, wanted) <= FP32_RELATIVE


def test_nor_do_packed_rows_or_layers_that_are_computed_again():
    expected, wanted = reference("mixtral")
    form = register("sdpa")
    for aux, gradient in (
        measured("mixtral", lambda chosen: [pack(chosen[:3]), pack(chosen[3:])], attention=form),
        measured("mixtral", by(2), recompute=True),
    ):
        assert relative(aux, expected) <= FP32_RELATIVE
        assert relative(gradient, wanted) <= FP32_RELATIVE


def test_twins_a_mean_of_the_passes_own_losses_and_padding_that_counts_are_other_numbers(monkeypatch):
    expected, wanted = reference("mixtral")
    with monkeypatch.context() as patch:
        patch.setattr(routing, "_real", lambda rows, count, device: torch.ones(count))
        assert relative(measured("mixtral", by(4))[0], expected) > 10 * FP32_RELATIVE
    real = step._balance

    def of_one(engine, objective, micro_batches, **keywords):
        return real(engine, objective, micro_batches[:1], **keywords)

    monkeypatch.setattr(step, "_balance", of_one)
    aux, gradient = measured("mixtral", by(2))
    assert relative(aux, expected) > 10 * FP32_RELATIVE
    assert relative(gradient, wanted) > 10 * FP32_RELATIVE


def counted(model, batch) -> dict[str, tuple[int, ...]]:
    """By hand: the router's own choice for every real token."""
    chosen: dict[str, list[torch.Tensor]] = {}
    routers = {module: layer_name(key) for key, module in model.named_modules() if is_router(module)}

    def see(router, given, out):
        chosen.setdefault(routers[router], []).append(out[2])

    handles = [module.register_forward_hook(see) for module in routers]
    mask = batch.attention_mask
    with torch.no_grad():
        model(input_ids=batch.input_ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    for handle in handles:
        handle.remove()
    real = mask.flatten().bool()
    return {at: tuple(torch.bincount(one[0][real].flatten(), minlength=6).tolist()) for at, one in chosen.items()}


@pytest.mark.parametrize("split", ["two", "left padding"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen3_moe"])
def test_loads_are_the_tokens_that_went_to_each_expert(name, split):
    model, engine, chosen = routed(name)
    chosen = dataclasses.replace(chosen, routing=Routing(chosen.routing._routers))  # without the loss
    expected = counted(model, collate(examples(), 0, "left"))
    chosen.routing._counted["left over"] = torch.ones(2)  # of a trial before the step
    report = train_step(engine, sft_loss, SPLITS[split](examples()), step=1, lr=1e-3, scale=None, settings=chosen)
    assert report.load == expected
    assert AUX_LOSS not in report.metrics
    busiest = max(max(one) * 6 / sum(one) for one in expected.values())
    assert report.metrics["expert_busiest"] == pytest.approx(busiest)
    assert report.metrics["experts_idle"] == sum(one.count(0) for one in expected.values())
    state = RunState().after_step(report).after_step(dataclasses.replace(report, step=2))
    assert state.load == {at: tuple(2 * number for number in one) for at, one in expected.items()}
    assert RunState.from_json(state.to_json() | {"guard": RunState().to_json()["guard"]}).load == state.load


def test_a_blank_batch_adds_up_what_the_others_do(monkeypatch):
    """A rank that has no other would else send fewer numbers than the rest, and all would wait for each other."""
    _, engine, chosen = routed("mixtral")
    balance = Balance(COEFFICIENT, torch.ones(6), 50.0)
    whole = collate(examples(), 0)

    def found(batch):
        sums = add_gradient(engine, sft_loss, batch, weight=17, scale=None, settings=chosen, balance=balance)
        return list(sums), chosen.routing.take(), gradients(engine)

    sums, loads, gradient = found(whole)
    names, none, after = found(whole.blank())
    assert names == sums
    assert none == {name: [0.0] * len(load) for name, load in loads.items()}
    assert torch.equal(after, gradient)
    count = Routing.count
    monkeypatch.setattr(Routing, "count", lambda self, seen, rows: rows.lengths and count(self, seen, rows))
    assert found(whole.blank())[1].keys() != loads.keys()  # twin


def test_loads_add_up_and_their_spread_is_that_of_the_worst_layer():
    assert added_loads({}, {"0": (1, 2)}) == {"0": (1, 2)}
    assert added_loads({"0": (1, 2)}, {"0": (3, 4), "1": (5, 0)}) == {"0": (4, 6), "1": (5, 0)}
    assert spread({"0": (2, 2), "1": (0, 4)}) == {"expert_busiest": 2.0, "experts_idle": 1.0}
    assert spread({}) == {}


def test_a_pass_begins_when_nothing_of_the_one_before_is_held():
    """Neither in the passes that count where tokens go nor in those with gradients: two passes' activations at once
    would be twice the memory of a step."""
    _, engine, chosen = routed("mixtral")
    held, at_start = weakref.WeakSet(), []

    class Saved:
        def __init__(self, tensor: torch.Tensor):
            self.tensor = tensor.detach()  # with its graph it would hold itself
            held.add(self)

    def watched(model, batch):
        at_start.append(len(held))
        return sft_loss(model, batch)

    batches = by(1)(examples(3))
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        accumulate_gradients(engine, watched, batches, weight=17, step=1, scale=None, settings=chosen)
    assert at_start == [0] * (2 * len(batches))
