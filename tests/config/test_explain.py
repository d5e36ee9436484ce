"""`explain` says the same as the schema, in words."""

import pytest

from helpers.faults import gives
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
    name, _, blank, *rows = explain_key("optim.lr").splitlines()
    assert (name, blank) == ("optim.lr", "")
    found = dict(row.split(maxsplit=1) for row in rows)
    assert list(found) == ["expects", "default", "example", "override", "resume"]
    assert (found["default"], found["example"], found["override"]) == ("2e-4", "optim: {lr: 2e-4}", "optim.lr=2e-4")
    assert gives(found["expects"], 0)
    assert gives(found["resume"], "refused")


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
    """Numbers and names; the gallery of messages (tests/golden/messages/config.txt) has the words."""
    for fragment, values in [
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 10}, [0, 9]),  # what an integer below 10 is at most
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0, 1]),
        ({"enum": ["auto", "on", "off", True, False]}, ["auto", "on", "off"]),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, ["auto", "number"]),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, ["a", "b", "null"]),
        ({"type": "array", "items": {"type": "string"}}, ["list"]),
    ]:
        words = in_words(fragment)
        assert [value for value in values if not gives(words, value)] == [], words
    assert not gives(in_words({"enum": ["on", "off", True, False]}), "true")  # YAML's on is true
    bounds = [{"type": "number", kind: 0} for kind in ("minimum", "exclusiveMinimum")]
    assert in_words(bounds[0]) != in_words(bounds[1])


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
