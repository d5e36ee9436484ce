"""The example that learns colours: far above chance, and what plain transformers says is what the run learned."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "colours.py"


def example():
    spec = importlib.util.spec_from_file_location("colours", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_short_run_is_made_and_asked(tmp_path):
    assert 0 <= example().main(tmp_path / "colours", count=32, epochs=1, asked=8) <= 1


@pytest.mark.slow
def test_the_colours_are_learned(tmp_path):
    assert example().main(tmp_path / "colours") >= 0.9
