"""Preference data met by supervised training: refused, because learning all of it would teach the bad answers as well.

Two kinds are known by their fields: a better and a worse answer in one record (`chosen`, `rejected`), and answers that
are marked good or bad (`label`: true or false), as TRL and LLaMA-Factory have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.data.formats.fields import RowFault, listed
from surefoot.data.formats.messages import read_messages, read_prompt_completion
from surefoot.data.formats.sharegpt import read_sharegpt
from surefoot.data.rows import Row
from surefoot.errors import Fault, InputError

_PAIR = ("chosen", "rejected")
_MARK = "label"
_ANSWERS = ("messages", "conversations", "completion", "output")  # fields that hold what `label` judges
_QUESTIONS = ("prompt", "question", "instruction", "query", "input")


def refuse_preferences(rows: Sequence[Row], name: str) -> None:
    """InputError for pairs of a better and a worse answer, and for answers of which some are marked as bad. name: the
    file. Answers that are all marked as good can be learned."""
    first = rows[0].value
    if all(column in first for column in _PAIR):
        what = f"row 1 is a preference record (it has {listed(_PAIR)}): sft would not know which answer to learn"
        raise InputError(Fault(f"{name}:{rows[0].line}", what, _advice(first)))
    bad = [row for row in rows if row.value.get(_MARK) is False and any(field in row.value for field in _ANSWERS)]
    if bad:
        what = (
            f"row {bad[0].number} is a preference record (its {_MARK!r} is false, as in {len(bad):,} of {len(rows):,} "
            "records): supervised training would learn its bad answers, too"
        )
        fix = f"keep only the records whose {_MARK!r} is true, or name the source's format to learn them all"
        raise InputError(Fault(f"{name}:{bad[0].line}", what, fix))


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
