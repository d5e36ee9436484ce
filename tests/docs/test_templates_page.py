"""docs/templates.md: every template stands in the table, and the examples are what the code writes."""

import re
from dataclasses import replace

import pytest

from helpers.doc_pages import ROOT, names, table
from helpers.golden_templates import golden_encoder
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.families.templates import NAMES, OWN, ROWS, Prompt

PAGE = ROOT / "docs" / "templates.md"
SYSTEM, USER, ANSWER = Turn("system", "Be brief."), Turn("user", "Name a bird."), Turn("assistant", "Heron.")


def example(row) -> str:
    """One conversation as the row writes it, the learned part marked; with a system text where the row takes one."""
    encoder = golden_encoder()
    template = make_template(row.name, encoder, (encoder.tokenizer.eos_token_id,))
    turns = (SYSTEM, USER, ANSWER) if not isinstance(row, Prompt) else (USER, ANSWER)
    text = ""
    for segment in template.segments(Conversation(turns)):
        text += f"⟦{segment.text}⟧" if segment.answer else segment.text
    return text.replace("⟧⟦", "").removeprefix("<s>").rstrip("\n")


def tools_of(row) -> str:
    return "–" if isinstance(row, Prompt) or row.tools is None else row.tools.name


def test_the_table_has_every_row():
    rows = table(PAGE, "`data.template`", "layout", "control tokens", "tools")
    said = {names(name)[0]: (about, control, tools) for name, about, control, tools in rows}
    assert said == {row.name: (row.about, "needed" if row.control else "–", tools_of(row)) for row in ROWS}
    assert {*said, OWN} == set(NAMES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_example_is_what_the_code_writes(row):
    blocks = re.findall(
        r"^### (\S+)\n\n```text\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    written = re.sub(r" +$", lambda blanks: "·" * len(blanks[0]), example(row), flags=re.MULTILINE)
    assert dict(blocks)[row.name] == written


def test_twin_another_example_is_noticed():
    row = next(row for row in ROWS if row.name == "chatml")
    assert example(row) != example(next(other for other in ROWS if other.name == "zephyr"))
    with pytest.raises(RowFault):
        make_template("alpaca", golden_encoder(), (1,)).segments(Conversation((USER, ANSWER, USER, replace(ANSWER))))
