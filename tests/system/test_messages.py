"""Numbers with their words.

No code that a terminal obeys is left in a text, and none is lost from JSON.
"""

import json
import time

import pytest

from surefoot.system import messages
from surefoot.system.messages import clean, counted, shown_json, was


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0 steps were"), (1, "1 step was"), (2, "2 steps were"), (1200, "1,200 steps were")],
)
def test_a_number_has_its_word(number: int, said: str) -> None:
    assert f"{counted(number, 'step')} {was(number)}" == said


TITLE = "\x1b]0;title\x07"
OBEYED = [
    "\x1b[31m",
    "\x9b31m",
    TITLE,
    "\x9d0;title\x9c",
    "\x1b]52;c;aGk=\x1b\\",
    "\x1bc",
    "\x08",
    "\x7f",
    "\x85",
    "\u202e",
]


def test_codes_go_and_the_text_around_them_stays():
    for code in OBEYED:
        assert clean(f"one {code}two") == "one two"


def test_what_languages_need_stays():
    text = "naïve 日本 \u200fעברית\u200e \u2067مرحبا\u2069 👩\u200d🔬\ttab\nline"
    assert clean(text) == text
    assert clean("a\r\nb\rc") == "a\nb\nc"


def test_json_keeps_the_value_and_shows_no_code():
    for code in OBEYED:
        shown = shown_json({"name": f"é{code}"})
        assert json.loads(shown) == {"name": f"é{code}"}
        assert clean(shown) == shown
        assert "é" in shown


def test_twin_json_alone_leaves_codes_of_one_character(monkeypatch):
    monkeypatch.setattr(messages, "_IN_JSON", {})
    shown = shown_json("\x9b31m")
    assert clean(shown) != shown


def test_a_megabyte_of_beginnings_takes_no_time():
    for piece in ["\x1b]", "\x9d", "\x1b[", "\x9b;", "\x1b"]:
        started = time.process_time()
        clean(piece * 500_000)
        assert time.process_time() - started < 5
