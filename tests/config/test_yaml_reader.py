"""The reader follows YAML 1.2 (checked against ruamel.yaml, an independent reader), refuses what is unsafe or
ambiguous, and knows where everything stood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError as RuamelError

from helpers.errors_raised import raises_code
from surefoot.config import yaml_reader
from surefoot.config.yaml_reader import MAX_BYTES, MAX_DEPTH, Position, parse_value, parse_yaml, read_yaml
from surefoot.system.errors import InputError

SCALARS = {
    "1e-4": 1e-4,
    "1e4": 1e4,
    "1.5e3": 1500.0,
    "2.e-5": 2e-5,
    ".5": 0.5,
    "1.10": 1.1,
    "010": 10,
    "-7": -7,
    "+7": 7,
    "0o17": 15,
    "0xfF": 255,
    "true": True,
    "True": True,
    "FALSE": False,
    "null": None,
    "~": None,
    "": None,
    "no": "no",
    "off": "off",
    "Yes": "Yes",
    "on": "on",
    "y": "y",
    "tRue": "tRue",
    "nULL": "nULL",
    "12:30:45": "12:30:45",
    "2026-11-20": "2026-11-20",
    "1_000": "1_000",
    "0b11": "0b11",
    "1e": "1e",
    "e5": "e5",
    "3 epochs": "3 epochs",
    "-.inf": float("-inf"),
    "'1e4'": "1e4",
    '"no"': "no",
}


def load(text: str) -> Any:
    document, faults = parse_yaml(text, "run.yaml")
    assert faults == []
    return document.data


def ruamel(text: str) -> Any:
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 2)
    return reader.load(text)


def exact(value: Any) -> Any:
    """Tells 1 from 1.0 from True, and NaN from anything else."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [exact(item) for item in value]
    return type(value).__name__, repr(value)


def check_scalars(reader: Any) -> None:
    for text, value in SCALARS.items():
        assert exact(reader(f"key: {text}\n")) == exact({"key": value}), text


def test_scalars_of_yaml_1_2() -> None:
    check_scalars(load)


def test_twin_pyyaml_reads_other_scalars() -> None:
    with pytest.raises(AssertionError):
        check_scalars(yaml.safe_load)


PLAIN = st.text("0123456789+-.eExoNaAnfFIiulTrRsyY~ ", max_size=7)


def differs_by_design(text: str) -> bool:
    """ruamel reads binary, signed octal and hexadecimal, and octal without 0o; YAML 1.2's core schema does not."""
    body = text.strip().lstrip("+-")
    signed = body != text.strip()
    unsigned_exponent = body.startswith(".") and "e" in body.lower()
    return unsigned_exponent or body[:2] == "0b" or (signed and body[:2] in ("0x", "0o"))


@given(PLAIN)
def test_plain_scalars_agree_with_ruamel(text: str) -> None:
    assume(not differs_by_design(text))
    document = f"key: {text}\n"
    try:
        expected = ruamel(document)
    except RuamelError:
        assume(False)
    try:
        assert exact(load(document)) == exact(expected)
    except InputError:
        pytest.fail(f"refused {document!r}")


NAMES = st.text("abcdefgh_", min_size=1, max_size=5)
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="﻿  "), max_size=10)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
TREES = st.dictionaries(
    NAMES,
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)),
    min_size=1,
    max_size=4,
)


def written(tree: dict[str, Any], style: str) -> str:
    if style == "json":
        return json.dumps(tree, ensure_ascii=False).replace("Infinity", ".inf")
    return yaml.safe_dump(
        tree, allow_unicode=True, sort_keys=False, default_flow_style={"flow": True, "block": False}[style]
    )


@given(TREES, st.sampled_from(["flow", "block", "json"]))
def test_documents_agree_with_ruamel(tree: dict[str, Any], style: str) -> None:
    text = written(tree, style)
    assert exact(load(text)) == exact(ruamel(text))


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
    | st.text("ab:-[]{},&*!|>'\"\\#%@`? \n\tx0", max_size=40)
)
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    try:
        _, faults = parse_yaml(text, "run.yaml")
    except InputError as error:
        faults = list(error.faults)
    assert all(fault.where.startswith("run.yaml") and fault.what for fault in faults)


def test_positions_of_keys_and_values() -> None:
    text = "stage: sft\n\noptim:\n  lr:   1e-4\nadapter: {kind: lora, targets: [q_proj,\n  v_proj]}\nbatch:\n"
    document, _ = parse_yaml(text, "run.yaml")
    assert document.keys["optim.lr"] == Position(4, 3)
    assert document.values["optim.lr"] == Position(4, 9)
    assert document.keys["adapter.kind"] == Position(5, 11)
    assert document.values["adapter.targets"] == Position(5, 32)
    assert document.values["adapter.targets.1"] == Position(6, 3)
    assert document.values["batch"] == document.keys["batch"] == Position(7, 1), "an empty value is shown at its key"


GO_ON = {  # reading goes on, so that other mistakes are found too
    "a: 1\nb: 2\na: 3\n": "run.yaml:3:1: a: duplicate key, first given in line 1; keep one",
    "g:\n  a: 1\n  a: 1\n": "run.yaml:3:3: g.a: duplicate key, first given in line 2; keep one",
    "a: !!python/name:os.abort 1\n": "run.yaml:1:4: tag !!python/name:os.abort is not supported; write a plain value",
    "a: !!int 3\n": "run.yaml:1:4: tag !!int is not supported; write a plain value",
    "a: &x 1\n": "run.yaml:1:4: anchor &x is not supported; remove it",
    "<<: {a: 1}\n": "run.yaml:1:1: merge keys (<<) are not supported; write the keys out",
    "optim.lr: 3\n": "run.yaml:1:1: optim.lr: a key cannot hold a dot; write optim: {lr: …}",
    "'': 1\n": "run.yaml:1:1: : a key must be a plain name",
    "8: 1\n": "run.yaml:1:1: 8: a key must be a plain name",
    "%YAML 1.1\n---\na: no\n": "run.yaml:1:1: %YAML 1.1 gives words like no another meaning; remove this line",
    'a: "\\ud83d"\n': "run.yaml:1:4: \\0 and halves of surrogate pairs are no text; write the character itself",
    'a: "x\\0"\n': "run.yaml:1:4: \\0 and halves of surrogate pairs are no text; write the character itself",
    "a: " + "9" * 5000: "run.yaml:1:4: a number of 5000 digits; put it in quotes if it is text",
}
STOP = {
    "a: 'x\nb: 1\n": "run.yaml:1:4: not valid YAML: a quote that is not closed; add the closing quote",
    "b: 0\na: [1, 2\nc: 3\n": "run.yaml:2:4: not valid YAML: a list that is not closed; add ]",
    "a: {b: 1\n": "run.yaml:1:4: not valid YAML: a group that is not closed; add }",
    "a:\n\tb: 1\n": "run.yaml:2:1: not valid YAML: a tab where spaces belong; indent with spaces",
    "a: @x\n": "run.yaml:1:4: not valid YAML: text cannot start with this character; put the text in quotes",
    "a: b: c\n": "run.yaml:1:5: not valid YAML: a colon that is not expected here",
    'a: "\\UFFFFFFFF"\n': "run.yaml:1:1: not valid YAML: an escape names no character",
    "a: 1\nb: \x07\n": "run.yaml:2:4: character U+0007 is not allowed; remove it",
    "": "run.yaml: is empty; write `key: value` lines",
    "- a\n": "run.yaml: does not start with a key; write `key: value` lines",
    "a: 1\n---\nb: 2\n": "run.yaml:2:1: a second document starts here; keep one per file",
    "? [a]\n: 1\n": "run.yaml:1:3: a key must be a plain name",
    "a: " + "[" * 50: f"run.yaml:1:{4 + MAX_DEPTH}: is nested more than {MAX_DEPTH} levels deep",
}


@pytest.mark.parametrize(("text", "message"), GO_ON.items())
def test_faults_that_leave_the_rest_readable(text: str, message: str) -> None:
    document, faults = parse_yaml(text + "\nlast: 1\n", "run.yaml")
    assert [str(fault) for fault in faults] == [message]
    assert document.data["last"] == 1


@pytest.mark.parametrize(("text", "message"), STOP.items())
def test_faults_that_end_the_reading(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "run.yaml")
    assert len(caught.value.faults) == 1
    assert str(caught.value).startswith(message)


def test_twin_without_the_duplicate_check_the_last_key_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_reader._Builder, "_fault", lambda *_: None)
    assert load("a: 1\na: 2\n") == {"a": 2}


def test_aliases_are_refused_and_never_expanded() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    document, faults = parse_yaml(bomb, "run.yaml")
    assert document.data["a39"] == [None, None]
    assert sum("alias" in fault.what for fault in faults) == 2 * 39


def test_files(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_bytes(b"\xef\xbb\xbfname: caf\xc3\xa9\r\nlr: 1e-4\r\n")
    assert read_yaml(good).data == {"name": "café", "lr": 1e-4}
    cases = {
        "latin.yaml": (b"a: 1\nb: caf\xe9\n", "latin.yaml:2: is not UTF-8 text"),
        "large.yaml": (b"#" * (MAX_BYTES + 1), "large.yaml: is larger than 1024 KiB"),
        "twice.yaml": (b"a: 1\na: 2\n", "twice.yaml:2:1: a: duplicate key"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_yaml(tmp_path / name)
    with raises_code("SF-CONFIG-FILE", "test_files0"):
        read_yaml(tmp_path)


def test_one_value_for_the_command_line() -> None:
    assert parse_value("[q_proj, v_proj]", "x") == ["q_proj", "v_proj"]
    assert parse_value("{kind: lora, rank: 8}", "x") == {"kind": "lora", "rank": 8}
    assert parse_value("3 epochs", "x") == "3 epochs"
    assert parse_value("", "x") is None
    for bad in ("[1", "*a", "!!int 3", "{a: 1, a: 2}"):
        with pytest.raises(InputError) as caught:
            parse_value(bad, "override x")
        assert caught.value.faults[0].where == "override x"
