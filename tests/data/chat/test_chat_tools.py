"""The tokenizer's own template with tools, calls and thoughts, and a user's file: ids of transformers, right masks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.conversations import (
    AGAIN,
    ANSWER,
    CALL,
    LAST,
    RESULT,
    SYSTEM,
    TOOL,
    USER,
    ids_and_mask,
    learned,
    of_transformers,
    tokenizer,
)
from helpers.faults import raises_fault
from surefoot.data.chat import render as chat_messages
from surefoot.data.chat import sandbox
from surefoot.data.chat import turn_by_turn as rendered
from surefoot.data.chat.render import call_ids, messages
from surefoot.data.chat.templates import make_template, templates_to_try
from surefoot.data.formats import Conversation, RowFault, ToolCall, Turn
from surefoot.data.tokenize.segments import TextEncoder, prompt_ids

FAMILIES = ("llama3.1", "qwen", "qwen3", "mistral")
CALL_TEXT = {
    "llama3.1": '{"name": "weather", "parameters": {"city": "Bonn", "days": [1, 2.5, null]}}<|eot_id|>',
    "qwen": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": [1, 2.5, null]}}\n'
    "</tool_call><|im_end|>",
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn", "days": [1, 2.5, null]}, '
    '"id": "000000000"}]</s>',
}
THOUGHT = "<think>\n\n</think>\n\n"
CALL_TEXT["qwen3"] = THOUGHT + CALL_TEXT["qwen"]
STOP = {"llama3.1": "<|eot_id|>", "qwen": "<|im_end|>", "qwen3": "<|im_end|>", "mistral": "</s>"}


def opened(family, name="tokenizer"):
    encoder = TextEncoder(tokenizer(family))
    bos = encoder.bos_id if family in ("llama3.1", "mistral") else None
    return make_template(name, encoder, (encoder.tokenizer.eos_token_id,)), encoder, bos


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_learned_and_every_prompt_is_that_of_transformers(family):
    template, encoder, bos = opened(family)
    turns = (USER, CALL, RESULT, ANSWER) if family == "mistral" else (SYSTEM, USER, CALL, RESULT, ANSWER)
    whole = Conversation(turns, tools=(TOOL,))
    ids, mask = ids_and_mask(template, encoder, whole, bos)
    first = turns.index(CALL)
    asked = replace(whole, turns=turns[:first])
    assert ids[: mask.index(True)] == of_transformers(family, asked, prompt=True)
    assert prompt_ids(asked, template, encoder, bos) == of_transformers(family, asked, prompt=True)
    called = replace(whole, turns=turns[: first + 1])
    assert ids_and_mask(template, encoder, called, bos)[0] == of_transformers(family, called)
    if family != "qwen3":  # which drops the empty thought of the call once its result follows
        assert ids == of_transformers(family, whole)
    last = {"qwen3": f"{THOUGHT}Here it is.", "mistral": " Here it is."}.get(family, "Here it is.")
    said = learned(encoder, ids, mask)
    assert [text.strip(" ") for text in said] == [CALL_TEXT[family], f"{last}{STOP[family]}".strip(" ")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dialogue_with_tools_goes_on_behind_them(family):
    template, encoder, bos = opened(family)
    whole = Conversation((USER, CALL, RESULT, ANSWER, AGAIN, LAST), tools=(TOOL,))
    ids, mask = ids_and_mask(template, encoder, whole, bos)
    said = learned(encoder, ids, mask)
    assert len(said) == 3
    assert all(text.endswith(STOP[family]) for text in said)
    text = str(encoder.tokenizer.decode(ids))
    assert text.count("And then?") == text.count("sky") == 1
    if family.startswith("qwen"):
        assert '</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n{"sky": "blue"}\n</tool_response>' in text
    asked = replace(whole, turns=whole.turns[:-1])
    prompt = prompt_ids(asked, template, encoder, bos)
    assert ids[: len(prompt)] == prompt
    assert mask[len(prompt)]


def test_thoughts_are_learned_in_every_answer():
    template, encoder, _ = opened("qwen3")
    first, second = (Turn("assistant", f"<think>\n{n}\n</think>\n\nSaid {n}.") for n in ("one", "two"))
    ids, mask = ids_and_mask(template, encoder, Conversation((USER, first, AGAIN, second)), None)
    assert learned(encoder, ids, mask) == [f"{first.content}<|im_end|>", f"{second.content}<|im_end|>"]
    alone = Conversation((USER, first))
    assert ids_and_mask(template, encoder, alone, None)[0] == of_transformers("qwen3", alone)
    assert len(template.dialogue_notes) == 1


def test_ids_count_the_calls_and_results_take_them_in_order():
    two = replace(CALL, calls=(ToolCall("a", {}), ToolCall("b", {})))
    turns = (USER, two, RESULT, RESULT, CALL, RESULT, RESULT)
    ids = ["000000000", "000000001", "000000002"]
    assert call_ids(turns) == [(), (ids[0], ids[1]), (ids[0],), (ids[1],), (ids[2],), (ids[2],), ("",)]
    made = messages(turns)
    assert [one.get("name") for one in made if one["role"] == "tool"] == ["a", "b", "weather", None]
    assert "tool_calls" not in made[0]


def test_results_take_the_call_that_they_name():
    two = replace(CALL, calls=(ToolCall("a", {}, "x"), ToolCall("b", {}, "y")))
    turns = (USER, two, replace(RESULT, call="y"), replace(RESULT, call="x"))
    made = messages(turns)
    assert [(one["tool_call_id"], one["name"]) for one in made[2:]] == [("000000001", "b"), ("000000000", "a")]


def test_twin_by_order_they_would_get_the_wrong_names(monkeypatch):
    in_order = lambda turns: [None, None, 0, 1]  # noqa: E731
    monkeypatch.setattr(chat_messages, "pair_results", in_order)
    with pytest.raises(AssertionError):
        test_results_take_the_call_that_they_name()


@pytest.mark.parametrize("name", ["mistral", "tokenizer"])
def test_mistral_prints_the_id_of_the_call_that_a_result_names(name):
    template, encoder, bos = opened("mistral", name)
    two = replace(CALL, calls=(ToolCall("a", {}, "x"), ToolCall("b</s>", {}, "y")))
    results = (Turn("tool", "of b", call="y"), Turn("tool", "of a", call="x"))
    text = encoder.tokenizer.decode(
        ids_and_mask(template, encoder, Conversation((USER, two, *results, ANSWER), tools=(TOOL,)), bos)[0]
    )
    assert text.index("of b") < text.index("000000001", text.index("of b")) < text.index("of a")
    assert text.index("000000000", text.index("of a"))


def test_a_template_that_refuses_several_calls_says_so():
    template, *_ = opened("llama3.1")
    two = replace(CALL, calls=CALL.calls * 2)
    with pytest.raises(RowFault, match="tool-calls"):  # the template's own words
        template.segments(Conversation((USER, two, RESULT, ANSWER), tools=(TOOL,)))


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class TestFile:
    def make(self, tmp_path, source, family="qwen"):
        path = tmp_path / "own.jinja"
        path.write_text(source, encoding="utf-8")
        return opened(family, str(path))

    def test_lays_out_what_it_says(self, tmp_path):
        template, encoder, _ = self.make(
            tmp_path, CHATML.replace("m.role +", "m.role | upper +", 1).replace("assistant", "ASSISTANT")
        )
        ids, mask = ids_and_mask(template, encoder, Conversation((USER, ANSWER)), None)
        assert str(encoder.tokenizer.decode(ids)).startswith(
            "<|im_start|>USER\nWhere?<|im_end|>\n<|im_start|>ASSISTANT\n"
        )
        assert learned(encoder, ids, mask) == ["Here it is.<|im_end|>"]

    @pytest.mark.parametrize(
        ("source", "place", "said"),
        [
            ("{% for m in messages %}\n{{ m.content }}", ":2", ("end",)),
            ("\n\n{{ 1 / 0 }}", ":3", ("division",)),
            ("\n{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", ":2", ("9,000",)),
            ("nothing", "", ("(user)",)),
        ],
    )
    def test_a_fault_names_the_file_and_its_line(self, tmp_path, monkeypatch, source, place, said):
        monkeypatch.setattr(sandbox, "STEPS", 9_000)
        with raises_fault("SF-DATA-TEMPLATE", f"{tmp_path / 'own.jinja'}{place}", *said):
            self.make(tmp_path, source)

    def test_a_missing_or_unreadable_file_is_one_line(self, tmp_path):
        with raises_fault("SF-FILE-MISSING", f"{tmp_path}/no.jinja"):
            opened("qwen", str(tmp_path / "no.jinja"))
        (tmp_path / "bytes.jinja").write_bytes(b"\xff")
        with raises_fault("SF-FILE-UNREADABLE", f"{tmp_path}/bytes.jinja"):
            opened("qwen", str(tmp_path / "bytes.jinja"))

    def test_bos_stands_once_whether_or_not_it_writes_one(self, tmp_path):
        for source in (CHATML, "{{ bos_token }}" + CHATML):
            source = source.replace("<|im_start|>", "<|start_header_id|>").replace("<|im_end|>", "<|eot_id|>")
            template, encoder, bos = self.make(tmp_path, source, "llama3.1")
            ids, _ = ids_and_mask(template, encoder, Conversation((USER, ANSWER)), bos)
            assert (ids[0], ids.count(bos)) == (bos, 1)
            saved = template.jinja(str(encoder.tokenizer.bos_token))
            given = messages((USER, ANSWER))
            assert encoder.tokenizer.apply_chat_template(given, chat_template=saved, return_dict=False) == ids


class TestUnasked:
    def test_texts_take_plain_and_what_was_asked_for_stays(self):
        assert templates_to_try("tokenizer", False, ("phi3",), texts=False) == ("tokenizer", "phi3")
        assert templates_to_try("tokenizer", False, ("phi3",), texts=True) == ("plain",)
        assert templates_to_try("alpaca", True, ("vicuna",), texts=False) == ("alpaca",)
        assert templates_to_try("chatml", True, (), texts=True) == ("chatml",)


# --- the checks above have teeth -------------------------------------------------------------------------------------


def test_twin_that_drops_what_follows_a_changed_answer_is_noticed(monkeypatch):
    short = lambda turns, tools, done, prompt, written, stop, *_: (True, prompt[len(written + stop) :])  # noqa: E731
    monkeypatch.setattr(rendered, "_new", short)
    with pytest.raises(AssertionError):
        test_a_dialogue_with_tools_goes_on_behind_them("qwen3")
