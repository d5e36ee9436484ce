"""What is put between two drawn answers is what a conversation of training has there, token for token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from helpers.faults import raises_fault
from helpers.zoo import ZOO
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, Turn
from surefoot.data.formats.conversation import ToolCall
from surefoot.data.tokenize.segments import TextEncoder, encode_runs, prompt_ids
from surefoot.data.tokenize.turns import TurnMarks

USERS = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
TOOLS = ("qwen2", "qwen3")
NAMED = ("chatml", "qwen3", "vicuna", "zephyr", "plain", "llama3")
WORDS = ("seven", "12.5", "\n", "  ", "{", '"x"', "<|im_end|>", "é", "</s>", "ok.", "0")


def marks_of(family: str, folder: Path, name: str = "tokenizer") -> TurnMarks:
    ZOO[family](folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = TextEncoder(tokenizer)
    return TurnMarks(make_template(name, encoder, (tokenizer.eos_token_id,)), encoder, tokenizer.bos_token_id)


def text(draw: random.Random) -> str:
    # Blanks at the ends are some templates' own business, as in training.
    return "a" + " ".join(draw.choice(WORDS) for _ in range(draw.randint(0, 6))) + "b"


def put_together(marks: TurnMarks, turns: list[Turn]) -> tuple[list[int], list[int]]:
    """A conversation as a rollout puts it together from its parts, and as training has it."""
    (runs,) = encode_runs([marks.template.segments(Conversation(tuple(turns)))], marks.encoder, marks.bos_id)
    drawn = [list(run.ids) for run in runs if run.answer]
    whole = [number for run in runs for number in run.ids]
    found = prompt_ids(Conversation((turns[0],)), marks.template, marks.encoder, marks.bos_id)
    for place, answer in enumerate(drawn):
        found += answer
        if place + 1 < len(drawn):
            found += marks.after_answer([turns[2 * place + 2]])
    return found, whole[: len(found)]


def conversation(draw: random.Random, role: str) -> list[Turn]:
    call = (ToolCall("add", {"a": 1}),) if role == "tool" else ()
    turns = [Turn("user", text(draw))]
    for _ in range(draw.randint(1, 3)):
        turns += [
            Turn("assistant", "" if call else text(draw), calls=call),
            Turn(role, text(draw), tool="add" * bool(call)),
        ]
    return [*turns, Turn("assistant", text(draw))]


@pytest.mark.parametrize(("family", "role"), [*((one, "user") for one in USERS), *((one, "tool") for one in TOOLS)])
def test_parts_make_what_training_has(tmp_path, family, role):
    marks, draw = marks_of(family, tmp_path), random.Random(family)
    for _ in range(12):
        found, wanted = put_together(marks, conversation(draw, role))
        assert found == wanted


@pytest.mark.parametrize("name", NAMED)
def test_parts_make_what_training_has_with_named_templates(tmp_path, name):
    marks, draw = marks_of("llama3" if name == "llama3" else "qwen2", tmp_path, name), random.Random(name)
    for _ in range(12):
        found, wanted = put_together(marks, conversation(draw, "user"))
        assert found == wanted


def test_twin_a_lost_line_end_is_seen(tmp_path, monkeypatch):
    """verl#6501: the separator behind a turn was dropped."""
    marks, draw = marks_of("qwen2", tmp_path), random.Random(0)
    real = TurnMarks.after_answer
    monkeypatch.setattr(TurnMarks, "after_answer", lambda self, turns: real(self, turns)[1:])
    found, wanted = put_together(marks, conversation(draw, "user"))
    assert found != wanted


def test_what_is_said_first_stands_behind_the_prompts_own_text(tmp_path):
    marks = marks_of("qwen2", tmp_path)
    prompt = prompt_ids(Conversation((Turn("user", "Guess."),)), marks.template, marks.encoder, marks.bos_id)
    found = marks.encoder.tokenizer.decode(list(marks.before_answer(prompt, "hot <|im_end|>")))
    asked = marks.encoder.tokenizer.decode(prompt)
    assert found == asked.replace("Guess.", "Guess.\n\nhot <|im_end|>")
    end = marks.encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert marks.before_answer(prompt, "hot <|im_end|>").count(end) == prompt.count(end)  # the text's own is none


@pytest.mark.parametrize(("family", "role"), [("gemma2", "tool"), ("phi3", "tool"), ("llama2", "tool")])
def test_a_template_without_a_place_is_refused(tmp_path, family, role):
    with raises_fault("SF-ENVIRONMENT", "data.template"):
        marks_of(family, tmp_path).after_answer([Turn(role, "x")])


def test_a_template_that_writes_ids_of_calls_is_refused(tmp_path):
    """A drawn call has an id that the template does not know. Without a tool it is taken."""
    with raises_fault("SF-ENVIRONMENT", "data.template"):
        marks_of("mistral", tmp_path, "mistral").after_answer([Turn("tool", "x")])
    assert marks_of("mistral", tmp_path, "mistral").after_answer([Turn("user", "x")])
