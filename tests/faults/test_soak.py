"""Each test of `make soak` belongs to a part, and a part has as many trials as was asked for."""

import re
from pathlib import Path

import pytest

from faults.soak import PARTS, sizes

MARKED = re.compile(r'@(?:pytest\.mark\.soak|short_and_soak)(?:\("([^"]*)")?')
FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "exactness")


def marked() -> list[str]:
    """The part of each marked test of the folders that `make soak` names; "" for one without."""
    here = Path(__file__)
    texts = [path.read_text() for folder in FOLDERS for path in sorted(folder.glob("test_*.py")) if path != here]
    return [part for text in texts for part in MARKED.findall(text)]


def test_every_long_test_belongs_to_a_part_and_every_part_has_one() -> None:
    assert set(marked()) == set(PARTS)


def test_a_scale_and_counts() -> None:
    assert sizes(1.0, []) == PARTS
    found = sizes(0.01, ["killed runs=7"])
    assert (found["killed runs"], found["power failures"], found["each operation of a run"]) == (7, 5, 1)


@pytest.mark.parametrize("words", ["killed=7", "killed runs=0", "killed runs=²", "killed runs", "killed runs=-1"])
def test_another_part_or_count_is_refused(words: str) -> None:
    with pytest.raises(pytest.UsageError, match="give PART=COUNT"):
        sizes(1.0, [words])
