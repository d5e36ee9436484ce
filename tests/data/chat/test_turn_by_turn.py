"""A template that leaves tools out without a word is refused: its calls would be learned as empty answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from helpers.zoo import ZOO
from surefoot.data.chat import turn_by_turn as rendered
from surefoot.data.chat.jinja_template import make_chat_template
from surefoot.data.formats import Conversation, RowFault, ToolCall, Turn
from surefoot.data.tokenize.segments import TextEncoder

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)
TURNS = (
    Turn("user", "Add one and one."),
    Turn("assistant", "", calls=(ToolCall("add", {"a": 1, "b": 1}),)),
    Turn("tool", "2 "),
    Turn("assistant", "Two."),
)
WHOLE = Conversation(TURNS, tools=TOOLS)
LEFT_OUT = {
    "the chat template ": WHOLE,
    "turn 2: ": replace(WHOLE, tools=()),
    "turn 3: ": Conversation((TURNS[0], Turn("assistant", "Let me see."), *TURNS[2:])),
}


def own_template(folder, family, **options):
    encoder = TextEncoder(AutoTokenizer.from_pretrained(ZOO[family](folder / family, **options)))
    return make_chat_template(encoder, encoder.tokenizer.convert_tokens_to_ids(["<|end|>"]) if family == "phi3" else ())


@pytest.mark.parametrize("place", LEFT_OUT)
def test_the_turn_that_is_left_out_is_named(tmp_path, place):
    with pytest.raises(RowFault) as caught:
        own_template(tmp_path, "phi3").segments(LEFT_OUT[place])
    assert caught.value.what.startswith(place)


def test_twin_unnoticed_a_call_is_learned_as_an_empty_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(rendered, "_require_written", lambda *_: None)
    segments = own_template(tmp_path, "phi3").segments(WHOLE)
    assert "".join(s.text for s in segments if s.answer and s.turn == 1).strip() == "<|end|>"
    assert not any("add" in segment.text for segment in segments)


@pytest.mark.parametrize(
    ("family", "options"), [("llama3", {}), ("mistral", {"version": "0.3"}), ("qwen2", {}), ("qwen3", {})]
)
def test_templates_that_write_tools_are_not_refused(tmp_path, family, options):
    segments = own_template(tmp_path, family, **options).segments(WHOLE)
    answers = ["".join(s.text for s in segments if s.answer and s.turn == turn) for turn in (1, 3)]
    assert '"name": "add"' in answers[0]
    assert "Two." in answers[1]
    assert any('"name": "add"' in segment.text for segment in segments if not segment.answer)
