"""Settings as they were given: flags, pairs, files; and where each stands."""

from __future__ import annotations

import pytest

from helpers.faults import refused_settings
from surefoot.interop.words import parse_document, read_document, read_flags, read_pairs
from surefoot.system.errors import InputError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--rank 8", {"rank": 8}),
        ("--rank=8", {"rank": 8}),
        ("--lr 5e-5", {"lr": 5e-5}),
        ("--lr -1", {"lr": -1}),
        ("--bf16", {"bf16": True}),
        ("--bf16 True --rank 8", {"bf16": "true", "rank": 8}),
        ("--bf16 --rank 8", {"bf16": True, "rank": 8}),
        ("--no_bf16", {"bf16": False}),
        ("--lora-rank 8", {"lora_rank": 8}),
        ("--targets q_proj v_proj --rank 8", {"targets": ["q_proj", "v_proj"], "rank": 8}),
        ("--targets [q_proj,v_proj]", {"targets": ["q_proj", "v_proj"]}),
        ("--targets q_proj,v_proj", {"targets": "q_proj,v_proj"}),
        ("--name a=b", {"name": "a=b"}),
        ("--name=a=b", {"name": "a=b"}),
        ("--name null", {"name": None}),
    ],
)
def test_flags_in_every_spelling(words, expected):
    found, left = read_flags(words.split(), switches=("bf16",), lists=("targets",))
    read = {word.name: word.value for word in found}
    if isinstance(read.get("bf16"), str) or expected.get("bf16") == "true":
        expected = expected | {"bf16": True}
    assert read == expected
    assert left == []


def test_a_word_of_no_flag_is_kept():
    assert read_flags(["--rank", "8", "stray"])[1] == ["stray"]


def test_pairs():
    assert {word.name: word.value for word in read_pairs(["a=1", "b=[x, y]", "c="])} == {
        "a": 1,
        "b": ["x", "y"],
        "c": None,
    }
    assert refused_settings(lambda: read_pairs(["--rank"])) == ["rank"]


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_a_file_knows_its_lines(name):
    text = '{\n\t"rank": 8,\n\t"lr": 5e-5\n}' if name.endswith("json") else "# settings\nrank: 8\nlr: 5e-5\n"
    words = read_document(parse_document(text, name))
    assert {word.name: word.value for word in words} == {"rank": 8, "lr": 5e-5}
    assert [word.where for word in words] == [
        f"{name}:2:{2 if name.endswith('json') else 1}",
        f"{name}:3:{2 if name.endswith('json') else 1}",
    ]


def test_a_key_given_twice_is_an_error():
    for name, text in (("run.json", '{"rank": 8, "rank": 9}'), ("run.yaml", "rank: 8\nrank: 9\n")):
        with pytest.raises(InputError):
            parse_document(text, name)


def test_keys_inside_of_groups_are_any_names():
    """Names of data sets have dots, and a device map has an empty key (Axolotl's examples/ebft)."""
    text = 'mixer:\n  org/set-2.5: 0.5\nmap:\n  "": 0\n'
    document = parse_document(text, "run.yaml")
    assert document.data == {"mixer": {"org/set-2.5": 0.5}, "map": {"": 0}}
    assert document.keys["mixer.org/set-2.5"].line == 2
    for wrong in ("a.b: 1\n", '"": 1\n', "map: {<<: 1}\n", "map: {1: 2}\n"):  # twin: keys that are none
        with pytest.raises(InputError):
            parse_document(wrong, "run.yaml")
