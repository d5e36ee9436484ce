"""Groups are scored as they come, and their scores are in the order of the answers."""

import threading
from dataclasses import replace

import pytest

from surefoot.methods.rewards.answers import Answers, Score
from surefoot.methods.rewards.as_drawn import AsDrawn
from surefoot.methods.rewards.terms import Reward

STUCK = 60.0


def described(places, answers):
    names = [f"{place}:{answer}" for place, answer in zip(places, answers, strict=True)]
    return Answers(names, names, [()] * len(names), [{}] * len(names), [True] * len(names))


def graded(answers):
    return [Score(float(one.split(":")[0]), one) for one in answers.responses]


SERVER = Reward("server", 1.0, graded, "server", at_once=2)
OWN = Reward("own", 1.0, graded, "own")


def test_scores_are_in_the_order_of_the_answers_whatever_the_order_they_come_in():
    with AsDrawn([OWN, SERVER], 2, 6, described) as early:
        for place in (5, 0, 3, 4, 2, 1):
            early.arrived(place, "x")
    scores = early.scores()
    assert scores.keys() == {"server"}
    assert [one.reason for one in scores["server"]] == [f"{place}:x" for place in range(6)]


@pytest.mark.parametrize("early", [True, False])
def test_a_group_is_scored_before_the_others_are_there(early):
    """The twin's reward is one that gets all answers together."""
    asked = threading.Event()

    def told(answers):
        asked.set()
        return graded(answers)

    reward = replace(SERVER, grade=told, at_once=int(early))
    with AsDrawn([reward], 2, 4, described) as groups:
        groups.arrived(0, "x")
        assert not asked.is_set()
        groups.arrived(1, "x")
        assert asked.wait(STUCK if early else 0.0) == early
        groups.arrived(2, "x")
        groups.arrived(3, "x")


def test_what_the_first_group_raises_is_raised_and_an_error_of_the_block_ends_the_waiting():
    def fails(answers):
        raise ValueError(answers.responses[0])

    with AsDrawn([replace(SERVER, grade=fails)], 1, 3, described) as early:
        for place in (2, 1, 0):
            early.arrived(place, "x")
    with pytest.raises(ValueError, match="0:x"):
        early.scores()

    started, goes_on, calls = threading.Event(), threading.Event(), []

    def waits(answers):
        calls.append(answers.responses)
        started.set()
        assert goes_on.wait(STUCK)
        return graded(answers)

    def draw():
        with AsDrawn([replace(SERVER, grade=waits, at_once=1)], 1, 3, described) as early:
            for place in range(3):
                early.arrived(place, "x")
            assert started.wait(STUCK)
            threading.Timer(0.2, goes_on.set).start()  # the block ends first
            raise KeyError

    with pytest.raises(KeyError):
        draw()
    assert calls == [["0:x"]]
