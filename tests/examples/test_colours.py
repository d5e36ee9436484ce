"""The example that learns colours: far above chance, and what plain transformers says is what the run learned."""

import pytest

import colours


def test_a_short_run_is_made_and_asked(tmp_path):
    assert 0 <= colours.main(tmp_path / "colours", count=32, epochs=1, asked=8) <= 1


@pytest.mark.slow
def test_the_colours_are_learned(tmp_path):
    assert colours.main(tmp_path / "colours") >= 0.9
