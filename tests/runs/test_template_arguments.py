"""`data.template_arguments`: variables of a chat template, as transformers passes them, in training and afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from helpers.faults import raises_fault
from helpers.model_layouts import run_config
from helpers.path_runs import ends, forget, start
from helpers.zoo import ZOO
from surefoot.data.formats import Turn
from surefoot.methods.examples import prepare_examples
from surefoot.methods.open_model import conversation_ids, open_for_use
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.make_plan import make_plan

FAST = {"enable_thinking": False}
# A template of one's own: a text, a number and a macro that reads a variable.
MARKED = """
{%- macro note(text) %}[{{ tone }}:{{ depth }}] {{ text }}{% endmacro %}
{%- if tone is defined %}{{ '<|im_start|>system\\n' + note(greeting) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
TONE = {"tone": 'dry "é" %} 😀', "depth": 2, "greeting": "a\nb"}
ROWS = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}"}]} for n in range(8)
]
QUESTION = [{"role": "user", "content": "Say 9."}]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    ZOO["qwen3"](folder / "base")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    (folder / "marked.jinja").write_text(MARKED)
    return folder


def config(place: Path, output: Path, **data: Any) -> Any:
    rows = {"train": str(place / "rows.json"), "max_length": 128}
    return run_config(
        model=str(place / "base"), output=str(output), data=rows | data,
        adapter={"kind": "lora", "rank": 2}, duration="2 steps", batch={"size": 4, "micro": 4},
        checkpoint={"every": "1 step", "keep": 2, "best": "none"},
    )  # fmt: skip


def cases(place: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Keys of `data`, and what is passed to transformers."""
    file = {"template": str(place / "marked.jinja"), "template_arguments": TONE}
    return {
        "own": ({"template_arguments": FAST}, FAST),
        "named": ({"template": "tokenizer", "template_arguments": FAST}, FAST),
        "file": (file, {"chat_template": MARKED, **TONE}),
        "text": (file | {"template": MARKED}, {"chat_template": MARKED, **TONE}),
    }


def prepared(given: Any) -> list[list[int]]:
    tokens = make_plan(given, measure=False).tokenizer
    data = prepare_examples(given, tokens, planned_tokenizer(Path(given.model.path), tokens)).train
    return [data[place].ids.tolist() for place in range(len(data))]


def rendered(place: Path, messages: Any, **words: Any) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    return tokenizer.apply_chat_template(messages, return_dict=False, **words)


@pytest.mark.parametrize("name", ["own", "named", "file", "text"])
def test_examples_are_rendered_as_by_transformers(place, tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data, words = cases(place)[name]
    expected = [rendered(place, row["messages"], **words) for row in ROWS]
    found = prepared(config(place, tmp_path / "run", **data))
    assert [ids[: len(own)] for ids, own in zip(expected, found, strict=True)] == found  # but for text behind the end
    assert all(len(ids) - len(own) <= 1 for ids, own in zip(expected, found, strict=True))
    twin = prepared(config(place, tmp_path / "twin", **{**data, "template_arguments": {}}))
    assert (twin != found) == (name in ("file", "text"))  # Qwen3 writes the empty thought of a last answer in any case


@pytest.mark.parametrize("name", ["own", "file"])
def test_a_run_asks_and_is_published_with_them(place, tmp_path, name):
    data, words = cases(place)[name]
    wanted = config(place, tmp_path / "run", **data)
    start(wanted)
    theirs = rendered(place, QUESTION, add_generation_prompt=True, **words)
    published = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert published.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False) == theirs
    assert conversation_ids(open_for_use(str(tmp_path / "run")), [Turn("user", "Say 9.")]) == theirs
    without = {key: value for key, value in words.items() if key == "chat_template"}
    assert rendered(place, QUESTION, add_generation_prompt=True, **without) != theirs  # twin
    uninterrupted = ends(tmp_path / "run", 2)
    forget(tmp_path / "run", [2])
    start(wanted, "resume")
    assert ends(tmp_path / "run", 2) == uninterrupted


def test_what_a_template_does_not_read_is_refused(place, tmp_path):
    for data in (
        {"template": "chatml", "template_arguments": FAST},
        {"template_arguments": {"enable_thinkin": False}},
        {"template_arguments": {"add_generation_prompt": True}},
        {"template_arguments": {"enable-thinking": False}},
    ):
        with raises_fault("SF-DATA-TEMPLATE", "data.template_arguments"):
            make_plan(config(place, tmp_path / "run", **data), measure=False)
    assert make_plan(config(place, tmp_path / "run", template_arguments=FAST), measure=False)


def test_a_records_own_values_are_those_that_transformers_gets(place, tmp_path, monkeypatch):
    """As TRL passes a record's `chat_template_kwargs`; records without any have none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = [TONE, {}, {"tone": "calm", "depth": [1, "x"], "greeting": "hi", "messages": []}, None]
    rows = [{**ROWS[0], "chat_template_kwargs": one} for one in own] + [ROWS[0]]
    (tmp_path / "own.json").write_text(json.dumps(rows))
    source = {"path": str(tmp_path / "own.json"), "columns": {"chat_template_kwargs": "chat_template_kwargs"}}
    found = prepared(config(place, tmp_path / "run", train=source, template=MARKED))
    given = [{key: value for key, value in (one or {}).items() if key != "messages"} for one in (*own, {})]
    expected = [rendered(place, ROWS[0]["messages"], chat_template=MARKED, **one) for one in given]
    assert [ids[: len(one)] for ids, one in zip(expected, found, strict=True)] == found
    assert found[0] != found[1] == found[3] == found[4] != found[2]  # twin: without values another text
    unread = prepared(config(place, tmp_path / "unread", train=source["path"], template=MARKED))
    assert len(set(map(tuple, unread))) == 1  # only where the source names the column
    named = config(place, tmp_path / "named", train=source, template="chatml")
    tokens = make_plan(named, measure=False).tokenizer
    data = prepare_examples(named, tokens, planned_tokenizer(Path(named.model.path), tokens))
    assert len({tuple(data.train[place].ids.tolist()) for place in range(5)}) == 1
    assert any("chat_template_kwargs" in note for note in data.audit.source.notes)  # which has no variables
