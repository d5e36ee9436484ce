from __future__ import annotations

import math
from contextlib import nullcontext

import pytest

from surefoot.system.errors import Fault
from surefoot.system.posting import GivenUp
from surefoot.training.ranks import all_or_none, gather_rows, gather_texts


def two_ranks(first, second, count):
    """What both ranks get; each asks as often as the other, so their questions are answered side by side."""
    asked = []

    def record(values):
        asked.append(list(values))
        return list(values)

    gather_rows(second, count, record)
    lengths = [a + b for a, b in zip(*(lengths_of(own, count) for own in (first, second)), strict=True)]
    other = [x for place in range(count) for x in second.get(place, [0.0] * int(lengths[place]))]
    answers = iter([lengths_of(second, count), other])

    def totals(values):
        return [a + b for a, b in zip(values, next(answers), strict=True)]

    return gather_rows(first, count, totals)


def lengths_of(own, count):
    return [float(len(own.get(place, ()))) for place in range(count)]


def test_every_rank_gets_every_row_bit_for_bit():
    first, second = {0: [1.0, 0.1], 2: [math.pi]}, {1: [-3.5, 128_000.0, 1e-30], 3: []}
    assert two_ranks(first, second, 5) == [[1.0, 0.1], [-3.5, 128_000.0, 1e-30], [math.pi], [], []]


def test_alone_it_is_a_copy():
    assert gather_rows({1: [2.0]}, 2, list) == [[], [2.0]]


def test_texts_come_to_every_rank():
    assert gather_texts({0: "é\n", 2: ""}, 3, list) == ["é\n", "", ""]
    assert gather_texts({1: "wide 漢字"}, 2, list)[1] == "wide 漢字"


@pytest.mark.parametrize(("here", "elsewhere"), [(True, 0.0), (False, 1.0), (False, 0.0)])
def test_what_one_rank_gives_up_all_do(here, elsewhere):
    """The last is the twin: where no rank gives up, none does."""
    outcome = pytest.raises(GivenUp) if here or elsewhere else nullcontext()
    with outcome, all_or_none(lambda values: [values[0] + elsewhere]):
        if here:
            raise GivenUp(Fault("a server", "was given up", code="SF-SERVER"))
