"""The forecast of the disk, by hand."""

from dataclasses import replace

import pytest

from helpers.plans import run_plan
from surefoot.planning.disk import disk_forecast
from surefoot.planning.plan import Choice, ParallelPlan, PpoPlan


def a_plan(**changes):
    one = run_plan(trainable=1000, parameters=1000)
    return replace(one, memory=replace(one.memory, optimizer=8000), **changes)


@pytest.mark.parametrize(
    ("keep", "best", "saves", "total"),
    [
        (3, False, None, 4 * 12_000 + 4000),  # three, the one being written, and the model
        (3, True, None, 5 * 12_000 + 4000),
        (3, True, 2, 2 * 12_000 + 4000),  # a run that writes two has no more
    ],
)
def test_checkpoints_and_the_model(keep, best, saves, total):
    assert disk_forecast(a_plan(), keep, best=best, saves=saves).total == total


@pytest.mark.parametrize(
    ("keep", "best", "saves", "least"),
    [
        (3, False, None, 12_000 + 4000),  # nobody knows how many: one, and the model
        (3, True, 9, 4 * 12_000),  # three and the one being written; the best may be one of them
        (3, True, 3, 3 * 12_000 + 4000),  # all of them stay, and the model comes beside them
        (2, False, 1, 12_000 + 4000),
    ],
)
def test_what_a_run_surely_writes(keep, best, saves, least):
    found = disk_forecast(a_plan(), keep, best=best, saves=saves)
    assert found.least == least <= found.total
    assert found.further.least == 12_000


def test_the_tokenizer_lies_in_each_checkpoint_and_beside_the_model():
    found = disk_forecast(a_plan(), 3, best=False, tokenizer=17)
    assert (found.checkpoint, found.model) == (12_000 + 17, 4000 + 17)
    assert found.total == 4 * 12_000 + 4000 + 5 * 17


def test_of_ppo_every_model_has_its_tokenizer():
    """The twin: of other stages the policy alone has, above."""
    part = Choice("model", "", "default")
    plan = a_plan(ppo=PpoPlan(part, part, part, part, critic_parameters=0))
    averaged, alone = (disk_forecast(plan, 3, best=False, averaged=one, tokenizer=17) for one in (True, False))
    assert (averaged.checkpoint, averaged.model) == (12_000 + 8000 + 3 * 17, 8000 + 3 * 17)
    assert (alone.checkpoint, alone.model) == (12_000 + 2 * 17, 4000 + 2 * 17)


def test_a_merged_model_lies_there_twice_in_place_of_the_adapter():
    found = disk_forecast(a_plan(), 1, best=False, saves=1, merged=50_000)
    assert found.model == 100_000
    assert found.least == 12_000 + 100_000 == found.total
    assert disk_forecast(a_plan(), 1, best=False, saves=1).least == 12_000 + 4000  # twin


def test_shares_of_all_ranks_go_into_a_checkpoint():
    shared = ParallelPlan(Choice("fsdp2", "", "user"), Choice(4, "", "hardware"))
    one = disk_forecast(a_plan(parallel=shared), 1, best=False)
    assert one.checkpoint == 4000 + 4 * 8000
    whole = disk_forecast(a_plan(parallel=replace(shared, engine=Choice("ddp", "", "user"))), 1, best=False)
    assert whole.checkpoint == 12_000
