"""Patterns of a README mean what the regular expression for them means, and none takes long."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.faults import raises_fault
from surefoot.data.sources import hub_files as globs
from surefoot.data.sources.hub_files import matching


def by_expression(glob: str, path: str) -> bool:
    """The same by a regular expression, which takes a time that doubles with each star."""
    escaped = re.escape(glob.removeprefix("./"))
    wild = escaped.replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return re.fullmatch(wild, path) is not None


GLOBS = st.text("ab/*?.", max_size=8)
PATHS = st.text("ab/.", max_size=8)


@given(GLOBS, PATHS)
def test_as_the_regular_expression(glob: str, path: str) -> None:
    assert (matching("x/y", [glob], [path]) == [path]) is by_expression(glob, path)


@pytest.mark.parametrize(
    ("glob", "path", "meant"),
    [
        ("data/*.csv", "data/a.csv", True),
        ("data/*.csv", "data/b/a.csv", False),
        ("**/*.csv", "a.csv", True),
        ("**/*.csv", "a/b/c.csv", True),
        ("a/**/c.csv", "a/c.csv", True),
        ("a/**", "a/b/c.csv", True),
        ("a?.csv", "ab.csv", True),
        ("a?.csv", "a/.csv", False),
        ("a+b.csv", "aab.csv", False),
        ("./a.csv", "a.csv", True),
        ("a[1].csv", "a[1].csv", True),
    ],
)
def test_by_hand(glob: str, path: str, meant: bool) -> None:
    assert by_expression(glob, path) is meant
    assert (matching("x/y", [glob], [path]) == [path]) is meant


def test_stars_do_not_multiply() -> None:
    """The expression above would try about 60 over 30 ways, 10^17."""
    path = "a" * 60 + ".jsonl"
    assert matching("x/y", ["*a" * 30 + "*b", "**a" * 30 + "**b"], [path]) == []
    assert matching("x/y", ["*a" * 30 + "*l"], [path]) == [path]


def test_many_patterns_for_many_files_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(globs, "MOST_WORK", 100)
    with raises_fault("SF-DATA-HUB", "x/y"):
        matching("x/y", ["*a*a", "*b*b", "exact.csv"], ["aaaaaa", "bbbbbb", "cccccc"])
    assert matching("x/y", ["exact.csv"] * 99, ["exact.csv"] * 3) == ["exact.csv"] * 3, "no stars, no work"
