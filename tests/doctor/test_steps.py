"""What ten steps and a few passes show: every cause is planted, and named; without it there is no such line."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from doctor_runs import clean_base, clean_run
from surefoot.doctor import steps
from surefoot.doctor.numbers import leak_line, parity_line, parity_pass, plainest, split_line
from surefoot.doctor.steps import STEPS, few, product_line, take, time_lines
from surefoot.models.forward import causal_model
from surefoot.objectives.base import LossSum
from surefoot.planning.measurements import Measurements
from surefoot.stages.trial import ready

SLOW = 0.15  # seconds that a planted wait takes: far above what these steps take


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return clean_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def one(folder, base):
    with ready(clean_run(folder, base), STEPS) as prepared:
        yield prepared


@pytest.fixture
def one_bf16(folder, base):
    with ready(clean_run(folder, base, precision="bf16"), STEPS) as prepared:
        yield prepared


def verdicts(lines):
    return {line.code: line.verdict for line in lines}


def with_stage(one, **changes):
    return replace(one, run=replace(one.run, stage=replace(one.run.stage, **changes)))


def test_ten_clean_steps(one):
    taken = take(one)
    assert len(taken.reports) == STEPS
    found = verdicts([*steps.number_lines(taken, falls=True), *time_lines(taken, 0)])
    assert set(found) == {
        "LOSS-FINITE", "LOSS-ZERO", "GRAD-NORM", "LOSS-FALLING", "BWD-RATIO", "DATA-WAIT", "WORKERS-USELESS",
    }  # fmt: skip
    assert set(found.values()) == {"ok"}


def plant_in_loss(one, change):
    """The objective with `change` of its loss."""
    objective = one.run.stage.objective

    def changed(model, batch):
        out = objective(model, batch)
        return LossSum(change(out.loss, batch), out.sums)

    return with_stage(one, objective=changed)


@pytest.mark.parametrize(
    ("code", "verdict", "change"),
    [
        ("LOSS-FINITE", "fault", lambda loss, batch: loss * float("nan")),
        ("LOSS-ZERO", "fault", lambda loss, batch: loss * 0.0),
        ("GRAD-NORM", "caution", lambda loss, batch: loss * 1e6),
        ("LOSS-FALLING", "caution", lambda loss, batch: loss.detach() * 2 - loss),  # climbs
    ],
)
def test_numbers_that_are_wrong(one, code, verdict, change):
    lines = steps.number_lines(take(plant_in_loss(one, change)), falls=True)
    assert verdicts(lines)[code] == verdict
    assert next(line for line in lines if line.code == code).fix


def test_a_slow_backward_pass_is_named_by_its_ratio(one):
    def slow(gradient):
        time.sleep(SLOW)
        return gradient

    def change(loss, batch):
        loss.register_hook(slow)
        return loss * 1.0

    lines = time_lines(take(plant_in_loss(one, change)), 0)
    assert verdicts(lines)["BWD-RATIO"] == "caution"


def test_waiting_for_batches_is_named_and_workers_would_help(one):
    def late(step):
        time.sleep(SLOW)
        return one.run.stage.step_batches(step)

    lines = time_lines(take(replace(one, batches=late)), 0)
    waiting = next(line for line in lines if line.code == "DATA-WAIT")
    assert waiting.verdict == "caution"
    assert waiting.gain is not None
    assert waiting.gain > 1
    assert "data.workers: 1" in waiting.fix


def test_workers_are_useless_where_batches_cost_nothing_and_useful_where_they_do(one):
    assert verdicts(time_lines(take(one), 2))["WORKERS-USELESS"] == "caution"

    def late(step):
        time.sleep(4 * SLOW)
        return one.run.stage.step_batches(step)

    assert verdicts(time_lines(take(with_stage(one, step_batches=late)), 2))["WORKERS-USELESS"] == "ok"


@pytest.mark.parametrize(("dynamic", "verdict"), [(False, "caution"), (True, "ok")])
def test_lengths_that_recompile(one, dynamic, verdict):
    """The plan's own compile is dynamic; this one specialises on every length. The final norm alone is compiled: the
    whole decoder would take minutes."""
    torch._dynamo.reset()
    norm = causal_model(one.setup.policy).get_decoder().norm
    norm.forward = torch.compile(norm.forward, backend="eager", dynamic=dynamic)
    line = steps.compile_line(take(one), one.run.plan, one)
    torch._dynamo.reset()
    assert (line.code, line.verdict) == ("COMPILE-RECOMPILES", verdict), line.value
    assert (line.gain is not None) is (verdict == "caution")


def outside_autocast(module):
    """As a layer that means well multiplies: upcast, with autocast off."""
    module.forward = lambda x: _in_fp32(module, x)


def _in_fp32(module, x):
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), module.weight.float())


def test_a_bf16_run_with_surefoots_own_kernels_multiplies_in_bf16(one_bf16):
    assert product_line(one_bf16, "bf16", Measurements()).verdict == "ok"


def test_fp32_products_in_a_bf16_run_are_named_with_their_modules(folder, base):
    measured = Measurements(products={"fp32": 1e11, "bf16": 8e11})
    plain = {"adapter": "plain"}  # which calls the modules that the plant is in
    with ready(clean_run(folder, base, precision="bf16", kernels=plain), STEPS) as one:
        assert product_line(one, "bf16", measured).verdict == "ok"
        for layer in causal_model(one.setup.policy).model.layers:
            outside_autocast(layer.mlp.down_proj.get_base_layer())
        line = product_line(one, "bf16", measured)
    assert (line.code, line.verdict) == ("GEMM-FP32-SHARE", "caution")
    assert "mlp.down_proj" in line.value
    assert line.gain is not None
    assert 1 < line.gain < 8


def test_an_fp32_run_has_fp32_products(one):
    assert product_line(one, "fp32", Measurements()).verdict == "ok"


def test_the_split_into_micro_batches(one):
    assert split_line(one).verdict == "ok"
    mean = plant_in_loss(one, lambda loss, batch: loss / batch.weight)
    line = split_line(mean)
    assert (line.code, line.verdict) == ("MICRO-BATCH-SUM", "fault")


def test_training_mode_is_put_back(one):
    before = {name: module.training for name, module in one.setup.engine.model.named_modules()}
    split_line(one)
    leak_line(one)
    assert {name: module.training for name, module in one.setup.engine.model.named_modules()} == before


@contextmanager
def mixed_documents(model):
    """Every token gets a tenth of the mean of all tokens of all rows."""
    hook = (
        causal_model(model)
        .get_input_embeddings()
        .register_forward_hook(lambda module, inputs, out: out + 0.1 * out.mean((0, 1), keepdim=True))
    )
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("packing", ["on", "off"])
def test_one_document_that_reaches_another(folder, base, packing):
    data = {"train": str(folder / "train.json"), "max_length": 128, "packing": packing}
    with ready(clean_run(folder, base, data=data), STEPS) as one:
        assert leak_line(one).verdict == "ok"
        with mixed_documents(one.setup.policy):
            line = leak_line(one)
    assert (line.code, line.verdict) == ("PACK-LEAK", "fault")


def test_parity_with_the_plainest_way(folder, base, one_bf16):
    config, plan = clean_run(folder, base, precision="bf16"), one_bf16.setup.plan
    right = parity_line(config, plan, parity_pass(one_bf16), None)
    assert right is not None
    assert right.verdict == "ok"
    hook = (
        causal_model(one_bf16.setup.policy)
        .model.layers[0]
        .mlp.register_forward_hook(lambda module, inputs, out: out * 3)
    )
    wrong = parity_line(config, plan, parity_pass(one_bf16), None)
    hook.remove()
    assert wrong is not None
    assert (wrong.code, wrong.verdict) == ("FAST-PATH", "fault")


def test_the_plainest_way_is_not_compared_with_itself(folder, base):
    config = clean_run(folder, base)
    with ready(plainest(config, ready_plan(config)), 1) as plain:
        assert parity_line(config, plain.setup.plan, parity_pass(plain), None) is None


def ready_plan(config):
    with ready(config, 1) as one:
        return one.setup.plan


def test_a_second_model_that_may_not_fit_is_not_loaded(folder, base, one_bf16):
    assert parity_line(clean_run(folder, base), one_bf16.setup.plan, parity_pass(one_bf16), free=1000) is None


@pytest.mark.parametrize(("count", "places"), [(1, [0]), (2, [0, 1]), (3, [0, 2]), (7, [0, 6])])
def test_few_micro_batches_of_a_step_are_its_longest_and_its_shortest(count, places):
    assert few(list(range(count))) == places
