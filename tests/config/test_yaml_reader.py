"""The reader follows YAML 1.2 (checked against ruamel.yaml, an independent reader), refuses what is unsafe or
ambiguous, and knows where everything stood."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError as RuamelError

from helpers.faults import raises_fault
from surefoot.config import yaml_reader
from surefoot.config.yaml_reader import MAX_BYTES, Position, parse_value, parse_yaml, read_yaml
from surefoot.system.errors import InputError

GALLERY = Path(__file__).resolve().parents[1] / "golden" / "messages" / "yaml.txt"
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


GO_ON = [  # reading goes on, so that other mistakes are found too
    "a: 1\nb: 2\na: 3\n",
    "g:\n  a: 1\n  a: 1\n",
    "a: !!python/name:os.abort 1\n",
    "a: !!int 3\n",
    "a: &x 1\n",
    "<<: {a: 1}\n",
    "optim.lr: 3\n",
    "'': 1\n",
    "8: 1\n",
    "%YAML 1.1\n---\na: no\n",
    'a: "\\ud83d"\n',
    'a: "x\\0"\n',
    "a: " + "9" * 5000,
]
STOP = [
    "a: 'x\nb: 1\n",
    "b: 0\na: [1, 2\nc: 3\n",
    "a: {b: 1\n",
    "a:\n\tb: 1\n",
    "a: @x\n",
    "a: b: c\n",
    'a: "\\UFFFFFFFF"\n',
    "a: 1\nb: \x07\n",
    "",
    "- a\n",
    "a: 1\n---\nb: 2\n",
    "? [a]\n: 1\n",
    "a: " + "[" * 50,
]


def gallery() -> str:
    found = []
    for text in GO_ON:
        document, faults = parse_yaml(text + "\nlast: 1\n", "run.yaml")
        assert document.data["last"] == 1
        found += [repr(text[:60]), *(f"    [{fault.code}] {fault}" for fault in faults)]
    for text in STOP:
        with pytest.raises(InputError) as caught:
            parse_yaml(text, "run.yaml")
        found += [repr(text[:60]), *(f"    [{fault.code}] {fault}" for fault in caught.value.faults)]
    return "\n".join(found) + "\n"


def test_each_fault_is_one_message_with_its_place() -> None:
    """The only place that quotes them; `PYTHONPATH=src:tests python tests/config/test_yaml_reader.py` writes it."""
    assert gallery() == GALLERY.read_text()


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
        "latin.yaml": (b"a: 1\nb: caf\xe9\n", "FILE", ":2", ["UTF-8"]),
        "large.yaml": (b"#" * (MAX_BYTES + 1), "FILE", "", [1024]),
        "twice.yaml": (b"a: 1\na: 2\n", "YAML", ":2:1", ["a"]),
    }
    for name, (content, code, place, values) in cases.items():
        (tmp_path / name).write_bytes(content)
        with raises_fault(f"SF-CONFIG-{code}", f"{tmp_path / name}{place}", *values):
            read_yaml(tmp_path / name)
    with raises_fault("SF-CONFIG-FILE", tmp_path):
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


if __name__ == "__main__":
    GALLERY.write_text(gallery())
