"""The optimizer's state goes out and in by name, bit by bit; moments that are not finite are found and named."""

import math

import pytest
import torch
from torch import nn

from helpers.faults import gives, raises_fault
from helpers.toy_model import (
    ToyModel,
    bits,
    same_bits,
    save_checkpoint,
    settings,
    toy_batches,
    toy_engine,
    toy_examples,
    toy_loss,
)
from surefoot.system.errors import Diverged
from surefoot.training import optimizer_state as module
from surefoot.training.checkpoint import Checkpoint, load_state
from surefoot.training.engine import SingleEngine
from surefoot.training.loop import _diverged, _is_lost
from surefoot.training.optimizer import OptimizerSettings, make_optimizer, trainable_parameters
from surefoot.training.optimizer_state import (
    SMALL,
    first_bad_moment,
    load_optimizer_tensors,
    moment_check_is_due,
    moment_norm_sum,
    optimizer_tensors,
    tokens_per_moment_check,
)
from surefoot.training.state import RunState
from surefoot.training.step import train_step

WIDTH = 64  # 64 x 64 numbers are the fewest that bitsandbytes holds in 8 bits
KINDS = [
    ("adamw", None),
    ("adamw_8bit", None),
    ("adafactor", None),
    ("rmsprop", None),
    ("rmsprop", 0.9),
    ("sgd", None),
    ("sgd", 0.9),
    ("muon", None),
]
BATCHES = [toy_batches(toy_examples(6, seed=step), 3) for step in range(6)]


class WideToy(ToyModel):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)


def engine(name, momentum):
    torch.manual_seed(0)
    model = WideToy()
    parameters = trainable_parameters(model)
    chosen = OptimizerSettings(name, (0.9, 0.99), momentum, 1e-8, weight_decay=0.01)
    return SingleEngine(model, parameters, make_optimizer(parameters, chosen, decoder={"hidden.weight"}))


def train(one, first, last):
    for step in range(first, last + 1):
        train_step(one, toy_loss, BATCHES[step - 1], step=step, lr=0.1 / step, scale=None, settings=settings())
    return bits(one)


@pytest.mark.parametrize(("name", "momentum"), KINDS)
def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_bits(tmp_path, name, momentum):
    uninterrupted = train(engine(name, momentum), 1, 6)
    first = engine(name, momentum)
    train(first, 1, 3)
    folder = save_checkpoint(tmp_path, first, RunState(step=3))
    second = engine(name, momentum)
    second.model.load_state_dict(first.model.state_dict())
    _, tensors = load_state(Checkpoint(folder, 3))
    load_optimizer_tensors(second.optimizer, second.parameters, tensors)
    assert same_bits(bits(first), bits(second))
    assert same_bits(train(second, 4, 6), uninterrupted)


@pytest.mark.parametrize(("name", "momentum"), [kind for kind in KINDS if kind != ("sgd", None)])
def test_twin_every_entry_of_the_state_matters(name, momentum):
    """Without one of its entries, or without a count of steps, the resumed run is another."""
    uninterrupted = train(engine(name, momentum), 1, 6)
    first = engine(name, momentum)
    train(first, 1, 3)
    saved = first.gather_state()
    for entry in sorted({key.rpartition("/")[2] for key in saved} - {"RMS"}):  # of the parameter, computed anew
        second = engine(name, momentum)
        second.model.load_state_dict(first.model.state_dict())
        changed = {key: value.clone() for key, value in saved.items()}
        for key, value in changed.items():
            if key.rpartition("/")[2] == entry:
                value.zero_()
        load_optimizer_tensors(second.optimizer, second.parameters, changed)
        try:
            assert not same_bits(train(second, 4, 6), uninterrupted), entry
        except ZeroDivisionError:
            assert entry == "step"


def test_counts_of_steps_come_back_as_the_integers_they_were():
    first, second = engine("adamw_8bit", None), engine("adamw_8bit", None)
    train(first, 1, 2)
    load_optimizer_tensors(second.optimizer, second.parameters, first.gather_state())
    state = second.optimizer.state[second.parameters["hidden.weight"]]
    assert (type(state["step"]), state["step"]) == (int, 2)
    assert (state["state1"].dtype, state["absmax1"].dtype) == (torch.uint8, torch.float32)


def test_no_two_tensors_share_memory():
    """bitsandbytes gives every parameter the same table of codes, and safetensors would refuse it."""
    matrices = {name: nn.Parameter(torch.randn(WIDTH, WIDTH)) for name in "ab"}
    optimizer = make_optimizer(
        matrices, OptimizerSettings("adamw_8bit", (0.9, 0.99), None, 1e-8, 0.0), decoder=matrices.keys()
    )
    for parameter in matrices.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[matrices["a"]]["qmap1"] is optimizer.state[matrices["b"]]["qmap1"]
    tensors = optimizer_tensors(optimizer, matrices)
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == len(tensors) == 2 * 7


def test_state_goes_out_and_in_by_name():
    batches = toy_batches(toy_examples(6), 3)
    first, second = toy_engine(), toy_engine()
    train_step(first, toy_loss, batches, step=1, lr=0.1, scale=None, settings=settings())
    saved = first.gather_state()
    second.model.load_state_dict(first.model.state_dict())
    load_optimizer_tensors(second.optimizer, second.parameters, {k: v.clone() for k, v in saved.items()})
    for one in (first, second):
        train_step(one, toy_loss, batches, step=2, lr=0.1, scale=None, settings=settings())
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_state_of_another_model_is_refused():
    one = engine("adamw", None)
    for name, tensor in {
        "lm_head.weight/exp_avg": torch.zeros(1),  # does not train
        "hidden.weight/exp_avg": torch.zeros(3, 3),
        "hidden.weight/exp_avg_sq_row": torch.zeros(65),
        "hidden.weight/exp_avg_sq_col": torch.zeros(1),
        "hidden.weight/absmax1": torch.zeros(17),
        "hidden.weight/step": torch.zeros(1),
        "hidden.weight/velocity": torch.zeros(64, 64),  # no optimizer keeps it
    }.items():
        with raises_fault("SF-CHECKPOINT-DAMAGED", module.FILE):
            load_optimizer_tensors(one.optimizer, one.parameters, {name: tensor})


def test_every_entry_that_an_optimizer_keeps_has_a_shape_here():
    kept = set()
    for name, momentum in KINDS:
        one = engine(name, momentum)
        train(one, 1, 1)
        kept |= {key.rpartition("/")[2] for key in one.gather_state()}
    assert kept == module._SHAPES.keys()


CPU = torch.device("cpu")


def take(engine, step, **named):
    batches = toy_batches(toy_examples(6), 2)
    return train_step(engine, toy_loss, batches, step=step, lr=0.05, scale=None, settings=settings(), **named)


def spoiled(value=math.nan):
    engine = toy_engine()
    take(engine, 1)
    engine.optimizer.state[engine.parameters["head.weight"]]["exp_avg_sq"][3, 2] = value
    return engine


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_moment_holds_the_step_back_and_is_named(value):
    engine = spoiled(value)
    before = {name: one for name, one in bits(engine).items() if "/" not in name}
    report = take(engine, 2)
    assert (report.decision, report.non_finite, report.moment) == ("non_finite", "moment", "head.weight/exp_avg_sq")
    assert report.loss is not None
    assert same_bits({name: bits(engine)[name] for name in before}, before)


def test_twin_without_the_look_the_weights_are_lost(monkeypatch):
    engine = spoiled()
    monkeypatch.setattr(module, "moment_norm_sum", lambda found, device: torch.zeros(()))
    assert take(engine, 2).decision == "stepped"
    assert not torch.isfinite(engine.parameters["head.weight"]).all()


def test_finite_moments_whose_sum_overflows_are_no_alarm():
    engine = spoiled(3e38)
    assert not torch.isfinite(moment_norm_sum(engine.moments().values(), CPU))
    report = take(engine, 2)
    assert (report.decision, report.moment) == ("stepped", "")


def test_a_look_takes_every_number_of_every_type():
    there = {"a": torch.ones(3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(2, dtype=torch.uint8)}
    assert moment_norm_sum(there.values(), CPU).item() == pytest.approx(math.sqrt(3) + 2)
    there["b"][2] = math.nan
    assert moment_norm_sum(there.values(), CPU).isnan()
    assert first_bad_moment(there) == "b"
    assert moment_norm_sum([], CPU).item() == 0


@pytest.mark.parametrize(("device", "enough"), [("cpu", 3_000), ("cuda", 15_000)])
def test_adapters_look_in_every_step_and_full_training_where_it_costs_little(device, enough):
    assert tokens_per_moment_check(SMALL, SMALL, device) == 0
    assert [moment_check_is_due(step, 10, 0.0) for step in (1, 2, 3)] == [True] * 3
    adapter, whole = (tokens_per_moment_check(trained * SMALL, 200 * SMALL, device) for trained in (2, 200))
    assert moment_check_is_due(1, enough // 100, adapter)
    assert moment_check_is_due(1, enough, whole)
    assert [moment_check_is_due(step, enough // 3, whole) for step in (1, 2, 3, 4, 5, 6)] == [False, False, True] * 2
    assert not moment_check_is_due(1, 0, whole)


def test_a_step_that_is_not_due_does_not_look(monkeypatch):
    monkeypatch.setattr(module, "moment_check_is_due", lambda step, tokens, per_check: False)
    assert take(spoiled(), 2).decision == "stepped"


def test_the_run_ends_at_once_with_one_line():
    report = take(spoiled(), 2)
    state = RunState(step=1).after_step(report)

    class Patient:
        max_consecutive, max_recent = 99, 99

    assert _is_lost(Patient, state, report)
    error = _diverged(report, state, "", 99)
    assert isinstance(error, Diverged)
    (fault,) = error.faults
    assert (fault.code, fault.where) == ("SF-DIVERGED", "step 2")
    assert gives(fault.what, "head.weight/exp_avg_sq")
