"""docs/sources.md says what the code does: suffixes, keys of dataset_info.json, words of the hub's refusals."""

import re

import pytest

from helpers.doc_pages import ROOT
from surefoot.data.sources import dataset_info as described
from surefoot.system import hub as hub_client
from surefoot.system.locations import DATA_KINDS

PAGE = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")


def first_column(section: str) -> list[str]:
    """The first cells of the table below a heading, without its head."""
    below = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in below.splitlines() if line.startswith("|")][2:]


def test_suffixes():
    assert {suffix for cell in first_column("Files") for suffix in re.findall(r"`(\.\w+)`", cell)} == set(DATA_KINDS)


def test_keys_of_the_description():
    named = {key for cell in first_column("dataset_info.json") for key in re.findall(r"`(\w+)`", cell)}
    known = {*described._KEYS, *described._NOT_READ, *described._MARKS, *described._MEDIA}
    assert named == known


@pytest.mark.parametrize("words", first_column("Access, networks, offline"))
def test_refusals_are_worded_as_the_code_does(words):
    files = ("system/hub.py", "models/folder.py")
    code = "".join((ROOT / "src" / "surefoot" / file).read_text(encoding="utf-8") for file in files)
    for part in re.split(r" \(public\) |, (?=cannot)", words.replace("500", "").removesuffix(" of this name").strip()):
        assert part.removesuffix(" model") in code, part
    assert set(hub_client.NOUN.values()) == {"model", "data set"}
