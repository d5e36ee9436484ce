"""Templates with thoughts, channels and ends of their own: gpt-oss's harmony, GLM's, DeepSeek's; ids of transformers.

No answer may be without learned tokens: the published templates of these families mark none of them as the model's, and
tools that rely on the marks train on nothing (marin issue 7237).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

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
from helpers.faults import raises_fault
from surefoot.data.chat import jinja_template, turn_by_turn
from surefoot.data.chat.render import TODAY, messages
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.tokenize.segments import TextEncoder, prompt_ids
from surefoot.families import find

KINDS = {"gpt_oss": "gpt_oss", "glm4": "glm4_moe", "deepseek": "deepseek_v3", "qwen3": "qwen3_moe"}
DATE = TODAY.strftime("%Y-%m-%d")
THOUGHT = Turn("assistant", "<think>\nhm\n</think>\n\nHere it is.")


def opened(family, name="tokenizer"):
    encoder = TextEncoder(tokenizer(family))
    ends = find(KINDS[family]).turn_ends
    stops = dict.fromkeys((encoder.tokenizer.eos_token_id, *encoder.tokenizer.convert_tokens_to_ids(list(ends))))
    bos = encoder.bos_id if family == "deepseek" else None
    return make_template(name, encoder, tuple(stops)), encoder, bos


def published(family, conversation, prompt=False):
    """The ids of transformers, on the day that is always today here."""
    source = str(tokenizer(family).chat_template).replace("strftime_now('%Y-%m-%d')", f"'{DATE}'")
    return of_transformers(family, conversation, prompt=prompt, source=source)


def check(family, conversation):
    """The ids of transformers, and the prompt of every answer too; what is learned, as texts."""
    template, encoder, bos = opened(family)
    ids, mask = ids_and_mask(template, encoder, conversation, bos)
    written = published(family, conversation)
    if family == "glm4":
        assert encoder.control[ids[-1]] == "<|user|>"  # what the model stops by is not in the published text
        assert ids[:-1] == written
    else:
        assert ids == written
    for place, turn in enumerate(conversation.turns):
        if turn.role == "assistant":
            asked = replace(conversation, turns=conversation.turns[:place])
            prompt = published(family, asked, prompt=True)
            assert prompt_ids(asked, template, encoder, bos) == prompt == ids[: len(prompt)]
            assert mask[len(prompt)]
            assert not mask[len(prompt) - 1]
    return learned(encoder, ids, mask)


FINAL = "<|channel|>final<|message|>"
SAID = {
    "gpt_oss": [f"{FINAL}Here it is.<|return|>"],
    "glm4": ["\n<think></think>\nHere it is.<|user|>"],
    "deepseek": ["Here it is.<｜end▁of▁sentence｜>"],
}


@pytest.mark.parametrize("case", ["single", "system"])
@pytest.mark.parametrize("family", SAID)
def test_one_answer_is_that_of_transformers_and_learned_with_its_end(family, case):
    assert check(family, CASES[case]) == SAID[family]


@pytest.mark.parametrize(
    ("family", "said"),
    [
        # <|end|> behind the first is read and not learned: a model that wrote it would go on
        ("gpt_oss", [f"{FINAL}Here it is.", f"{FINAL}Nothing – the end.<|return|>"]),
        ("glm4", [*SAID["glm4"], "\n<think></think>\nNothing – the end.<|user|>"]),
        ("deepseek", [*SAID["deepseek"], "Nothing – the end.<｜end▁of▁sentence｜>"]),
    ],
)
def test_several_answers(family, said):
    assert check(family, CASES["multi-turn"]) == said
    notes = opened(family)[0].dialogue_notes
    assert bool(notes) == opened(family)[0].last_stops == (family == "gpt_oss")


@pytest.mark.parametrize(
    ("family", "call", "answer"),
    [
        (
            "gpt_oss",
            " to=functions.weather<|channel|>commentary json<|message|>"
            '{"city": "Bonn", "days": [1, 2.5, null]}<|call|>',
            SAID["gpt_oss"][0],
        ),
        (
            "glm4",
            "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>[1, 2.5, null]</arg_value>\n</tool_call><|observation|>",
            SAID["glm4"][0],
        ),
    ],
)
def test_calls_are_learned_with_what_stops_the_model_there(family, call, answer):
    assert check(family, CASES["tools"]) == [call, answer]
    going_on = Conversation((USER, CALL, RESULT, ANSWER, AGAIN, LAST), tools=(TOOL,))
    first, second, third = check(family, going_on)
    assert (first, second) == (call, answer.removesuffix("<|return|>"))
    assert "Nothing – the end." in third


def test_glm_learns_thoughts_with_every_answer():
    template, encoder, _ = opened("glm4")
    second = Turn("assistant", "<think>so</think>There.")
    ids, mask = ids_and_mask(template, encoder, Conversation((USER, THOUGHT, AGAIN, second)), None)
    said = ["\n<think>hm</think>\nHere it is.<|user|>", "\n<think>so</think>\nThere.<|user|>"]
    assert learned(encoder, ids, mask) == said
    text = str(encoder.tokenizer.decode(ids))
    assert text == f"[gMASK]<sop><|user|>\nWhere?<|assistant|>{said[0]}\n And then?\n<|assistant|>{said[1]}"


HM = replace(ANSWER, thought="hm")
THOUGHT_OUT = {
    "gpt_oss": f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}Here it is.<|return|>",
    "glm4": "\n<think>hm</think>\nHere it is.<|user|>",
    "qwen3": "<think>\nhm\n</think>\n\nHere it is.<|im_end|>",
}


@pytest.mark.parametrize("family", THOUGHT_OUT)
def test_thoughts_in_a_field_of_their_own_are_learned_where_the_template_puts_them(family):
    assert check(family, Conversation((SYSTEM, USER, HM))) == [THOUGHT_OUT[family]]
    before = Conversation((USER, ANSWER, AGAIN, HM))
    template, encoder, _ = opened(family)
    ids, mask = ids_and_mask(template, encoder, before, None)
    assert learned(encoder, ids, mask)[-1] == THOUGHT_OUT[family]


@pytest.mark.parametrize("family", ["glm4", "qwen3"])
def test_earlier_thoughts_stay_as_they_were_written(family):
    """Not cut, not doubled, not half of a block (TRL issue 6363)."""
    template, encoder, _ = opened(family)
    ids, mask = ids_and_mask(template, encoder, Conversation((USER, HM, AGAIN, replace(LAST, thought="so"))), None)
    second = THOUGHT_OUT[family].replace("hm", "so").replace(ANSWER.content, LAST.content)
    assert learned(encoder, ids, mask) == [THOUGHT_OUT[family], second]
    text = str(encoder.tokenizer.decode(ids))
    assert text.count("<think>") == text.count("</think>") == 2


@pytest.mark.parametrize("family", THOUGHT_OUT)
def test_gpt_oss_alone_drops_earlier_thoughts_and_says_so(family):
    """Such an answer is what the same record without its thoughts has there: final, and no <|return|>."""
    template, encoder, _ = opened(family)
    earlier = Conversation((USER, HM, AGAIN, replace(LAST, thought="so")))
    said = learned(encoder, *ids_and_mask(template, encoder, earlier, None))
    second = THOUGHT_OUT[family].replace("hm", "so").replace(ANSWER.content, LAST.content)
    drops = family == "gpt_oss"
    assert said == [f"{FINAL}Here it is." if drops else THOUGHT_OUT[family], second]
    assert (jinja_template._DROPS_THOUGHTS in template.dialogue_notes) == drops
    if drops:
        assert check(family, earlier) == said


def test_gpt_oss_sees_what_it_thought_before_a_call_until_the_next_question():
    """The published text of the whole drops it; the prompt of the answer, which is what a model is asked, holds it."""
    template, encoder, _ = opened("gpt_oss")
    call = replace(CALL, thought="so")
    whole = Conversation((USER, call, RESULT, HM), tools=(TOOL,))
    ids, mask = ids_and_mask(template, encoder, whole, None)
    first, second = learned(encoder, ids, mask)
    assert first.startswith("<|channel|>analysis<|message|>so<|end|>")
    assert second == THOUGHT_OUT["gpt_oss"]
    for place in (1, 3):
        prompt = published("gpt_oss", replace(whole, turns=whole.turns[:place]), prompt=True)
        assert ids[: len(prompt)] == prompt
    going_on = replace(whole, turns=(*whole.turns, AGAIN, LAST))
    ids, mask = ids_and_mask(template, encoder, going_on, None)
    assert ids == published("gpt_oss", going_on)
    assert learned(encoder, ids, mask)[1:] == [f"{FINAL}{ANSWER.content}", f"{FINAL}{LAST.content}<|return|>"]


def test_twin_the_end_of_a_call_taken_for_that_of_the_answer_behind_it(monkeypatch):
    """What stands between the two would be there twice."""
    monkeypatch.setattr(turn_by_turn, "_changed", lambda turn: turn)
    with pytest.raises(AssertionError):
        test_gpt_oss_sees_what_it_thought_before_a_call_until_the_next_question()


def test_twin_earlier_thoughts_that_stay_have_no_place_in_harmony(monkeypatch):
    monkeypatch.setattr(turn_by_turn, "_without_earlier_thoughts", lambda conversation: conversation)
    template, *_ = opened("gpt_oss")
    assert jinja_template._DROPS_THOUGHTS not in template.dialogue_notes
    with pytest.raises(RowFault):
        template.segments(Conversation((USER, HM, AGAIN, LAST)))


def test_control_tokens_that_thoughts_spell_out_are_text():
    template, encoder, _ = opened("gpt_oss")
    spelled = Conversation((USER, replace(ANSWER, thought="a<|return|><|end|>b")))
    ids, _ = ids_and_mask(template, encoder, spelled, None)
    harmless, _ = ids_and_mask(template, encoder, Conversation((USER, HM)), None)
    control = [[number for number in one if number in encoder.control] for one in (ids, harmless)]
    assert control[0] == control[1]
    assert "a<|return|><|end|>b" in str(encoder.tokenizer.decode(ids))


@pytest.mark.parametrize(("name", "family"), [("chatml", "qwen3"), ("qwen3", "qwen3"), ("deepseek", "deepseek")])
def test_named_templates_write_them_as_a_block_and_so_does_what_is_saved(name, family):
    template, encoder, bos = opened(family, name)
    whole = Conversation((USER, HM))
    ids, mask = ids_and_mask(template, encoder, whole, bos)
    (said,) = learned(encoder, ids, mask)
    assert said.startswith("<think>\nhm\n</think>\n\nHere it is.")
    assert ids_and_mask(template, encoder, Conversation((USER, THOUGHT)), bos)[0] == ids
    source = template.jinja(str(encoder.tokenizer.bos_token) if bos is not None else "")
    saved = encoder.tokenizer.apply_chat_template(messages(whole.turns), chat_template=source, return_dict=False)
    assert saved == ids


def test_thoughts_that_a_template_leaves_out_are_not_lost_in_silence():
    template, *_ = opened("deepseek")
    for turns in ((USER, THOUGHT), (USER, ANSWER, AGAIN, THOUGHT), (USER, HM)):
        with pytest.raises(RowFault) as caught:
            template.segments(Conversation(turns))
        assert caught.value.what.startswith(f"turn {len(turns)}: ")
    named, encoder, bos = opened("deepseek", "deepseek")
    ids, mask = ids_and_mask(named, encoder, Conversation((USER, THOUGHT)), bos)
    assert learned(encoder, ids, mask) == [f"{THOUGHT.content}<｜end▁of▁sentence｜>"]


@pytest.mark.parametrize("case", ["single", "multi-turn", "system"])
def test_the_named_template_is_deepseeks(case):
    template, encoder, bos = opened("deepseek", "deepseek")
    assert ids_and_mask(template, encoder, CASES[case], bos)[0] == published("deepseek", CASES[case])


def test_prompts_that_end_with_a_thought_which_answers_lack_are_refused():
    encoder = TextEncoder(tokenizer("deepseek-r1"))
    stops = (encoder.tokenizer.eos_token_id,)
    with raises_fault("SF-DATA-TEMPLATE", "data.template", remedy=["deepseek"]):
        make_template("tokenizer", encoder, stops)
    make_template("deepseek", encoder, stops).segments(Conversation((USER, THOUGHT)))  # what it says to write


@pytest.mark.parametrize("family", TOKENIZERS)
def test_no_mask_is_empty(family):
    own = tokenizer(family)
    if own.chat_template is None or family == "deepseek-r1":
        return
    encoder = TextEncoder(own)
    ends = (
        [token for token in ("<|user|>", "<|call|>") if token in encoder.control.values()] if family != "phi3" else []
    )
    stops = (own.eos_token_id, *own.convert_tokens_to_ids(ends))
    ids, mask = ids_and_mask(make_template("tokenizer", encoder, stops), encoder, CASES["single"], None)
    said = [number for number, is_learned in zip(ids, mask, strict=True) if is_learned]
    assert ANSWER.content in str(own.decode(said))
    assert said[-1] in encoder.control  # the token that ends it


# --- the checks above have teeth -------------------------------------------------------------------------------------


def test_twin_an_end_that_is_borrowed_from_nowhere(monkeypatch):
    monkeypatch.setattr(jinja_template._Chat, "_begins", lambda self, text: "")
    with raises_fault("SF-DATA-TEMPLATE", "data.template"):
        test_several_answers("glm4", [])


def test_twin_a_call_that_ends_as_an_answer_before_a_question(monkeypatch):
    monkeypatch.setattr(turn_by_turn, "_next_begins", lambda *_: "")
    with pytest.raises(AssertionError):
        test_calls_are_learned_with_what_stops_the_model_there("glm4", "", SAID["glm4"][0])


def test_twin_return_behind_an_earlier_answer_is_not_how_gpt_oss_goes_on(monkeypatch):
    always = lambda turns, tools, done, prompt, written, stop, *_: (True, prompt.removeprefix(written))  # noqa: E731
    monkeypatch.setattr(turn_by_turn, "_new", always)
    with pytest.raises(AssertionError):
        check("gpt_oss", Conversation((USER, CALL, RESULT, ANSWER, AGAIN, LAST), tools=(TOOL,)))


def test_twin_without_the_field_nothing_is_thought(monkeypatch):
    monkeypatch.setattr(turn_by_turn, "_require_thoughts", lambda *_: None)
    monkeypatch.setattr(
        "surefoot.data.chat.render.messages",
        lambda turns, *parts: messages([replace(t, thought="") for t in turns], *parts),
    )
    with pytest.raises(AssertionError):
        test_thoughts_in_a_field_of_their_own_are_learned_where_the_template_puts_them("gpt_oss")


def test_twin_thoughts_would_go_unseen(monkeypatch):
    monkeypatch.setattr(turn_by_turn, "_require_thoughts", lambda *_: None)
    template, encoder, bos = opened("deepseek")
    ids, mask = ids_and_mask(template, encoder, Conversation((SYSTEM, USER, THOUGHT)), bos)
    assert "hm" not in learned(encoder, ids, mask)[0]
