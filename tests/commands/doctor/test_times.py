"""Where the time goes: every cause is planted, and named with a gain that was measured; without it there is no line."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from helpers.doctor_runs import plant_in_loss, with_stage
from surefoot.commands.doctor import passes, times
from surefoot.commands.doctor.codes import NEAR
from surefoot.commands.doctor.steps import take
from surefoot.models import product_flops
from surefoot.models.forward import causal_model
from surefoot.planning.measurements import AttentionTrial, Measurements

SLOW = 0.3  # seconds that a planted wait takes: far above what these steps take, on a busy machine too
HEAVY = 0.1  # seconds of a step beside which making a batch is nothing, even if the thread has to wait for its turn
FLASH = AttentionTrial("flash", 1e-6, "")  # as if it were much faster than what runs
MATH = passes.Observed({"math"}, product_flops.ProductFlops())


def slow_backward(one, seconds):
    """seconds: of a micro-batch's backward pass, by its rows."""

    def change(loss, batch):
        def slow(gradient):
            time.sleep(seconds(len(batch.rows.lengths)))
            return gradient

        loss.register_hook(slow)
        return loss * 1.0

    return plant_in_loss(one, change)


def test_a_micro_batch_that_is_too_large_is_named_with_one_that_is_not(one):
    """Its time grows with the square of its rows, as where memory swaps."""
    planted = slow_backward(one, lambda rows: SLOW * (rows / 4) ** 2)
    line = times.backward_line(planted, take(planted), Measurements())
    assert (line.code, line.verdict) == ("BWD-RATIO", "caution")
    assert line.fix in ("set batch.micro: 1", "set batch.micro: 2")  # of 4: which of them, the rest of a pass decides
    assert line.gain is not None
    assert line.gain > NEAR


def test_a_slow_backward_pass_that_nothing_cures_is_named_without_a_cure(one):
    planted = slow_backward(one, lambda rows: SLOW * rows / 4)
    line = times.backward_line(planted, take(planted), Measurements(attention=(FLASH,)))
    assert (line.code, line.verdict, line.gain) == ("BWD-RATIO", "caution", None)
    assert "--profile" in line.fix
    assert "batch.micro: 2, attention: auto" in line.fix


def test_twin_a_clean_run_has_no_line_about_its_time(one):
    taken = take(one)
    lines = [times.backward_line(one, taken, Measurements()), times.waiting_line(taken, 0)]
    lines.append(times.workers_line(one, taken, 0))
    assert [line.verdict for line in lines] == ["ok"] * 3


def test_waiting_for_batches_is_named_and_workers_would_help(one):
    def late(step):
        time.sleep(SLOW)
        return one.run.stage.step_batches(step)

    line = times.waiting_line(take(replace(one, batches=late)), 0)
    assert line.verdict == "caution"
    assert line.gain is not None
    assert line.gain > 1
    assert "data.workers: 1" in line.fix


def test_workers_are_useless_where_batches_cost_nothing_and_useful_where_they_do(one):
    heavy = slow_backward(one, lambda rows: HEAVY)
    line = times.workers_line(heavy, take(heavy), 2)
    assert line.verdict == "caution"
    assert line.gain is not None

    def late(step):
        time.sleep(4 * SLOW)
        return one.run.stage.step_batches(step)

    assert times.workers_line(one, take(with_stage(one, step_batches=late)), 2).verdict == "ok"


def test_the_gain_without_workers_is_that_of_steps_without_them(one, monkeypatch):
    """Threads that get in the way: with any, a pass takes as long as it does here."""
    real = passes.prefetched

    def disturbing(batches, workers, *, last):
        def late(step):
            time.sleep(SLOW if workers else 0.0)
            return batches(step)

        return real(late, 0, last=last)

    monkeypatch.setattr(passes, "prefetched", disturbing)
    assert passes.gain_without_workers(one, 2) > 2


@pytest.mark.parametrize(("dynamic", "verdict"), [(False, "caution"), (True, "ok")])
def test_lengths_that_recompile(one, dynamic, verdict):
    """The plan's own compile is dynamic; this one specialises on every length. The final norm alone is compiled: the
    whole decoder would take minutes."""
    torch._dynamo.reset()
    norm = causal_model(one.setup.policy).get_decoder().norm
    norm.forward = torch.compile(norm.forward, backend="eager", dynamic=dynamic)
    line = times.compile_line(take(one), one.run.plan, one)
    torch._dynamo.reset()
    assert (line.code, line.verdict) == ("COMPILE-RECOMPILES", verdict), line.value
    assert (line.gain is not None) is (verdict == "caution")


@pytest.mark.parametrize(
    ("before", "rounds", "gain"),
    [
        ([9, 4.0, 4.1, 4.0], 3, 2.0),  # after one that warms up
        ([9, 8.0, 6.0, 4.0, 6.0, 4.1], 5, 2.0),  # the best came once at first
        ([9, 12.0, 11.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0], 8, 2.0),  # it never comes twice
    ],
)
def test_a_comparison_goes_on_until_its_best_times_are_no_chance(before, rounds, gain):
    times, others = iter(before), []
    found = passes.compared(lambda: next(times), lambda: others.append(2.0) or 2.0)
    assert found == pytest.approx(gain)
    assert len(others) == 1 + rounds


def test_math_that_was_asked_for_is_named_and_not_called_slower_than_it_is(one, monkeypatch):
    plan = one.setup.plan
    asked = replace(plan, attention=replace(plan.attention, kernels=replace(plan.attention.kernels, source="user")))
    forced = replace(one, run=replace(one.run, plan=asked))
    for gain, faster in ((0.8, False), (3.0, True)):
        monkeypatch.setattr(times, "gain_of_kernel", lambda one, kernel, gain=gain: gain)
        line = times.attention_line(forced, MATH, Measurements(attention=(FLASH,)))
        assert (line.verdict, line.gain, line.fix) == ("caution", gain, "set attention: auto")
        assert ("faster" in line.value) is faster
    flash = replace(FLASH, seconds=1e-3)
    for math, verdict in ((7e-4, "ok"), (9e-4, "caution")):  # clearly the faster one, and as fast up to chance
        line = times.attention_line(forced, MATH, Measurements(attention=(flash, AttentionTrial("math", math, ""))))
        assert line.verdict == verdict
    monkeypatch.setattr(times, "gain_of_kernel", lambda one, kernel: 0.8)
    assert times.attention_line(one, MATH, Measurements(attention=(FLASH,))).verdict == "ok"  # the plan's own choice


def test_a_kernel_that_cannot_do_what_the_model_asks_for_is_no_finding(one):
    """Attention drops out in training, which flash on a CPU cannot."""
    for layer in causal_model(one.setup.policy).model.layers:
        layer.self_attn.attention_dropout = 0.1
    line = times.attention_line(one, MATH, Measurements(attention=(FLASH,)))
    assert (line.code, line.verdict) == ("ATTN-MATH", "ok")
