"""docs/families.md: the table is that of the code, and the quoted error is what a user sees."""

import pytest

from helpers.doc_pages import ROOT, names, table
from helpers.model_layouts import run_config
from helpers.zoo import phi3
from surefoot.families import FAMILIES
from surefoot.runs.make_plan import make_plan
from surefoot.system.errors import InputError

PAGE = ROOT / "docs" / "families.md"
BOS = {True: "yes", False: "no", None: "as its chat template or tokenizer does"}


def words(cell: str) -> tuple[str, ...]:
    """A bar in a cell is escaped."""
    return tuple(names(cell.replace("\\|", "|")))


def test_the_table_has_every_family():
    rows = table(PAGE, "family", "`model_type`", "modules that `adapter.targets: all-linear` takes", "BOS in front")
    said = {names(family)[0]: (tuple(names(types)), names(targets), bos) for family, types, targets, bos in rows}
    assert said == {
        family.name: (
            family.model_types,
            list(dict.fromkeys(linear.path.rpartition(".")[2] for linear in family.structure.linears)),
            BOS[family.uses_bos],
        )
        for family in FAMILIES
        if family.structure
    }


def test_the_table_of_facts_by_name_has_every_other_family():
    rows = table(PAGE, "family", "`model_type`", "ends a turn", "may pad", "must not pad", "BOS in front", "templates")
    said = {
        names(family)[0]: (*(words(cell) for cell in (types, ends, pads, not_pads, templates)), bos)
        for family, types, ends, pads, not_pads, bos, templates in rows
    }
    assert said == {
        family.name: (
            family.model_types,
            family.turn_ends,
            tuple(pad.token for pad in family.reserved_pads),
            tuple(pad.token for pad in family.forbidden_pads),
            family.templates,
            BOS[family.uses_bos],
        )
        for family in FAMILIES
        if not family.structure
    }


def test_the_quoted_error_is_the_one_that_is_raised(tmp_path):
    config = run_config(
        model=str(phi3(tmp_path / "phi3")), adapter={"kind": "lora", "targets": ["q_proj"]}, data={"train": "a.jsonl"}
    )
    with pytest.raises(InputError) as caught:
        make_plan(config, measure=False)
    assert f"error: {caught.value} [{caught.value.faults[0].code}]\n" in PAGE.read_text(encoding="utf-8")
