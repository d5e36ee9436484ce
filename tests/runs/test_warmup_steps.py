"""From a share of all steps to steps: with the warm-up of transformers' schedules, as transformers counts them."""

from __future__ import annotations

import pytest
from transformers import TrainingArguments

from surefoot.config.schema import RunConfig
from surefoot.runs.prepared import Timetable, make_schedule


def warmup(share: float, total: int, *, from_zero: bool) -> int:
    config = RunConfig.model_validate(
        {
            "stage": "sft",
            "model": "m",
            "data": {"train": "d.json"},
            "optim": {"warmup": share, "warmup_from_zero": from_zero},
            "output": "out",
        }
    )
    timetable = Timetable(total, total, frozenset(), frozenset())
    return make_schedule(config, None, timetable).warmup  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1, 0.15, 1 / 3])
@pytest.mark.parametrize("total", [1, 7, 25, 30, 333])
def test_as_transformers_rounds(share, total, tmp_path):
    theirs = TrainingArguments(output_dir=str(tmp_path), warmup_steps=share, use_cpu=True)
    assert warmup(share, total, from_zero=True) == theirs.get_warmup_steps(total)


def test_twin_our_own_warm_up_takes_the_nearest():
    assert (warmup(0.1, 23, from_zero=False), warmup(0.1, 23, from_zero=True)) == (2, 3)
