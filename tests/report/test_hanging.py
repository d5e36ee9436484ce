"""Long values go on below themselves and leave no blanks at line ends."""

from __future__ import annotations

import io

import pytest
import rich.console
from rich.text import Text

from surefoot.report.hanging import Hanging


def printed(text: str, width: int) -> list[str]:
    out = io.StringIO()
    rich.console.Console(file=out, width=width).print(Hanging(Text("  name  "), Text(text)))
    return out.getvalue().splitlines()


def test_a_full_line_goes_on_below_the_text():
    assert printed("one two three four five six seven", 30) == ["  name  one two three four", "        five six seven"]


def test_short_texts_and_line_ends_of_their_own():
    assert printed("one", 30) == ["  name  one"]
    assert printed("one\n\ntwo \n", 30) == ["  name  one", "", "        two", ""]


@pytest.mark.parametrize("width", [28, 45, 200])
def test_no_word_is_lost_and_no_line_ends_with_blanks(width):
    words = "a longer text of several words and one_word_that_is_longer_than_any_line_can_be " * 3
    lines = printed(words, width)
    assert "".join("".join(lines).split()) == "name" + "".join(words.split())
    assert all(line == line.rstrip() for line in lines)
