"""The header of a README: read where it is plain, refused in one line where reading it would take for ever."""

from __future__ import annotations

import pytest
import yaml

from helpers.faults import raises_fault
from surefoot.data.sources import hub_files as hub_card
from surefoot.data.sources.hub_files import choose_files, read_header

MERGES = "a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
LISTS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
REFUSED = {
    "merge keys that double": MERGES,
    "lists that double": LISTS,
    "an alias of itself": "a: &a [*a]\n",
    "a number to base 60": "a: " + "1:" * 400_000 + "1\n",
    "a fraction to base 60": "a: " + "1:" * 400 + "1.5\n",
    "a long header": "a: 1\n" * 300_000,
    "depth": "a: " + "[" * 100_000 + "\n",
    "no date": "a: 2024-99-99\n",
    "a tag of nothing": "a: !!int ''\n",
    "code": "a: !!python/object/apply:os.system ['touch marker']\n",
}


def test_refused_in_one_line_and_soon() -> None:
    for text in REFUSED.values():
        with raises_fault("SF-DATA-HUB", "x/y/README.md") as caught:
            choose_files("x/y", ["a.jsonl"], f"---\n{text}---\n", None, "train")
        assert "\n" not in str(caught.value)


def test_twin_a_plain_loader_takes_the_alias() -> None:
    assert yaml.safe_load("a: &a [1]\nb: *a\n") == {"a": [1], "b": [1]}


@pytest.mark.parametrize(
    ("readme", "header"),
    [
        ("---\na: 1\nb: &b [x]\n---\ntext\n", {"a": 1, "b": ["x"]}),
        ("--- \r\na: 1\r\n---\t\r\n", {"a": 1}),
        ("---\n<<: {a: 1}\n---", {"a": 1}),
        ("---\n---\n", None),
        ("---\na: 1\n", None),
        ("# A title\n---\na: 1\n---\n", None),
        ("", None),
    ],
)
def test_headers(readme: str, header: object) -> None:
    assert read_header("x/y", readme) == header


def test_blank_lines_do_not_multiply() -> None:
    """A pattern that takes any blanks after the first fence tries each of them as the header's start."""
    assert read_header("x/y", "---" + "\n" * 1_000_000 + "x") is None


def test_twin_without_its_limit_a_long_header_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_card, "MAX_CHARACTERS", 10)
    with raises_fault("SF-DATA-HUB", "x/y/README.md"):
        read_header("x/y", "---\nabc: defghi\n---\n")
    monkeypatch.setattr(hub_card, "MAX_CHARACTERS", 100)
    assert read_header("x/y", "---\nabc: defghi\n---\n") == {"abc": "defghi"}
