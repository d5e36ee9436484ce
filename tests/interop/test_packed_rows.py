"""With packing, batches of TRL and LLaMA-Factory count rows; so does a translated run, of as many."""

from __future__ import annotations

import bisect
import json
import random

import numpy as np
import pytest

from helpers.faults import refused_settings
from surefoot.data.batching.order import filled_rows, whole
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file

ROOM, COUNT = 256, 2000
MORE = 0.04  # first fit in a random order fills rows a little less than the tools, which sort the examples first


def best_fit(lengths: list[int]) -> int:
    """TRL's bfd: longest first, into the fullest row with room."""
    free: list[int] = []
    rows = 0
    for length in sorted(lengths, reverse=True):
        place = bisect.bisect_left(free, length)
        if place == len(free):
            rows += 1
            bisect.insort(free, ROOM - length)
        else:
            bisect.insort(free, free.pop(place) - length)
    return rows


def knapsacks(lengths: list[int]) -> int:
    """LLaMA-Factory's: a row takes the longest that still fits, among 1000 examples at a time."""
    rows = 0
    for first in range(0, len(lengths), 1000):
        left = sorted(lengths[first : first + 1000])
        while left:
            rows, room = rows + 1, ROOM
            while place := bisect.bisect(left, room):
                room -= left.pop(place - 1)
    return rows


@pytest.mark.parametrize("tool", [best_fit, knapsacks])
@pytest.mark.parametrize("shortest", [8, 100])
def test_an_epoch_has_about_as_many_rows(tool, shortest):
    lengths = random.Random(shortest).choices(range(shortest, ROOM + 1), k=COUNT)
    ours = filled_rows(0, whole(COUNT), np.array(lengths), ROOM)
    assert tool(lengths) == pytest.approx(len(ours), rel=MORE)
    assert tool(lengths) != pytest.approx(COUNT, rel=MORE)  # the twin counts examples
    assert sorted(np.concatenate(ours)) == list(range(COUNT))


TRL = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "max_length": ROOM, "packing": True}
FACTORY = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "template": "llama3", "do_train": True,
           "stage": "sft", "cutoff_len": ROOM, "neat_packing": True}  # fmt: skip


@pytest.mark.parametrize("given", [TRL, FACTORY, FACTORY | {"packing": True}])
def test_a_step_has_their_rows(given):
    words = given | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    found = translate_file("sft.json", json.dumps(words), [], Options())
    assert found.config["batch"] == {"size": 6, "row_tokens": ROOM}
    assert found.config["data"]["max_length"] == ROOM


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (TRL | {"packing_strategy": "wrapped"}, "packing_strategy"),
        (TRL | {"packing_strategy": "bfd_split"}, "packing_strategy"),
        (TRL | {"max_length": None}, "packing"),
        (FACTORY | {"packing": True, "neat_packing": False}, "packing"),
        (FACTORY | {"stage": "pt"}, "neat_packing"),
        (FACTORY | {"stage": "dpo"}, "neat_packing"),
        (FACTORY | {"stage": "pt", "packing": True, "neat_packing": False}, "packing"),
    ],
)
def test_rows_of_another_kind_are_refused(given, named):
    text = json.dumps(given)
    assert refused_settings(lambda: translate_file("sft.json", text, [], Options()), text=text) == [named]


def test_llamafactory_packs_in_no_stage_of_answers_that_are_compared():
    given = FACTORY | {"stage": "dpo", "packing": True, "neat_packing": False}
    found = translate_file("dpo.json", json.dumps(given), [], Options())
    assert (
        found.config["batch"]
        == translate_file("d.json", json.dumps(given | {"packing": None}), [], Options()).config["batch"]
    )
    assert {note.word.partition(":")[0]: note.outcome for note in found.notes}["packing"] == "listed"
