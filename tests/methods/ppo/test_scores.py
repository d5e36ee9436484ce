"""Scores from a function or a server of the user's own: what is returned is checked, what is wrong is one line."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from helpers.faults import raises_fault
from helpers.http_stub import answering
from helpers.model_layouts import run_config
from surefoot.methods.ppo import scores as scorers
from surefoot.methods.ppo.scores import checked, named_scorer, reward_model
from surefoot.system import posting

CODE = """\
import math
from dataclasses import dataclass

from beside import FACTOR


@dataclass
class Kind:
    name: str


def length(prompts, responses):
    return [FACTOR * len(response) for response in responses]


def broken(prompts, responses):
    table = {}
    return [table[prompt] for prompt in prompts]


def short(prompts, responses):
    return [1.0]


def lost(prompts, responses):
    return [math.nan, math.inf]


number = 5
"""
PROMPTS, RESPONSES = ["a", "b"], ["xy", "xyz"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    (tmp_path / "beside.py").write_text("FACTOR = 2\n")
    return path


def test_a_function_scores(file):
    assert named_scorer(f"{file}:length")(PROMPTS, RESPONSES) == [4.0, 6.0]


def test_scores_that_are_not_finite_are_handed_on(file):
    first, second = named_scorer(f"{file}:lost")(PROMPTS, RESPONSES)
    assert math.isnan(first)
    assert second == math.inf


def test_what_is_not_there_or_does_not_run_is_refused(file, tmp_path):
    for name in ("lenght", "nothing", "number"):
        with raises_fault("SF-OWN-FUNCTION", "ppo.reward"):
            named_scorer(f"{file}:{name}")
    with raises_fault("SF-FILE-MISSING", "ppo.reward"):
        named_scorer(f"{tmp_path}/none.py:f")
    for code, line in (("def f(:\n", 1), ("\n\n1 / 0\n", 3)):
        (tmp_path / "bad.py").write_text(code)
        with raises_fault("SF-OWN-FUNCTION", f"{tmp_path}/bad.py:{line}"):
            named_scorer(f"{tmp_path}/bad.py:f")


def test_an_error_names_file_and_line(file):
    with raises_fault("SF-OWN-FUNCTION", f"{file}:18", "KeyError"):
        named_scorer(f"{file}:broken")(PROMPTS, RESPONSES)


def test_one_number_for_each_answer(file):
    with raises_fault("SF-OWN-FUNCTION", f"{file}:short"):
        named_scorer(f"{file}:short")(PROMPTS, RESPONSES)
    for found in (torch.tensor([1.0, 2.0]), np.array([1, 2]), [torch.tensor(1.0), np.float32(2)], (1, 2), iter([1, 2])):
        assert checked(lambda p, r, found=found: found, "mine")(PROMPTS, RESPONSES) == [1.0, 2.0]
    for found in (None, 3.0, "12", {"a": 1, "b": 2}, [True, False], ["1", "2"], [None, 1]):
        with raises_fault("SF-OWN-FUNCTION", "mine"):
            checked(lambda p, r, found=found: found, "mine")(PROMPTS, RESPONSES)


def test_what_is_neither_function_nor_address_is_a_model():
    def model(named):
        return reward_model(run_config(stage="ppo", ppo={"reward": named}))

    assert [model(one) for one in ("runs/reward", "org/reward-model")] == ["runs/reward", "org/reward-model"]
    assert [model(one) for one in ("mine.py:length", "http://localhost:1", None)] == [None] * 3


def test_a_server_scores(monkeypatch):
    with answering(lambda path, body: (200, {"scores": [len(one) for one in body["responses"]]})) as stub:
        assert named_scorer(f"{stub.address}/score")(PROMPTS, RESPONSES) == [2.0, 3.0]
        assert stub.asked == [("/score", {"prompts": PROMPTS, "responses": RESPONSES})]


def test_a_server_that_answers_wrongly_is_named():
    for answer, code in (
        ({"scores": [1.0]}, "SF-OWN-FUNCTION"),
        ({"scores": [1.0, float("nan")]}, "SF-SERVER"),
        ({"scores": ["1", "2"]}, "SF-OWN-FUNCTION"),
        ({"score": [1.0, 2.0]}, "SF-SERVER"),
        ([1.0, 2.0], "SF-SERVER"),
        ("hello", "SF-SERVER"),
    ):
        with answering(lambda *_, answer=answer: (200, answer)) as stub:
            scorer = named_scorer(stub.address)
            with raises_fault(code, stub.address):
                scorer(PROMPTS, RESPONSES)


def test_a_server_that_fails_ends_the_run(monkeypatch):
    monkeypatch.setattr(posting, "Server", partial(posting.Server, pause=0.0))
    with answering(lambda *_: (500, "no")) as stub, raises_fault("SF-SERVER", stub.address):
        named_scorer(stub.address)(PROMPTS, RESPONSES)
    with raises_fault("SF-CONFIG-VALUE", "ppo.reward"):
        named_scorer("http://")


def test_twin_without_the_check_a_wrong_number_would_pass(file, monkeypatch):
    monkeypatch.setattr(scorers, "_one_each", lambda found, count, name: found)
    assert named_scorer(f"{file}:short")(PROMPTS, RESPONSES) == [1.0]
