"""By how much two passes differ: worked out by hand, and which faults are seen so in bf16 before step 1."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from helpers.architectures import LLAMA, build
from helpers.faults import gives
from helpers.growing_records import sky_workplace
from helpers.path_runs import fast_paths, path_config, start
from helpers.toy_model import toy_engine
from surefoot.data.batching.batch import Example, PromptBatch, collate
from surefoot.methods.losses import sft
from surefoot.models.fast import adapters as fast_adapters
from surefoot.models.fast import pointwise as fast_pointwise
from surefoot.runs.parity import differences as module
from surefoot.runs.parity import passes
from surefoot.runs.parity.differences import Differences, Pass, differences
from surefoot.runs.parity.in_fp32 import Fp32Check
from surefoot.system.errors import EnvironmentFault
from surefoot.training.state import LossScale

WITHOUT = 1e9  # a limit that nothing passes


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return sky_workplace(tmp_path_factory, 16, hidden=64)


@pytest.fixture
def settled(workplace, tmp_path):
    """What is told on the screen, and recorded, of a LoRA run in bf16 with every fast path."""

    def run(name="run", precision="bf16", pointwise="auto"):
        ways = {"batch": {"size": 8, "micro": 4}, "precision": precision, "kernels": {"pointwise": pointwise}}
        said = start(path_config(workplace, tmp_path / name, duration="1 step", **ways))
        return said, fast_paths(tmp_path / name)

    return run


@pytest.fixture(autouse=True)
def by_themselves(monkeypatch):
    """What 16 bits see by themselves, as where fp32 has no room. With fp32: test_in_fp32."""
    monkeypatch.setattr("surefoot.runs.parity.fast_paths.check_in_fp32", lambda *_: Fp32Check())


def longer(monkeypatch):
    """The loss is right, and its gradient a tenth too large."""
    real = sft.summed_loss

    def wrong(*given):
        loss = real(*given)
        return loss + 0.1 * (loss - loss.detach())

    monkeypatch.setattr(sft, "summed_loss", wrong)


def lighter(monkeypatch):
    """One of fifty tokens does not count."""
    real = sft.summed_loss
    monkeypatch.setattr(sft, "summed_loss", lambda *given: real(*given) * (1 - 1 / 50))


def scaled(monkeypatch):
    """An adapter's scale is too large by a tenth."""
    real = fast_adapters._Adapter

    def wrong(name, a, b, magnitude, scale, dropout, drops):
        return real(name, a, b, magnitude, 1.1 * scale, dropout, drops)

    monkeypatch.setattr(fast_adapters, "_Adapter", wrong)


def other_base(monkeypatch):
    """Positions turn by the base of Llama 3, 500,000, in a model whose own is 10,000."""
    real = fast_pointwise.install

    def wrong(model):
        undo = real(model)
        turns = [one for one in model.modules() if hasattr(one, "inv_freq")]
        before = [one.inv_freq for one in turns]
        for one in turns:
            one.inv_freq = one.inv_freq ** (math.log(5e5) / math.log(1e4))

        def back():
            undo()
            for one, its_own in zip(turns, before, strict=True):
                one.inv_freq = its_own

        return back

    monkeypatch.setattr(fast_pointwise, "install", wrong)


def large_epsilon(monkeypatch):
    """Norms add 1e-2 to a mean square, in place of 1e-6."""
    real = fast_pointwise.norm_form
    monkeypatch.setattr(fast_pointwise, "norm_form", lambda one: (form := real(one)) and replace(form, eps=1e-2))


# Of each the path that it is planted in, and what it shows in.
PLANTED = {longer: ("loss", "length"), lighter: ("loss", "loss"), scaled: ("adapter", "gradient")}
LIMIT_OF = {"length": "LENGTH_LIMITS", "loss": "LOSS_LIMITS"}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_is_computed_wrongly_is_taken_out_in_16_bits(settled, monkeypatch, plant):
    plant(monkeypatch)
    _, found = settled()
    name, number = PLANTED[plant]
    assert found[name]["differs"][number] > found[name]["limits"][number]
    assert {path for path, one in found.items() if not one["used"]} == {name}


@pytest.mark.parametrize("plant", [longer, lighter], ids=lambda plant: plant.__name__)
def test_twin_without_a_limit_of_its_own_it_would_pass(settled, monkeypatch, plant):
    plant(monkeypatch)
    monkeypatch.setattr(module, LIMIT_OF[PLANTED[plant][1]], {"bf16": WITHOUT})
    screen, found = settled()
    assert "caution: kernels" not in screen
    assert all(one["used"] for one in found.values())


@pytest.mark.parametrize("plant", [other_base, large_epsilon], ids=lambda plant: plant.__name__)
def test_a_norm_or_a_turn_of_another_formula_is_refused_where_it_was_asked_for(settled, monkeypatch, plant):
    assert settled("right", pointwise="fused")[1]["pointwise"]["used"]  # twin
    plant(monkeypatch)
    with pytest.raises(EnvironmentFault) as caught:
        settled(pointwise="fused")
    assert [fault.where for fault in caught.value.faults] == ["kernels.pointwise"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_right_paths_differ_by_less_than_a_third_of_what_is_allowed(settled, precision):
    _, found = settled(precision=precision)
    assert found.keys() >= {"adapter", "loss"}
    for one in found.values():
        assert all(3 * one["differs"][name] < limit for name, limit in one["limits"].items())


def test_gradients_that_overflow_are_compared_at_a_lower_scale(monkeypatch):
    """fp16 begins with a scale that is too large for many models; the first steps are left out, and no path is wrong
    because of it."""
    tried = []

    def found(loaded, stage, batches, step, scale):
        tried.append(scale.scale)
        return a_pass(loss, a=[1.0, math.inf if scale.scale > 1024 else 2.0])

    monkeypatch.setattr(passes, "_pass_at", found)
    loaded = SimpleNamespace(engine=toy_engine(), state=SimpleNamespace(scale=LossScale(4096.0)))
    loss = 2.0
    assert passes.one_pass(loaded, None, [], 1).gradients["a"].tolist() == [1.0, 2.0]
    assert tried == [4096, 2048, 1024]
    tried.clear()
    loss = math.nan  # twin: what no scale mends is not tried again
    passes.one_pass(loaded, None, [], 1)
    assert tried == [4096]


def a_pass(loss=2.0, **gradients):
    return Pass(loss, {name.replace("_", "."): torch.tensor(one) for name, one in gradients.items()})


LARGEST = float(torch.finfo(torch.float32).max)
SAME = {"layers_0_a": [3.0, 4.0], "layers_1_a": [0.0], "b": [1e-9]}  # b: 0 in exact arithmetic


@pytest.mark.parametrize(
    ("other", "gradient", "length", "loss"),
    [
        (a_pass(**SAME), 0.0, 0.0, 0.0),
        (a_pass(2.2, **SAME), 0.0, 0.0, 0.1),
        (a_pass(**SAME | {"layers_1_a": [1.0]}), 0.2, math.log(26 / 25) / 2, 0.0),  # of the kind, in both layers: 5
        (a_pass(**SAME | {"layers_0_a": [3.3, 4.4]}), 0.1, math.log(1.1), 0.0),
        (a_pass(**SAME | {"layers_0_a": [-4.0, 3.0]}), math.sqrt(2), 0.0, 0.0),  # a turn makes nothing longer
        (a_pass(layers_0_a=[3.0, 4.0], b=[1e-9]), 0.0, 0.0, 0.0),  # no gradient is one of zeros
        (a_pass(**SAME | {"b": [0.015]}), 0.1, 0.0, 0.0),  # against 0.03 of the largest, and too small for a length
        (a_pass(layers_1_a=[0.0], b=[0.0]), LARGEST, LARGEST, 0.0),
        (a_pass(**SAME | {"layers_0_a": [3.0, float("nan")]}), LARGEST, LARGEST, 0.0),
        (a_pass(float("nan"), **SAME), 0.0, 0.0, LARGEST),
    ],
)
def test_differences_by_hand(other, gradient, length, loss):
    plain = a_pass(**SAME)
    found = differences(toy_engine(), plain, other)
    assert (found.gradient, found.length, found.loss) == pytest.approx((gradient, length, loss), rel=1e-6)


def test_a_small_kind_that_is_missing_altogether_is_no_rounding():
    """As DoRA's magnitudes of queries, at 0.004 of the largest gradient: with all of them gone 0.13 is off."""
    plain, without = a_pass(a=[1.0], m=[0.004]), a_pass(a=[1.0])
    assert differences(toy_engine(), plain, without).gradient == LARGEST
    assert differences(toy_engine(), without, plain).gradient == LARGEST
    assert differences(toy_engine(), plain, a_pass(a=[1.0], m=[1e-9])).gradient < 0.25  # twin: there, if small


@pytest.mark.parametrize("bad", ["a", "b", "c"])
def test_what_is_not_a_number_is_found_in_whatever_order_names_come(bad):
    plain = a_pass(a=[0.0], b=[1.0], c=[0.0])
    found = differences(toy_engine(), a_pass(**{"a": [0.0], "b": [1.0], "c": [0.0], bad: [float("nan")]}), plain)
    assert (found.gradient, found.length) == (LARGEST, LARGEST)


def test_kinds_longer_and_shorter_by_the_same_have_no_common_scale():
    plain, other = a_pass(a=[1.0], b=[1.0]), a_pass(a=[1.1], b=[1 / 1.1])
    assert differences(toy_engine(), plain, other).length == pytest.approx(0, abs=1e-7)
    assert differences(toy_engine(), plain, a_pass(a=[1.1], b=[1.1])).length > 0.09  # twin


def test_the_first_limit_that_was_passed_is_told():
    limits = Differences(0.25, 0.03, 0.01)
    assert Differences(0.25, 0.03, 0.01).beyond(limits) == ""
    assert all(gives(Differences(0.3, 0.0, 0.0).beyond(limits), value) for value in (0.3, 0.25, "gradient"))
    assert all(gives(Differences(0.1, 0.05, 0.02).beyond(limits), value) for value in (0.05, 0.03, "length"))
    assert all(gives(Differences(0.1, 0.0, 0.02).beyond(limits), value) for value in (0.02, 0.01, "loss"))
    assert Differences(math.inf, 0.0, 0.0).beyond(limits)


def test_prompts_stand_in_for_answers_also_where_a_rank_only_fills_up():
    model = build(LLAMA, device="cpu").eval()
    rows = collate([Example(np.arange(3, 3 + n), np.zeros(n, bool), n) for n in (9, 5)], 0)
    batch = PromptBatch(rows, ((), ()), 2)
    logits = model(rows.input_ids).logits
    parts = [
        F.cross_entropy(logits[row, : n - 1], rows.input_ids[row, 1:n], reduction="sum") for row, n in ((0, 9), (1, 5))
    ]
    assert float(passes._prompts(model, batch).loss.detach()) == pytest.approx(float(sum(parts).detach()), rel=1e-5)
    passes._prompts(model, batch.blank()).loss.backward()
    assert not any(one.grad is not None and one.grad.any() for one in model.parameters())
