"""Built-in graders: compare an answer with a field of its record, or check its format. 1 is right, 0 wrong.

    exact    the answer, or the match of `pattern` in it, is the field's text, ignoring case and surrounding whitespace
    numeric  the last number of the answer is the field's last number; 1,200 and $1200.00 are 1200
    choice   the last single letter A to J of the answer is the field's
    regex    `pattern` is found in the answer
    length   the answer has a stop token and at most `longest` tokens
    json     the answer is JSON and matches the schema in the field, if one is named
    math, code    see `surefoot.methods.rewards.in_children`

Numbers are compared exactly, as fractions. If the reference answer of a record is missing or unreadable, training does
not begin: scoring 0 would teach that every answer is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from surefoot.config.methods import RewardTerm
from surefoot.methods.rewards.answers import Answers, Grade, Score
from surefoot.methods.rewards.in_children import TESTS, code_fault, code_grader, math_fault, math_grader
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import nearest_word

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
_LETTER = re.compile(r"(?<![A-Za-z0-9'])([A-J])(?![A-Za-z0-9'])")
_FENCE = re.compile(r"^\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*$", re.DOTALL)
_SHOWN = 60  # characters of a text in a reason


def _text(words: str) -> str | None:
    return " ".join(words.split()).casefold() or None


def number_in(words: str) -> Fraction | None:
    """Return the last number of a text."""
    found = _NUMBER.findall(words)
    try:
        return Fraction(found[-1].replace(",", "")) if found else None
    except (ValueError, ZeroDivisionError):
        return None


def _letter(words: str) -> str | None:
    found = _LETTER.findall(words)
    return found[-1] if found else None


_READ: Mapping[str, Callable[[str], Any]] = {"exact": _text, "numeric": number_in, "choice": _letter}
IN_CHILDREN = ("math", "code")  # they compute in other processes, at most as many as there are cores
COMPARING = (*_READ, *IN_CHILDREN)


def grader(term: RewardTerm, key: str) -> Grade:
    """Make the grader of a name in `GRADERS`. Raises InputError, naming `key`, for missing or unsupported keys."""
    return GRADERS[term.name](term, key)


def _comparing(term: RewardTerm, key: str) -> Grade:
    read, field, pattern = _READ[term.name], term.field or "answer", _pattern(term, key, groups=1)

    def grade(answers: Answers) -> list[Score]:
        return [
            _compared(read, _expected(record, field, read, term.name), words, pattern)
            for words, record in zip(answers.responses, answers.records, strict=True)
        ]

    return grade


def expected_fault(term: RewardTerm, record: Mapping[str, Any]) -> str:
    """Return why a grader cannot compare with this record, or ""."""
    if term.name in ("math", "code"):
        return (math_fault if term.name == "math" else code_fault)(term, record)
    if term.name not in _READ:
        return ""
    try:
        _expected(record, term.field or "answer", _READ[term.name], term.name)
    except InputError as error:
        return error.faults[0].what
    return ""


def fields_read(term: RewardTerm) -> tuple[str, ...] | None:
    """Return the fields of a record that a reward reads; None if it may read any."""
    if term.name in COMPARING:
        return (term.field or (TESTS if term.name == "code" else "answer"),)
    if term.name in GRADERS or term.is_model:
        return (term.field,) if term.field else ()
    return None


def _expected(record: Mapping[str, Any], field: str, read: Callable[[str], Any], name: str) -> Any:
    value = record.get(field)
    found = None if value is None or isinstance(value, bool | list | dict) else read(str(value))
    if found is None:
        near = nearest_word(field, list(record))
        fix = (
            f"name the field with the right answer (field: {near})" if near else "name the field with the right answer"
        )
        there = f"({_shown(str(value))})" if field in record else f"(it has {', '.join(record)})"
        what = f"has no reference answer for {name} in {field!r} {there}"
        raise InputError(Fault("grpo.rewards", what, fix, code="SF-REWARD"))
    return found


def _compared(read: Callable[[str], Any], expected: Any, words: str, pattern: re.Pattern[str] | None) -> Score:
    if pattern is not None:
        found = pattern.search(words)
        if found is None:
            return Score(0.0, f"{pattern.pattern!r} is not found")
        words = found[1] or ""
    said = read(words)
    if said is None:
        return Score(0.0, "the answer contains nothing to compare")
    return Score(float(said == expected), f"{_shown(str(said))}, and {_shown(str(expected))} is right")


def _regex(term: RewardTerm, key: str) -> Grade:
    pattern = _pattern(term, key, needed=True)
    assert pattern is not None

    def grade(answers: Answers) -> list[Score]:
        found = [bool(pattern.search(words)) for words in answers.responses]
        return [Score(float(one), "found" if one else "not found") for one in found]

    return grade


def _length(term: RewardTerm, key: str) -> Grade:
    most = term.longest
    if most is None:
        raise InputError(Fault(key, "length needs a limit", "set longest: TOKENS", code="SF-REWARD"))

    def grade(answers: Answers) -> list[Score]:
        return [
            Score(float(stopped and len(ids) <= most), f"{len(ids)} tokens{'' if stopped else ', no stop token'}")
            for ids, stopped in zip(answers.response_ids, answers.stopped, strict=True)
        ]

    return grade


def _json(term: RewardTerm, key: str) -> Grade:
    check = _schema_check(term.field, key) if term.field else None

    def grade(answers: Answers) -> list[Score]:
        return [
            _as_json(words, record, check) for words, record in zip(answers.responses, answers.records, strict=True)
        ]

    return grade


def _as_json(words: str, record: Mapping[str, Any], check: Callable[[Any, Mapping[str, Any]], str] | None) -> Score:
    fenced = _FENCE.match(words)
    try:
        value = json.loads(fenced[1] if fenced else words)
    except (ValueError, RecursionError) as error:
        return Score(0.0, f"no JSON: {_shown(str(error))}")
    wrong = check(value, record) if check else ""
    return Score(float(not wrong), wrong or "JSON")


def _schema_check(field: str, key: str) -> Callable[[Any, Mapping[str, Any]], str]:
    """Return how a value violates the schema in the record's field, or ""."""
    try:
        from jsonschema.validators import validator_for
    except ImportError:
        what = "json with a schema needs the package jsonschema, which is not installed"
        raise InputError(Fault(key, what, "pip install jsonschema, or leave field out", code="SF-REWARD")) from None

    def check(value: Any, record: Mapping[str, Any]) -> str:
        given = record.get(field)
        schema: Any = json.loads(given) if isinstance(given, str) else given
        wrong = next(iter(validator_for(schema)(schema).iter_errors(value)), None)
        return "" if wrong is None else _shown(wrong.message)

    return check


def _pattern(term: RewardTerm, key: str, *, groups: int | None = None, needed: bool = False) -> re.Pattern[str] | None:
    if term.pattern is None:
        if needed:
            raise InputError(Fault(key, f"{term.name} needs a pattern", "set pattern: …", code="SF-REWARD"))
        return None
    found = re.compile(term.pattern, re.DOTALL)
    if groups is not None and found.groups != groups:
        what = f"{term.pattern!r} has {found.groups} groups, but {term.name} needs exactly one"
        raise InputError(Fault(key, what, "put ( ) around the part to compare", code="SF-REWARD"))
    return found


def _shown(words: str) -> str:
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…"


GRADERS: Mapping[str, Callable[[RewardTerm, str], Grade]] = {
    **dict.fromkeys(_READ, _comparing),
    "regex": _regex,
    "length": _length,
    "json": _json,
    "math": lambda term, key: math_grader(term, key, _pattern(term, key, groups=1)),
    "code": lambda term, key: code_grader(term, key, _pattern(term, key, groups=1)),
}
