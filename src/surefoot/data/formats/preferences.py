"""What a file holds against what a stage learns from.

Preference data met by supervised training are refused, because learning all of it would teach the bad answers as well;
and so are plain answers where a stage compares two, or wants to know which are good. Two kinds of preference data are
known by their fields: a better and a worse answer in one record (`chosen`, `rejected`), and answers that are marked
good or bad (`label`: true or false), as TRL and LLaMA-Factory have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.data.formats.fields import RowFault, listed
from surefoot.data.formats.judgements import MARKS, mark_field
from surefoot.data.formats.layouts import LAYOUTS, forms, recognise
from surefoot.data.formats.messages import read_messages, read_prompt_completion
from surefoot.data.formats.openings import OPENINGS, opening_field
from surefoot.data.formats.ranking import PAIR
from surefoot.data.formats.sharegpt import read_sharegpt
from surefoot.data.kind import Kind
from surefoot.data.rows import Row
from surefoot.errors import Fault, InputError

_MARK = "label"
_ANSWERS = ("messages", "conversations", "completion", "output")  # fields that hold what `label` judges
_QUESTIONS = ("prompt", "question", "instruction", "query", "input")


def refuse_preferences(rows: Sequence[Row], name: str) -> None:
    """InputError for pairs of a better and a worse answer, and for answers of which some are marked as bad. name: the
    file. Answers that are all marked as good can be learned."""
    first = rows[0].value
    if all(column in first for column in PAIR):
        what = f"row 1 is a preference record (it has {listed(PAIR)}): sft would not know which answer to learn"
        advice = f"choose stage dpo or reward, or data.format preference; {_advice(first)}"
        raise InputError(Fault(f"{name}:{rows[0].line}", what, advice))
    bad = [row for row in rows if row.value.get(_MARK) is False and any(field in row.value for field in _ANSWERS)]
    if bad:
        what = (
            f"row {bad[0].number} is a preference record (its {_MARK!r} is false, as in {len(bad):,} of {len(rows):,} "
            "records): supervised training would learn its bad answers, too"
        )
        fix = (
            f"choose stage kto; or keep only the records whose {_MARK!r} is true, or name the source's format to learn "
            "them all"
        )
        raise InputError(Fault(f"{name}:{bad[0].line}", what, fix))


def kind_of_record(record: Mapping[str, Any]) -> Kind:
    """What can be learned from records like this one. Prompts are never meant by themselves."""
    if all(column in record for column in PAIR):
        return "pairs"
    return "judged" if isinstance(record.get(mark_field(record) or ""), bool) else "answers"


def layout_of(kind: Kind, asked: str, rows: Sequence[Row], name: str, *, texts: bool = False) -> tuple[str, str]:
    """The layout of the records and how it is known. asked: auto or a layout's name. name: the file. texts: a `text`
    field is taken before any other layout. InputError for records that a stage of this kind cannot learn from."""
    if kind != "answers":
        return layout_for(kind, asked, rows, name)
    if asked != "auto":
        return asked, "asked for"
    refuse_preferences(rows, name)
    if texts and "text" in rows[0].value:
        return recognise(rows, name, among=("text",))
    return recognise(rows, name)


def layout_for(kind: Kind, asked: str, rows: Sequence[Row], name: str) -> tuple[str, str]:
    """The layout of records for a stage that learns from pairs, judged answers or prompts, and the reason. asked: auto
    or a layout's name. InputError, with the stage that could learn from them, for records of another kind."""
    layout = {"pairs": "preference", "judged": "judged", "prompts": "prompts"}[kind]
    if asked not in ("auto", layout) and (kind != "prompts" or asked == "text"):
        what = f"is {asked}, and this stage reads {layout}"
        raise InputError(Fault("data.format", what, f"use auto or {layout}, or choose another stage"))
    first = rows[0].value
    pair, judged = all(column in first for column in PAIR), mark_field(first) is not None
    fits = {"pairs": pair, "judged": judged and not pair, "prompts": pair or opening_field(first) is not None}[kind]
    if not fits:
        raise InputError(Fault(f"{name}:{rows[0].line}", f"row 1 {_other_kind(kind, first)}", _KIND_FIX[kind]))
    how = "asked for" if asked != "auto" else f"the first record has {listed(_seen(kind, first))}"
    return layout, f"{how}; {forms(rows, layout)}"


_KIND_FIX: Mapping[Kind, str] = {
    "pairs": "name the fields in the source's columns: {chosen: FIELD, rejected: FIELD}, or choose another stage",
    "judged": "name the field in the source's columns: {label: FIELD}, or choose another stage",
    "prompts": "name the field in the source's columns: {prompt: FIELD}",
}


def _seen(kind: Kind, record: Mapping[str, Any]) -> list[str]:
    marks = {"pairs": PAIR, "judged": MARKS, "prompts": ()}[kind]
    return [name for name in (*OPENINGS, *marks) if name in record]


def _other_kind(kind: Kind, record: Mapping[str, Any]) -> str:
    """What a record of another kind is, and what this one learns from."""
    wanted = {
        "pairs": f"this stage compares two answers ({listed(PAIR)})",
        "judged": f"this stage wants to know of every answer whether it is good ({listed(MARKS)})",
        "prompts": f"this stage answers prompts ({listed(OPENINGS)})",
    }[kind]
    if all(column in record for column in PAIR):
        return f"is a pair for stage dpo or reward (it has {listed(PAIR)}), and {wanted}"
    if mark_field(record) is not None:
        return f"is a judged answer for stage kto (it has {mark_field(record)!r}), and {wanted}"
    known = next((layout for layout in LAYOUTS if LAYOUTS[layout].needed and LAYOUTS[layout].fits(record)), None)
    stage = "pretrain" if known == "text" else "sft"
    found = f"is {known} data for stage {stage} (it has {listed(record)})" if known else f"has {listed(record)}"
    return f"{found}, and {wanted}"


def _advice(record: Mapping[str, Any]) -> str:
    """The columns by which the better answers of such records can be read, where there are any: they were tried."""
    better = record["chosen"]
    attempts = [
        ({"messages": "chosen"}, lambda: read_messages({"messages": better})),
        ({"conversations": "chosen"}, lambda: read_sharegpt({"conversations": better})),
        *(
            (
                {"prompt": column, "completion": "chosen"},
                lambda column=column: read_prompt_completion({"prompt": record[column], "completion": better}),
            )
            for column in _QUESTIONS
            if column in record
        ),
    ]
    for columns, read in attempts:
        try:
            read()
        except RowFault:
            continue
        shown = ", ".join(f"{field}: {own}" for field, own in columns.items())
        return f"to learn the better answers, set the source's columns: {{{shown}}}"
    return "to learn the better answers, write a file of dialogues that end with them"
