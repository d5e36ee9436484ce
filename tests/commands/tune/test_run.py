"""What decides about trials: limits, rivals, the memory forecast; and the account at the end."""

from dataclasses import replace
from typing import Any

import pytest

from helpers.plans import run_plan
from helpers.tune_trials import made_up
from surefoot.commands.tune import trials
from surefoot.commands.tune.attempt import Answer, Request
from surefoot.commands.tune.run import Tuned
from surefoot.commands.tune.search import Tried
from surefoot.commands.tune.trials import _HOPELESS, Numbers, Terms, Trials
from surefoot.planning.plan import Choice, RunPlan
from surefoot.runs.trial import Rival
from surefoot.system.errors import NO_MEMORY, Fault

LIMIT, COMPILING = 60.0, 40.0  # seconds
NUMBERS = Numbers((2.0, 1.9), (3.0, 2.9))


class Bench:
    """Trials over made-up answers, and what was asked for."""

    def __init__(self, monkeypatch, *answers: Answer):
        self.asked: list[tuple[Rival | None, float | None]] = []
        monkeypatch.setattr(trials, "planned", lambda config, plan, lengths: self.plan_of(config))
        lengths: Any = None  # which only the planner reads
        left = list(answers)

        def attempt(request: Request, limit: float | None) -> Answer:
            self.asked.append((request.rival, limit))
            return left.pop(0)

        terms = Terms(steps=2, limit=LIMIT, compiling=COMPILING)
        self.plan = run_plan(trainable=1, parameters=2)
        self.trials = Trials({}, self.plan, lengths, NUMBERS, terms, attempt)

    def plan_of(self, config) -> RunPlan:
        """Another one for each size of micro-batches, and for compiling."""
        micro = replace(self.plan.batch.micro, value=config.get("batch", {}).get("micro", 1))
        batch, compile = replace(self.plan.batch, micro=micro), Choice(config.get("compile", "off"), "", "user")
        return replace(self.plan, batch=batch, compile=compile)


@pytest.mark.parametrize(("settings", "limit"), [({"compile": "default"}, COMPILING), ({"compile": "off"}, LIMIT)])
def test_what_compiles_has_a_limit_of_its_own(monkeypatch, settings, limit):
    bench = Bench(monkeypatch, Answer(None, "not done"))
    assert bench.trials.look(settings).failure == "not done"
    assert bench.asked == [(None, limit)]


def test_memory_is_short_where_the_forecast_or_the_machine_says_so(monkeypatch):
    bench = Bench(monkeypatch, Answer(None, "killed", code=NO_MEMORY), Answer(None, "no word of memory"))
    assert bench.trials.look({"batch.micro": 1}).short_of_memory
    assert not bench.trials.look({"batch.micro": 2}).short_of_memory, "words decide nothing"
    monkeypatch.setattr(bench, "plan_of", lambda config: Fault("", "not enough", code=NO_MEMORY))
    refused = bench.trials.look({"batch.micro": 4})
    assert (refused.failure, refused.short_of_memory) == ("not enough", True)


def test_the_rival_is_the_best_so_far_and_noise_does_not_make_one_hopeless(monkeypatch):
    noisy = made_up(2.0, spread=1.5)
    bench = Bench(monkeypatch, Answer(noisy), Answer(made_up(1.0)), Answer(made_up(3.0, last=3.5)), Answer(made_up()))
    for size in (1, 2, 4):
        bench.trials.look({"batch.micro": size})
    bench.trials.look({"batch.micro": 8})
    margin = _HOPELESS * 1.5
    assert [rival for rival, _ in bench.asked] == [
        None,
        Rival((2.0, 2.0, 2.0), margin),
        Rival((1.0, 1.0, 1.0), margin),
        Rival((1.0, 1.0, 1.0), margin),
    ]


def test_settings_that_plan_the_same_are_tried_once(monkeypatch):
    bench = Bench(monkeypatch, Answer(made_up()), Answer(made_up()))
    first = bench.trials.look({"attention.implementation": "auto"})
    assert bench.trials.look({"attention.implementation": "sdpa"}) is first
    other = bench.trials.look({"attention.implementation": "auto", "batch.micro": 2})  # the twin: it plans another run
    assert other is not first
    assert len(bench.asked) == 2


def test_threads_that_prepare_batches_are_tried_though_no_plan_knows_them(monkeypatch):
    bench = Bench(monkeypatch, Answer(made_up()), Answer(made_up()))
    without = bench.trials.look({"data.workers": 0})
    assert bench.trials.look({"data.workers": 1}) is not without
    assert len(bench.asked) == 2


def test_nobody_keeps_up_with_what_is_not_taken(monkeypatch):
    wrong = made_up(0.1, losses=(9.0, 9.0))
    bench = Bench(monkeypatch, Answer(wrong), Answer(made_up()))
    assert not bench.trials.look({"batch.micro": 1}).passed
    bench.trials.look({"batch.micro": 2})
    assert bench.asked[1][0] is None


def test_what_compiles_is_slow_at_first_and_has_no_rival(monkeypatch):
    bench = Bench(monkeypatch, Answer(made_up()), Answer(made_up()))
    bench.trials.look({"compile": "off"})
    bench.trials.look({"compile": "default"})
    assert bench.asked[1][0] is None


def test_what_was_given_up_has_the_rate_of_the_best_times_how_fast_it_was_beside_it(monkeypatch):
    bench = Bench(monkeypatch, Answer(made_up(1.0)), Answer(made_up(9.0, seconds=(), tokens=(), beside=0.25)))
    best, other = (bench.trials.look({"batch.micro": size}) for size in (1, 2))
    assert (best.rate, best.early) == (200.0, False)
    assert (other.rate, other.early, other.passed) == (50.0, True, True)


@pytest.mark.parametrize(("fast", "turns"), [(0.5, 1), (0.97, 2)])
def test_the_last_word_takes_a_second_turn_where_the_first_one_is_close(monkeypatch, fast, turns):
    answers = [Answer(made_up(1.0)), Answer(made_up(fast))] * turns
    bench = Bench(monkeypatch, *answers)
    start, best = bench.trials.in_turns(Tried({"batch.micro": 1}, 1.0), Tried({"batch.micro": 2}, 2.0))
    assert (start.rate, best.rate) == (200.0, pytest.approx(200.0 / fast))
    assert [rival for rival, _ in bench.asked] == [None] * (2 * turns)


def test_a_machine_that_others_use_is_told_of():
    def tuned(*shares: float) -> Tuned:
        tried = tuple(Tried({}, 1.0, held_up=share) for share in shares)
        return Tuned(tried[0], tried[0], {}, tried, (), (), 2)

    assert tuned(0.0, 0.4, 0.5).held_up == 0.4
    assert tuned(0.0, 0.05, 0.5).held_up == 0.0
