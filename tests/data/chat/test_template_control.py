"""What a text says stays text: no template lets the names of control tokens in the data become control tokens.

For every template and tokenizers of several families: with any texts, the control tokens of an example are those of
the same conversation with harmless texts, in the same order, and the learned part ends where it should.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.conversations import CALL, RESULT, TOKENIZERS, TOOL, ids_and_mask, tokenizer
from helpers.tiers import representatives
from surefoot.data.chat import builtin_template as named
from surefoot.data.chat import turn_by_turn as rendered
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, ToolCall, Turn
from surefoot.data.tokenize.segments import Segment, TextEncoder
from surefoot.families.templates import OWN, ROWS, Dialogue, Prompt, find_row

EXAMPLES = 12  # per pair; there are more than a hundred pairs
PAIRS = [
    (row.name, family)
    for row in ROWS
    for family in TOKENIZERS
    if all(token in TextEncoder(tokenizer(family)).control.values() for token in row.control)
] + [(OWN, family) for family in TOKENIZERS if tokenizer(family).chat_template and family != "deepseek-r1"]  # refused
TURNS = ("<|user|>", "<|call|>")  # of templates that end an answer with what follows it
TOOLED = ("llama3.1", "qwen", "qwen3", "mistral")  # whose own template has a place for tools


def spelled(family):
    """Texts made of words and of names of control tokens, or of parts of them."""
    names = sorted(TextEncoder(tokenizer(family)).control.values())
    parts = st.one_of(st.sampled_from(names), st.sampled_from(["a", " ", "\n", "<|", "|>", "eot_id", "</s", ">", "é"]))
    return st.lists(parts, min_size=1, max_size=6).map("".join).filter(lambda text: text.strip())


def conversation(texts, one_prompt, tools):
    question, answer, more, last = texts
    if tools:
        call = replace(CALL, calls=(ToolCall("weather", {"city": more, "in": [{"deep": last}]}),))
        tool = {**TOOL, "function": {**TOOL["function"], "description": last}}
        turns = (Turn("user", question), call, replace(RESULT, content=more), Turn("assistant", answer))
        return Conversation(turns, 1, 1, tools=(tool,))
    turns = (Turn("user", question), Turn("assistant", answer))
    return Conversation(turns if one_prompt else (*turns, Turn("user", more), Turn("assistant", last)), 1, 1)


def control_tokens(name, family, one):
    """The control tokens of the example, and whether each is learned."""
    encoder = TextEncoder(tokenizer(family))
    ends = [number for number, token in encoder.control.items() if name == OWN and token in TURNS]
    template = make_template(name, encoder, (encoder.tokenizer.eos_token_id, *ends))
    ids, mask = ids_and_mask(template, encoder, one, None)
    return [(number, learned) for number, learned in zip(ids, mask, strict=True) if number in encoder.control]


ONE_EACH = {name: (name, family) for name, family in reversed(PAIRS)}  # the first family of each template


@pytest.mark.parametrize(
    ("name", "family"), representatives(PAIRS, *ONE_EACH.values(), *((OWN, one) for one in TOOLED))
)
def test_control_tokens_are_the_templates_alone(name, family):
    row = find_row(name)
    one_prompt = isinstance(row, Prompt)
    tools = (isinstance(row, Dialogue) and row.tools is not None) or (name == OWN and family in TOOLED)

    @given(st.tuples(*[spelled(family)] * 4), st.booleans() if tools else st.just(False))
    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    def check(texts, with_tools):
        harmless = conversation("wxyz", one_prompt, with_tools)
        found = control_tokens(name, family, conversation(texts, one_prompt, with_tools))
        assert found == control_tokens(name, family, harmless)

    check()


@pytest.mark.parametrize("family", TOOLED)
def test_spelled_out_tokens_in_tools_and_calls_stand_there_as_text(family):
    encoder = TextEncoder(tokenizer(family))
    stop = str(encoder.tokenizer.eos_token)
    one = conversation((f"a{stop}", f"b{stop}", f"c{stop}", f"d{stop}"), False, True)
    template = make_template(OWN, encoder, (encoder.tokenizer.eos_token_id,))
    ids, _ = ids_and_mask(template, encoder, one, None)
    text = str(encoder.tokenizer.decode(ids))
    assert all(f"{letter}{stop}" in text for letter in "abcd")


def test_private_characters_of_the_data_are_no_marks():
    encoder = TextEncoder(tokenizer("qwen"))
    template = make_template(OWN, encoder, (encoder.tokenizer.eos_token_id,))
    texts = ("\ue0001\ue000 <|im_end|>", "\ue0000\ue001", "\ue002", "\uf8ff")
    ids, _ = ids_and_mask(template, encoder, conversation(texts, False, True), None)
    assert all(text in str(encoder.tokenizer.decode(ids)) for text in texts)


# --- the checks above have teeth -------------------------------------------------------------------------------------


def test_twin_contents_that_are_not_marked_become_control_tokens(monkeypatch):
    plain = named._text
    monkeypatch.setattr(named, "_text", lambda *a, **k: plain(*a, **k)._replace(content=False))
    with pytest.raises(AssertionError):
        test_control_tokens_are_the_templates_alone("chatml", "qwen")


def test_twin_without_marks_rendered_texts_become_control_tokens(monkeypatch):
    def bare(self, text, place, answer):
        for segment in cut(self, text, place, answer):
            yield Segment(segment.text, place, answer=answer)

    cut = rendered._Masks.cut
    monkeypatch.setattr(rendered._Masks, "cut", bare)
    with pytest.raises(AssertionError):
        test_control_tokens_are_the_templates_alone(OWN, "qwen")
