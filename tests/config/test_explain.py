"""`explain` says the same as the schema, in words."""

from __future__ import annotations

import pytest

from surefoot.config.explain import WIDTH, explain_all, explain_key
from surefoot.config.keys import all_keys, as_yaml, in_words, shown
from surefoot.system.errors import InputError


def test_every_key_is_explained() -> None:
    for path, key in all_keys().items():
        text = explain_key(path)
        assert text.startswith(f"{path}\n  ")
        assert " ".join(key.help.split()) in " ".join(text.split()), path
        assert key.expected in text, path
        assert all(child in text for child in key.children), path


def test_one_key_in_full() -> None:
    assert explain_key("optim.lr").splitlines() == [
        "optim.lr",
        "  Peak learning rate.",
        "",
        "  expects   a number greater than 0",
        "  default   2e-4",
        "  example   optim: {lr: 2e-4}",
        "  override  optim.lr=2e-4",
        "  resume    refused: the saved optimizer state and learning-rate schedule belong to the old optimizer",
    ]


def test_all_keys_in_a_table() -> None:
    lines = explain_all().splitlines()
    assert [line.split()[0] for line in lines] == [path for path, key in all_keys().items() if not key.children]
    assert max(map(len, lines)) <= WIDTH + 2


def test_an_unknown_key_leads_to_the_nearest() -> None:
    for name, near in (("learning_rate", "optim.lr"), ("zebra", "surefoot explain")):
        with pytest.raises(InputError) as caught:
            explain_key(name)
        (fault,) = caught.value.faults
        assert fault.code == "SF-CONFIG-KEY"
        assert near in fault.fix


def test_schemas_in_words() -> None:
    for fragment, words in [
        ({"type": "integer"}, "a whole number"),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 10}, "a whole number of at least 0 and at most 9"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "a number greater than 0 and at most 1"),
        ({"enum": ["auto", "on", "off", True, False]}, "auto, on or off"),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "auto or a whole number"),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, "a or b, or null"),
        ({"type": "array", "items": {"type": "string"}}, "a list of names"),
    ]:
        assert in_words(fragment) == words


def test_values_as_messages_show_them() -> None:
    assert [as_yaml(value) for value in (1e-4, 0.03, 1e-8, 32.0, 1e6, "1e4", "no", True, None, {"a": [1, "b"]})] == [
        "1e-4",
        "0.03",
        "1e-8",
        "32.0",
        "1e6",
        "'1e4'",
        "no",
        "true",
        "null",
        "{a: [1, b]}",
    ]
    assert shown("x" * 100).endswith("… (text)")
    assert shown([1]) == "[1] (a list)"
