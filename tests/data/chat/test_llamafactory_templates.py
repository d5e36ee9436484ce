"""LLaMA-Factory's layouts as rows. That their ids are that tool's own is shown in tests/equality."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.conversations import CASES, ids_and_mask, learned, tokenizer
from surefoot.data.chat import templates
from surefoot.data.chat.render import messages
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import RowFault
from surefoot.data.tokenize.segments import TextEncoder
from surefoot.families.other_templates import LLAMAFACTORY
from surefoot.families.template_row import ALONE

KNOWS = {
    "deepseek": "deepseek",
    "deepseek3": "deepseek",
    "gemma": "gemma",
    "llama2": "llama2",
    "mistral": "mistral",
    "phi": "phi3",
    "qwen": "qwen",
    "qwen2_vl": "qwen",
    "qwen3": "qwen3",
    "qwen3-unthinking": "qwen3",
    "qwen3_nothink": "qwen3",
    "chatml": "qwen",
}
BYTE_LEVEL = (
    "qwen",
    "qwen3",
    "llama3",
    "deepseek",
)  # they put no blank before a text: cutting it differently changes no id
ROWS = [row for row in LLAMAFACTORY if row.name != "llamafactory-phi4"]  # no tokenizer of the tests has its tokens


def opened(row):
    family = KNOWS.get(row.name.removeprefix("llamafactory-"), "llama3")
    encoder = TextEncoder(tokenizer(family))
    return family, encoder, make_template(row.name, encoder, (encoder.tokenizer.eos_token_id,))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("case", ["single", "multi-turn", "system"])
def test_the_saved_chat_template_writes_the_same_text(row, case):
    family, encoder, template = opened(row)
    conversation = CASES[case]
    text = "".join(segment.text for segment in template.segments(conversation))
    source = template.jinja("")
    if "{bos}" in row.prefix:  # which the plan puts, or not
        text = text.removeprefix(encoder.tokenizer.bos_token)
    ours = encoder.tokenizer.apply_chat_template(messages(conversation.turns), chat_template=source, tokenize=False)
    assert ours == text
    assert ALONE not in text + source
    if family in BYTE_LEVEL and "{bos}" not in row.prefix + row.user:
        theirs = encoder.tokenizer.apply_chat_template(
            messages(conversation.turns), chat_template=source, return_dict=False
        )
        assert ids_and_mask(template, encoder, conversation, None)[0] == theirs


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_answer_is_learned_with_its_stop_and_tools_are_refused(row):
    _, encoder, template = opened(row)
    bos = encoder.bos_id if "{bos}" in row.prefix + row.user else None
    ids, mask = ids_and_mask(template, encoder, CASES["multi-turn"], bos)
    answers = learned(encoder, ids, mask)
    assert len(answers) == 2
    names = {encoder.control[stop] for stop in template.stop_ids}
    assert all(any(name in answer for name in names) for answer in answers)
    with pytest.raises(RowFault):
        template.segments(CASES["tools"])


def test_a_text_of_its_own_gets_the_blank_that_its_tokenizer_puts_and_the_twin_does_not(monkeypatch):
    row = next(row for row in ROWS if row.name == "llamafactory-llama2")
    _, encoder, template = opened(row)
    alone, _ = ids_and_mask(template, encoder, CASES["single"], encoder.bos_id)
    together = replace(row, user=row.user.replace(ALONE, ""), lead="")
    monkeypatch.setattr(templates, "named_row", lambda *_: together)
    _, _, twin = opened(row)
    joined, _ = ids_and_mask(twin, encoder, CASES["single"], encoder.bos_id)
    assert encoder.puts_blank
    assert len(alone) == len(joined) + 2  # before the question and before the answer


def test_ollama_gets_the_words_without_the_marks():
    from surefoot.report.cards.export import go_template, template_obstacle
    from surefoot.runs.export.files import served_row

    row = next(row for row in ROWS if row.name == "llamafactory-phi")
    _, encoder, template = opened(row)
    served, why_not = served_row(template, encoder, template.stop_ids)
    assert (why_not, template_obstacle(served)) == ("", "")
    assert ALONE not in go_template(served, eos="</s>", bos="")
    assert template_obstacle(row)  # the twin: the row with its marks


# What LLaMA-Factory's slots become, text by text, each tokenized alone; {eos} ends what is learned.
SLOTS = {
    ("deepseek", "single"): ["User: Where?\n\nAssistant:", "Here it is."],
    ("deepseek", "system"): ["You are a heron.\n\n", "User: Where?\n\nAssistant:", "Here it is."],
    ("deepseek3", "system"): ["You are a heron.", "<｜User｜>Where?<｜Assistant｜>", "Here it is."],
    ("deepseek3", "multi-turn"): [
        "<｜User｜>Where?<｜Assistant｜>",
        "Here it is.",
        "<｜User｜> And then?\n<｜Assistant｜>",
        "Nothing – the end.",
    ],
}


@pytest.mark.parametrize(("name", "case"), SLOTS)
def test_ids_are_those_of_its_slots(name, case):
    row = next(row for row in ROWS if row.name == f"llamafactory-{name}")
    _, encoder, template = opened(row)
    known, ids, learns = encoder.tokenizer, [encoder.bos_id], [False]
    for slot in SLOTS[name, case]:
        answer = not slot.startswith(("User", "You are", "<｜User｜>"))
        own = known.encode(slot, add_special_tokens=False) + ([known.eos_token_id] if answer else [])
        ids, learns = [*ids, *own], [*learns, *[answer] * len(own)]
    assert ids_and_mask(template, encoder, CASES[case], encoder.bos_id) == (ids, learns)
