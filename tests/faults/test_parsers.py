"""Whatever comes, it is read, or refused as a fault: configs, data, templates, weights, states and other tools' words.

Short by default, with the same inputs each time; `soak` draws millions with fresh seeds:

    make soak                                                             # LONG for each reader
    pytest -s -m soak tests/faults/test_parsers.py --examples 1000000     # or as many as asked
"""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from faults import parsers
from faults.parsers import PARSERS, Parser, TooLong, read_or_refuse
from faults.trials import fresh_seed
from surefoot.errors import InputError

SHORT, LONG = 60, 200_000
ROUND = 2_000  # inputs drawn under one seed: hypothesis remembers all of a round


def attempt(parser: Parser, count: int, number: int) -> None:
    """So many inputs of one seed."""
    phases = (Phase.generate, Phase.shrink)
    rounds = settings(
        max_examples=count, deadline=None, derandomize=False, database=None, phases=phases,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    def read(value: object) -> None:
        read_or_refuse(parser.read, value)

    seed(number)(rounds(given(parser.inputs)(read)))()


@pytest.mark.parametrize("name", PARSERS)
def test_what_was_found_is_mended(name: str) -> None:
    for value in PARSERS[name].known:
        read_or_refuse(PARSERS[name].read, value)


@pytest.mark.parametrize("name", PARSERS)
def test_reads_or_refuses(name: str) -> None:
    attempt(PARSERS[name], SHORT, 0)


@pytest.mark.soak
@pytest.mark.parametrize("name", PARSERS)
def test_reads_or_refuses_millions(name: str, examples: int | None) -> None:
    count, first, started = examples or LONG, fresh_seed(), time.monotonic()
    rounds = -(-count // ROUND)
    for number in range(first, first + rounds):
        try:
            attempt(PARSERS[name], ROUND, number)
        except Exception:
            print(f"{name}: seed {number}")
            raise
    minutes = (time.monotonic() - started) / 60
    print(f"{name}: {rounds * ROUND} inputs, 0 wrong, seeds from {first}, {minutes:.2f} minutes")


def test_twins_an_error_that_is_no_fault_and_a_hang_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "SECONDS", 0.05)

    def unforeseen(value: object) -> None:
        raise KeyError("unforeseen")

    def endless(value: object) -> None:
        while True:
            pass

    def endless_and_catching(value: object) -> None:
        try:
            endless(value)
        except Exception:
            raise InputError("something was caught") from None

    for read, expected in ((unforeseen, KeyError), (endless, TooLong), (endless_and_catching, TooLong)):
        with pytest.raises(expected):
            attempt(Parser(read, st.just(1)), 1, 0)
