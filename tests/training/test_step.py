"""The one step: exact under any split, and untouched by anything non-finite."""

import dataclasses

import pytest
import torch
from torch import nn

from helpers.faults import gives
from helpers.toy_model import bits, same_bits, settings, toy_batches, toy_engine, toy_examples, toy_loss
from surefoot.training import step as step_module
from surefoot.training.objective import LossSum
from surefoot.training.state import LossScale
from surefoot.training.step import draw_seed, seed_micro_batch, train_step

# Sums of some dozens of fp32 terms in another order.
REORDERED_SUM = 2e-6


def run_steps(micro, steps=3, order=None, side="right", objective=toy_loss):
    engine, examples = toy_engine(), toy_examples(12)
    examples = [examples[i] for i in order] if order else examples
    losses = [
        train_step(
            engine, objective, toy_batches(examples, micro, side), step=n, lr=0.05, scale=None, settings=settings()
        ).loss
        for n in range(1, steps + 1)
    ]
    return losses, engine


def distance(a, b):
    weights = zip(a[1].model.parameters(), b[1].model.parameters(), strict=True)
    return max(
        *(abs(x - y) for x, y in zip(a[0], b[0], strict=True)), *((p - q).abs().max().item() for p, q in weights)
    )


@pytest.mark.parametrize("change", [{"micro": 1}, {"micro": 5}, {"side": "left"}, {"order": list(range(11, -1, -1))}])
def test_split_padding_side_and_order_do_not_change_the_result(change):
    assert distance(run_steps(12), run_steps(**{"micro": 12, **change})) < REORDERED_SUM


def test_twin_mean_of_micro_batch_means_is_noticed():
    def mean_loss(model, batch):
        return LossSum(toy_loss(model, batch).loss / batch.weight)

    assert distance(run_steps(12, objective=mean_loss), run_steps(5, objective=mean_loss)) > REORDERED_SUM


def test_clips_as_torch_does():
    engine, reference = toy_engine(), toy_engine()
    batches = toy_batches(toy_examples(8), 8)
    report = train_step(engine, toy_loss, batches, step=1, lr=0.1, scale=None, settings=settings(max_grad_norm=0.01))
    (toy_loss(reference.model, batches[0]).loss / batches[0].weight).backward()
    norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.01)
    for group in reference.optimizer.param_groups:
        group["lr"] = 0.1
    reference.optimizer.step()
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert same_bits(dict(engine.model.state_dict()), dict(reference.model.state_dict()))


@pytest.mark.parametrize(("ceiling", "limit"), [(0.05, 0.05), (0.05, None), (0.5, 0.01), (1e9, 0.01)])
def test_a_spike_is_cut_to_the_ceiling_where_clipping_does_not_cut_it_more(ceiling, limit):
    batches = toy_batches(toy_examples(8), 8)
    cut, clipped = toy_engine(), toy_engine()
    report = train_step(
        cut, toy_loss, batches, step=1, lr=0.1, scale=None, settings=settings(max_grad_norm=limit), ceiling=ceiling
    )
    assert report.spike == (ceiling if report.grad_norm > ceiling else None)
    lowest = min(one for one in (ceiling, limit) if one is not None)
    train_step(clipped, toy_loss, batches, step=1, lr=0.1, scale=None, settings=settings(max_grad_norm=lowest))
    for one, other in zip(cut.model.parameters(), clipped.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=REORDERED_SUM, atol=REORDERED_SUM)


class Poison(torch.autograd.Function):
    """Identity forward; the gradient becomes NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def nan_loss(model, batch):
    return LossSum(toy_loss(model, batch).loss * float("nan"))


def nan_gradient(model, batch):
    return LossSum(Poison.apply(toy_loss(model, batch).loss))


def step_after_warm_up(objective, scale=None):
    """One good step, so that moments exist, then one with `objective`; returns report, bits before and after."""
    engine, batches = toy_engine(), toy_batches(toy_examples(6), 2)
    train_step(engine, toy_loss, batches, step=1, lr=0.1, scale=scale, settings=settings())
    before = bits(engine)
    report = train_step(engine, objective, batches, step=2, lr=0.1, scale=scale, settings=settings())
    return report, before, bits(engine)


@pytest.mark.parametrize(("objective", "what"), [(nan_loss, "loss"), (nan_gradient, "grad_norm")])
def test_a_non_finite_step_changes_neither_weights_nor_moments(objective, what):
    report, before, after = step_after_warm_up(objective)
    assert (report.decision, report.non_finite) == ("non_finite", what)
    assert report.grad_norm is None
    assert (report.loss is None) == (what == "loss")
    assert same_bits(before, after)


@pytest.mark.parametrize("objective", [nan_loss, nan_gradient])
def test_twin_without_the_guard_the_weights_are_lost(objective, monkeypatch):
    monkeypatch.setattr(step_module, "judge", lambda *a, **k: ("stepped", None))
    _, before, after = step_after_warm_up(objective)
    assert not same_bits(before, after)


def test_an_fp16_overflow_is_the_scalers_business_until_the_floor():
    def overflow(model, batch):
        return LossSum(toy_loss(model, batch).loss * 1e35)

    report, before, after = step_after_warm_up(overflow, LossScale())
    assert report.decision == "scaler"
    assert report.scale == 65536.0
    assert report.loss is not None
    assert same_bits(before, after)
    report, _, _ = step_after_warm_up(nan_gradient, LossScale(1.0))
    assert report.decision == "non_finite"


def test_scaling_by_a_power_of_two_is_exact():
    (_, _, plain), (_, _, scaled) = (step_after_warm_up(toy_loss, scale) for scale in (None, LossScale(1024.0)))
    assert same_bits(plain, scaled)
    _, _, other = step_after_warm_up(toy_loss, LossScale(1000.0))
    assert not same_bits(plain, other)  # twin: a scale that is no power of two is noticed


def test_dropout_is_a_function_of_seed_step_and_micro_batch():
    def losses(seed, noise):
        engine = toy_engine(dropout=0.5)
        torch.manual_seed(noise)  # what the process drew before must not matter
        batches = toy_batches(toy_examples(6), 2)
        return [
            train_step(engine, toy_loss, batches, step=n, lr=0.0, scale=None, settings=settings(seed)).loss
            for n in (1, 2)
        ]

    assert losses(1, noise=0) == losses(1, noise=99)
    assert losses(1, noise=0) != losses(2, noise=0)
    assert len(set(losses(1, noise=0))) == 2


def test_without_an_accelerator_draws_are_those_of_torchs_own_seeding(monkeypatch):
    """Which is asked where there is one, for the generators of all devices."""
    asked = []
    own = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda number: asked.append(number) or own(number))
    draws = []
    for there in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda there=there: there)
        seed_micro_batch(3, 2, 1)
        draws.append(torch.rand(4))
    assert torch.equal(*draws)
    assert asked == [draw_seed(3, 2, 1)]
    seed_micro_batch(3, 2, 2)
    assert not torch.equal(torch.rand(4), draws[0])


def test_report_counts_what_was_seen():
    engine, examples = toy_engine(), toy_examples(5)
    report = train_step(engine, toy_loss, toy_batches(examples, 2), step=1, lr=0.1, scale=None, settings=settings())
    assert report.tokens == sum(len(e.ids) for e in examples)
    assert report.weight == sum(int(e.supervised[1:].sum()) for e in examples)
    assert report.examples == (0, 1, 2, 3, 4)
    assert dataclasses.is_dataclass(report)


def with_ratio(model, batch):
    found = toy_loss(model, batch)
    return LossSum(found.loss, {"ratio": torch.tensor(2.0 * batch.weight)})


@pytest.mark.parametrize(("bound", "decision"), [(1.9, "held"), (2.1, "stepped")])
def test_a_step_beyond_a_bound_changes_neither_weights_nor_moments(bound, decision):
    engine = toy_engine()
    before = bits(engine)
    bounded = dataclasses.replace(settings(), bounds={"ratio": bound})
    report = train_step(
        engine, with_ratio, toy_batches(toy_examples(8), 3), step=1, lr=0.1, scale=None, settings=bounded
    )
    assert report.decision == decision
    assert report.metrics["ratio"] == pytest.approx(2.0)
    assert [gives(report.held, one) for one in ("ratio", 2, 1.9)] == [decision == "held"] * 3
    assert same_bits(before, bits(engine)) == (decision == "held")  # the other case is the twin


def test_a_step_without_weight_computes_and_moves_nothing():
    engine = toy_engine()
    run = [
        train_step(engine, toy_loss, toy_batches(toy_examples(8), 4), step=1, lr=0.1, scale=None, settings=settings())
    ]
    before = bits(engine)  # with moments, which an optimizer step without gradients would decay

    def never(model, batch):
        raise AssertionError("a step without weight was computed")

    blank = [batch.blank() for batch in toy_batches(toy_examples(8), 4)]
    run.append(train_step(engine, never, blank, step=2, lr=0.1, scale=None, settings=settings()))
    assert [one.decision for one in run] == ["stepped", "held"]
    assert (run[1].loss, run[1].grad_norm, run[1].weight) == (None, None, 0)
    assert [bool(one.held) for one in run] == [False, True]
    assert same_bits(before, bits(engine))


@pytest.mark.parametrize("call", [True, False], ids=["called", "twin: not called"])
def test_what_follows_a_step_sees_moved_weights_and_changes_no_number(call):
    plain, watched = toy_engine(), toy_engine()
    seen = []
    with_call = dataclasses.replace(settings(), after_step=lambda: seen.append(bits(watched)))
    for engine, chosen in ((plain, settings()), (watched, with_call if call else settings())):
        batches = toy_batches(toy_examples(8), 3)
        train_step(engine, toy_loss, batches, step=1, lr=0.1, scale=None, settings=chosen)
    assert same_bits(bits(plain), bits(watched))
    assert [same_bits(one, bits(plain)) for one in seen] == ([True] if call else [])
