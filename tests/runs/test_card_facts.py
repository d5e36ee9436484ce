"""The card's settings are those that the optimizer goes by; its example is one of the data's."""

import re
from types import SimpleNamespace

import pytest

from surefoot.config.schema import OptimConfig
from surefoot.data.formats import Conversation, Turn
from surefoot.data.formats.reader import find_example_prompt
from surefoot.report.footer import EXAMPLE_PROMPT
from surefoot.runs.card_facts import _optimizer, _public_question


@pytest.mark.parametrize(
    ("optim", "names", "numbers"),
    [
        ({}, ["adamw", "betas", "eps"], ["0.9", "0.999", "1e-08", "0"]),
        ({"name": "adamw_8bit", "weight_decay": 0.1}, ["adamw_8bit", "betas", "eps"], ["0.9", "0.999", "1e-08", "0.1"]),
        ({"name": "adafactor"}, ["adafactor"], ["0"]),
        ({"name": "sgd", "momentum": 0.9}, ["sgd", "momentum"], ["0.9", "0"]),
        ({"name": "sgd"}, ["sgd", "momentum"], ["0", "0"]),
        ({"name": "rmsprop"}, ["rmsprop", "momentum", "eps"], ["0", "1e-08", "0"]),
        ({"name": "muon"}, ["muon", "momentum", "adamw", "betas", "eps"], ["0.95", "0.9", "0.999", "1e-08", "0"]),
    ],
)
def test_only_settings_that_apply_are_told(optim, names, numbers):
    told = _optimizer(OptimConfig(**optim))
    assert re.findall(r"adamw_8bit|adamw|adafactor|rmsprop|sgd|muon|momentum|betas|eps", told) == names
    assert re.findall(r"\b\d[\d.e-]*\b", told) == numbers


def test_the_example_is_the_first_short_question_of_one_line():
    def asked(*turns: Turn) -> str:
        return find_example_prompt([Conversation(turns)])

    user = Turn("user", "Who is it?")
    assert asked(Turn("system", "Be brief."), user) == "Who is it?"
    assert asked(Turn("user", "Add.", context="1 2")) == ""  # two lines
    assert asked(Turn("user", "x" * 81)) == asked(Turn("user", "a\nb")) == asked(Turn("user", "\x1b[31m")) == ""
    assert asked(Turn("user", "Read /home/me/x.")) == asked(Turn("user", "Write to me@home!")) == ""
    assert asked(Turn("user", "x" * 80)) == "x" * 80
    assert asked(Turn("text", "Once upon a\ntime there was a heron.")) == "Once upon a time there"
    assert find_example_prompt([Conversation((Turn("user", "x" * 81),)), Conversation((user,))]) == "Who is it?"


def test_the_card_asks_what_lies_on_the_hub_and_nothing_of_ones_own():
    def card(*sources: tuple[str | None, str]) -> str:
        found = [SimpleNamespace(source=SimpleNamespace(commit=one, example_prompt=text)) for one, text in sources]
        return _public_question(SimpleNamespace(sources=found))

    assert card((None, "Who is Ann?")) == EXAMPLE_PROMPT
    assert card((None, "Who is Ann?"), ("c" * 40, "What is a heron?")) == "What is a heron?"
    assert card((None, "Who is Ann?"), ("c" * 40, "")) == EXAMPLE_PROMPT
