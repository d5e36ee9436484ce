"""Ids and masks of every named template, as files to be read; and the legacy prompts byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers import golden_templates
from helpers.golden_templates import FOLDER, golden, golden_encoder
from surefoot.data.chat import templates
from surefoot.data.formats import Conversation, Turn
from surefoot.families.templates import ROWS, find_row

NAMES = [row.name for row in ROWS]


@pytest.fixture(scope="module")
def encoder():
    return golden_encoder()


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_masks_are_those_of_the_file(encoder, name):
    assert golden(name, encoder) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_there_is_a_file_for_every_row():
    assert {path.stem for path in FOLDER.iterdir()} == set(NAMES)


HEADER = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
PAIRED = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
PAD = " " * 16


def lines(first, instruction, *more):
    """more: heading and text, or a line as it is."""
    indented = [part if isinstance(part, str) else f"{PAD}### {part[0]}:\n{PAD}{part[1]}" for part in more]
    return "\n".join([first, "", f"{PAD}### Instruction:\n{PAD}{instruction}", *indented]) + "</s>"


YES, INPUT = ("Response", "yes"), ("Input", "in")


@pytest.mark.parametrize(
    ("name", "context", "text"),
    [
        ("commonsense", "", lines(f"{HEADER}  ", "Go\nnow", PAD, YES)),
        ("commonsense", "in", lines(f"{PAIRED} ", "Go\nnow", PAD, INPUT, PAD, YES)),
        ("commonsense-eval", "", lines(f"{HEADER} ", "Go\nnow", "", YES)),
        ("commonsense-eval", "in", lines(PAIRED, "Go\nnow", "", INPUT, "", YES)),
        ("commonsense-sentence", "", "Go\nnow. yes</s>"),
        ("commonsense-sentence", "in", "Go\nnow. in. yes</s>"),
    ],
)
def test_the_commonsense_prompts_are_those_of_the_published_code(encoder, name, context, text):
    template = templates.make_template(name, encoder, (encoder.tokenizer.eos_token_id,))
    conversation = Conversation((Turn("user", "Go\nnow", context), Turn("assistant", "yes")))
    assert "".join(segment.text for segment in template.segments(conversation)) == text


@pytest.mark.parametrize("name", NAMES)
def test_twin_one_character_less_is_noticed(encoder, name, monkeypatch):
    row = find_row(name)
    field = "user" if hasattr(row, "user") else "instruction"
    text = getattr(row, field)
    place = next(at for at, character in enumerate(text) if character not in "{} \n")
    shorter = replace(row, **{field: text[:place] + text[place + 1 :]} if "{" not in text[:1] else {field: text + "."})
    monkeypatch.setattr(templates, "named_row", lambda *_: shorter)
    assert golden(name, encoder) != (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_twin_an_unlearned_stop_token_is_noticed(encoder, monkeypatch):
    row = find_row("chatml")
    monkeypatch.setattr(templates, "named_row", lambda *_: replace(row, close="", after="<|im_end|>\n"))
    text = golden_templates.golden("chatml", encoder)
    assert text != (FOLDER / "chatml.txt").read_text(encoding="utf-8")
