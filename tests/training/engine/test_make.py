"""An engine that does not hold what was planned is found out before step 1."""

from __future__ import annotations

import pytest

from helpers.faults import raises_fault
from helpers.toy_model import toy_engine
from surefoot.training.engine import Elements
from surefoot.training.engine.make import count_elements, verify_share

EVERYTHING = frozenset({"weights", "gradients", "optimizer"})


class Fsdp2Engine:
    """Rank 0 of two, holding so many of 100 elements, 20 of which train."""

    rank, world, device = 0, 2, "cpu"

    def __init__(self, weights: int, gradients: int = 10, optimizer: int = 10):
        self.held = Elements(weights, gradients, optimizer)

    def elements(self) -> Elements:
        return self.held


WHOLE = Elements(100, 20, 20)


def test_the_plain_model_is_whole():
    engine = toy_engine()
    found = verify_share(engine, "single", frozenset(), count_elements(engine.model))
    assert found["engine"] == "SingleEngine"
    assert found["parameters"] == found["of"] > 0


def test_a_share_is_recorded():
    found = verify_share(Fsdp2Engine(55), "fsdp2", EVERYTHING, WHOLE)
    assert (found["parameters"], found["of"], found["optimizer"], found["of_trainable"]) == (55, 100, 10, 20)


@pytest.mark.parametrize(
    ("engine", "name", "cut", "said"),
    [
        (Fsdp2Engine(100), "fsdp2", EVERYTHING, [(100, "weights", 60)]),  # it holds all, and the plan says at most 60
        (Fsdp2Engine(50, optimizer=20), "fsdp2", EVERYTHING, [(20, "optimizer")]),
        (Fsdp2Engine(50), "deepspeed", EVERYTHING, [("deepspeed", "Fsdp2Engine")]),
        (Fsdp2Engine(50), "fsdp2", {"optimizer"}, [(50, "weights"), (10, "gradients")]),  # half; the plan says all
    ],
)
def test_a_silent_fallback_is_refused(engine, name, cut, said):
    first, *others = [("SF-PLAN-BROKEN", "plan: parallel.engine", *values) for values in said]
    with raises_fault(*first, also=others):
        verify_share(engine, name, cut, WHOLE)
