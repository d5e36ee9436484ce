"""A step that was not finite is looked into; a device that fails meanwhile is no finding."""

import pytest
import torch

from helpers.faults import gives
from helpers.toy_model import settings, toy_batches, toy_engine, toy_examples, toy_loss
from surefoot.training.failure import Attempt, CurrentBatch, look_into
from surefoot.training.report import StepReport

REPORT = StepReport(
    step=1, loss=None, grad_norm=None, lr=0.1, weight=4, tokens=4, examples=(0, 1), decision="non_finite",
    non_finite="loss", seconds=0.0,
)  # fmt: skip


def looked_into(objective):
    attempt = Attempt(1, toy_batches(toy_examples(2), 2), {"all": 0.1}, None)
    return look_into(toy_engine(), objective, settings(), attempt, REPORT, None)


def raising(error):
    def objective(model, batch):
        raise error

    return objective


def test_a_replay_says_where_it_came_from():
    def bad(model, batch):
        out = toy_loss(model, batch)
        return type(out)(out.loss * float("nan"), out.sums)

    assert gives(looked_into(bad), "loss")
    assert not gives(looked_into(toy_loss), "loss")  # a replay of it is finite


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
)
def test_a_device_that_fails_in_the_replay_is_raised(error):
    """Whoever runs the steps words it, and ends the run with exit 3."""
    with pytest.raises(type(error)) as caught:
        looked_into(raising(error))
    assert caught.value is error


@pytest.mark.parametrize("error", [RuntimeError("shapes"), MemoryError("full")])
def test_twin_a_replay_that_fails_otherwise_is_told_in_words(error):
    assert f"({type(error).__name__}: {error})" in looked_into(raising(error))


def test_the_batch_at_hand_is_the_one_that_is_computed():
    batches, hand = toy_batches(toy_examples(6), 2), CurrentBatch()
    seen = [(batch, hand.batch) for batch in hand.each(batches)]
    assert [batch is own for batch, own in seen] == [True] * 3
    assert hand.batch is None


def test_between_two_batches_there_is_none():
    """As they are made, which may run the model."""
    hand = CurrentBatch()

    def made():
        yield from toy_batches(toy_examples(2), 2)
        assert hand.batch is None
        raise ZeroDivisionError

    def given_up():
        for _ in hand.each(toy_batches(toy_examples(4), 2)):
            break

    with pytest.raises(ZeroDivisionError):
        list(hand.each(made()))
    given_up()
    assert hand.batch is not None  # twin: of an evaluation that was left
    with pytest.raises(ZeroDivisionError):
        list(hand.each(made()))
