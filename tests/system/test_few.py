"""Numbers with their words."""

from __future__ import annotations

import pytest

from surefoot.system.few import counted, was


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0 steps were"), (1, "1 step was"), (2, "2 steps were"), (1200, "1,200 steps were")],
)
def test_a_number_has_its_word(number: int, said: str) -> None:
    assert f"{counted(number, 'step')} {was(number)}" == said
