"""The named templates give the ids of transformers: of the family's own chat template, and of the one that is saved.

Two renderers that share no code: the row's segments here, Jinja and the whole text at once there.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from jinja2 import TemplateError

from helpers.conversations import (
    AGAIN,
    ANSWER,
    CALL,
    CASES,
    LAST,
    RESULT,
    SYSTEM,
    TOKENIZERS,
    TOOL,
    USER,
    ids_and_mask,
    learned,
    of_transformers,
    tokenizer,
)
from helpers.faults import gives
from surefoot.data.chat import templates
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.tokenize.segments import TextEncoder, prompt_ids
from surefoot.families.templates import ROWS, Prompt, find_row
from surefoot.system.errors import InputError

WITH_BOS = ("llama2", "llama3", "llama3.1", "mistral", "zephyr", "gemma")  # families that begin with it
EVERY = ("single", "multi-turn", "system", "tools")
# What the published template of each family takes, and puts out alike.
OWN = {
    "llama2": ("single", "multi-turn", "system"),
    "llama3": ("single", "multi-turn", "system"),
    "phi3": ("single", "multi-turn", "system"),
    "qwen": EVERY,
    "qwen3": ("single", "system"),  # it drops the thoughts of earlier answers; see test_chat_tools
    "mistral": ("single", "multi-turn"),  # it moves the system text and the tools to the last question
    "gemma": ("single", "multi-turn", "system"),
    "zephyr": ("single", "multi-turn", "system"),
}


def opened(name, family):
    encoder = TextEncoder(tokenizer(family))
    bos = encoder.bos_id if family in WITH_BOS else None
    return make_template(name, encoder, (encoder.tokenizer.eos_token_id,)), encoder, bos


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in OWN.items() for case in cases])
def test_a_row_is_its_familys_template(name, case):
    template, encoder, bos = opened(name, name)
    conversation = CASES[case]
    if name == "zephyr":  # whose template writes no BOS
        bos = None
    ids, mask = ids_and_mask(template, encoder, conversation, bos)
    assert ids == of_transformers(name, conversation)
    first = next(place for place, turn in enumerate(conversation.turns) if turn.role == "assistant")
    asked = replace(conversation, turns=conversation.turns[:first])
    assert prompt_ids(asked, template, encoder, bos) == of_transformers(name, asked, prompt=True)
    assert ids[: mask.index(True)] == prompt_ids(asked, template, encoder, bos)


def test_mistrals_system_text_and_tools_stand_where_its_template_puts_them_for_one_question():
    template, encoder, bos = opened("mistral", "mistral")
    asked = Conversation((SYSTEM, USER), tools=(TOOL,))
    assert prompt_ids(asked, template, encoder, bos) == of_transformers("mistral", asked, prompt=True)
    done = Conversation((USER, CALL, RESULT, ANSWER), tools=(TOOL,))
    assert ids_and_mask(template, encoder, done, bos)[0] == of_transformers("mistral", done)


def test_llama3_writes_tools_as_llama31_does_below_its_dated_system_turn():
    template, encoder, bos = opened("llama3", "llama3.1")
    ids, _ = ids_and_mask(template, encoder, replace(CASES["tools"], turns=CASES["tools"].turns[1:]), bos)
    own = str(encoder.tokenizer.decode(of_transformers("llama3.1", CASES["tools"])))
    assert own.endswith("heron.<|eot_id|>" + str(encoder.tokenizer.decode(ids)).removeprefix("<|begin_of_text|>"))


def possible(name, family):
    row = find_row(name)
    return all(token in TextEncoder(tokenizer(family)).control.values() for token in row.control)


PAIRS = [(row.name, family) for row in ROWS for family in TOKENIZERS if possible(row.name, family)]
MORE = {
    "blanks": Conversation((Turn("system", " \nBe brief. "), Turn("user", "  Go "), Turn("assistant", "\n yes "))),
    "after tools": Conversation((USER, CALL, RESULT, ANSWER, AGAIN, LAST), tools=(TOOL,)),
    "two results": Conversation(
        (USER, replace(CALL, content="Wait.", calls=CALL.calls * 2), RESULT, RESULT, ANSWER), tools=(TOOL, TOOL)
    ),
    "unasked": Conversation((USER, CALL, RESULT, ANSWER)),
    "question": Conversation((USER,)),
    "open": Conversation((SYSTEM, USER)),
    "open again": Conversation((USER, ANSWER, AGAIN)),
    "quotes": Conversation((Turn("user", "\\ \" ' {{ x }} {# y #} \u2028"), Turn("assistant", "{% z %}"))),
}


@pytest.mark.parametrize(("name", "family"), PAIRS)
def test_the_saved_chat_template_gives_the_trained_ids(name, family):
    """For conversations that the row refuses, the saved template refuses as well, or has more to say."""
    template, encoder, bos = opened(name, family)
    source = template.jinja(str(encoder.tokenizer.bos_token) if bos is not None else "")
    compared = 0
    for conversation in (*CASES.values(), *MORE.values()):
        is_open = conversation.turns[-1].role != "assistant"
        try:
            segments = template.segments(conversation)
        except RowFault:
            continue
        assert segments
        mine = prompt_ids(conversation, template, encoder, bos)
        theirs = of_transformers(family, conversation, prompt=is_open, source=source)
        if conversation is MORE["blanks"] and (encoder.swallows_blanks or segments[0].content):
            continue  # blanks at an edge of the data's texts, which some tokenizers take away or take for their own
        assert str(encoder.tokenizer.decode(theirs)) == str(encoder.tokenizer.decode(mine))
        if is_open or not _blank_at_border(segments):
            assert theirs == mine
        compared += 1
    assert compared >= 2


def _blank_at_border(segments):
    """Where the model begins to write behind a blank of the prompt, a tokenizer given both at once may merge them."""
    pairs = itertools.pairwise(segments)
    return any(
        after.answer
        and not before.answer
        and (before.text[-1:] == " " or (before.text + after.text[:1])[-2:].isspace())
        for before, after in pairs
    )


def test_the_saved_alpaca_template_reads_an_input_from_its_message():
    template, encoder, bos = opened("alpaca", "llama3")
    turns = (Turn("user", "Add.", "1 2"), Turn("assistant", "3"))
    ids, _ = ids_and_mask(template, encoder, Conversation(turns), bos)
    given = [{"role": "user", "content": "Add.", "input": "1 2"}, {"role": "assistant", "content": "3"}]
    source = template.jinja("<|begin_of_text|>")
    assert encoder.tokenizer.apply_chat_template(given, chat_template=source, return_dict=False) == ids


@pytest.mark.parametrize("name", [row.name for row in ROWS if isinstance(row, Prompt)])
def test_a_saved_template_for_one_prompt_refuses_dialogues(name):
    template, *_ = opened(name, "llama3")
    with pytest.raises(TemplateError):
        of_transformers("llama3", CASES["multi-turn"], source=template.jinja(""))


@pytest.mark.parametrize("row", [row for row in ROWS if row.control], ids=lambda row: row.name)
def test_a_tokenizer_without_the_control_tokens_is_refused_with_their_names(row):
    encoder = TextEncoder(tokenizer("gpt2"))
    with pytest.raises(InputError) as caught:
        make_template(row.name, encoder, (encoder.tokenizer.eos_token_id,))
    (fault,) = caught.value.faults
    assert all(token in fault.what for token in row.control)
    assert all(gives(fault.fix, name) for name in ("alpaca", "vicuna", "plain"))


@pytest.mark.parametrize(
    ("name", "conversation", "place", "instead"),
    [
        ("plain", CASES["tools"], "", "chatml"),
        ("alpaca", CASES["tools"], "", "vicuna"),
        ("commonsense", CASES["system"], "", "alpaca"),
        ("llama3", MORE["two results"], "turn 2: ", "chatml"),
        ("mistral", MORE["two results"], "turn 2: ", "chatml"),
        ("vicuna", Conversation((USER, ANSWER, SYSTEM, USER)), "turn 3: ", ""),
    ],
)
def test_what_a_row_does_not_support(name, conversation, place, instead):
    template, *_ = opened(name, "llama3")
    with pytest.raises(RowFault) as caught:
        template.segments(conversation)
    assert caught.value.what.startswith(f"{place}the {name} template ")
    assert instead in caught.value.fix


def test_the_call_markup_is_learned_and_the_result_is_not():
    template, encoder, bos = opened("qwen", "qwen")
    ids, mask = ids_and_mask(template, encoder, CASES["tools"], bos)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": [1, 2.5, null]}}\n</tool_call>'
    assert learned(encoder, ids, mask) == [f"{call}<|im_end|>", "Here it is.<|im_end|>"]


def test_qwen3_leaves_thoughts_as_the_data_has_them():
    template, encoder, _ = opened("qwen3", "qwen3")
    thought = Conversation((USER, Turn("assistant", "<think>\nhm\n</think>\n\nHere.")))
    ids, mask = ids_and_mask(template, encoder, thought, None)
    assert ids == of_transformers("qwen3", thought)
    assert learned(encoder, ids, mask) == ["<think>\nhm\n</think>\n\nHere.<|im_end|>"]


# --- the checks above have teeth -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(OWN))
def test_twin_one_character_more_is_not_the_familys_template(name, monkeypatch):
    row = find_row(name)
    changed = replace(row, user=row.user.replace("{content}", "{content}."))
    monkeypatch.setattr(templates, "named_row", lambda *_: changed)
    with pytest.raises(AssertionError):
        test_a_row_is_its_familys_template(name, "single")


def test_twin_a_saved_template_without_the_system_text_is_noticed(monkeypatch):
    write = templates.write_dialogue
    monkeypatch.setattr(templates, "write_dialogue", lambda row, bos: write(replace(row, default_system=""), bos))
    with pytest.raises(AssertionError):
        test_the_saved_chat_template_gives_the_trained_ids("qwen", "qwen")


def test_twin_blanks_behind_phi3s_tokens_are_swallowed_only_where_the_encoder_knows(monkeypatch):
    monkeypatch.setattr("surefoot.data.tokenize.segments.TextEncoder.swallows_blanks", (), raising=False)
    init = TextEncoder.__init__

    def forgetful(self, own):
        init(self, own)
        self.swallows_blanks = ()

    monkeypatch.setattr(TextEncoder, "__init__", forgetful)
    with pytest.raises(AssertionError):
        test_a_row_is_its_familys_template("phi3", "multi-turn")
