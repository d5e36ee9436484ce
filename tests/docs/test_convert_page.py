"""docs/convert.md: both tables are those of the code."""

from helpers.doc_pages import ROOT, table
from surefoot.models.convert.layouts import LAYOUTS
from surefoot.models.convert.rules import KINDS

PAGE = ROOT / "docs" / "convert.md"


def test_the_layouts_are_those_of_the_code():
    rows = table(PAGE, "layout", "recognized by", "`--to`", "rules to convert from it")
    assert [tuple(row) for row in rows] == [
        (f"`{layout.name}`", layout.recognized_by, "yes" if layout.to else "", ", ".join(layout.rules))
        for layout in LAYOUTS
    ]
    assert {rule for layout in LAYOUTS for rule in layout.rules} <= KINDS.keys()


def test_the_rules_are_those_of_the_code():
    rows = table(PAGE, "rule", "what it does", "undone by")
    assert [tuple(row) for row in rows] == [
        (f"`{name}`", kind.sentence, kind.inverse or "nothing") for name, kind in KINDS.items()
    ]
