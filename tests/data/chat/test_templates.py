"""The named templates write exactly these texts, and learn exactly these parts of them."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from helpers.faults import raises_fault
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.tokenize.segments import Template, TextEncoder

INPUT_HEADER = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
USER, ANSWER = Turn("user", "Add."), Turn("assistant", "3")


@pytest.fixture
def encoder(llama3) -> TextEncoder:
    return TextEncoder(llama3)


def make(name: str, encoder: TextEncoder) -> Template:
    return make_template(name, encoder, (encoder.tokenizer.convert_tokens_to_ids("<|end_of_text|>"),))


def written(template: Template, *turns: Turn) -> tuple[str, str]:
    """The whole text, and what of it is the model's."""
    segments = template.segments(Conversation(turns))
    return "".join(segment.text for segment in segments), "".join(
        segment.text for segment in segments if segment.answer
    )


@pytest.mark.parametrize(
    ("name", "turns", "text", "answer"),
    [
        (
            "alpaca",
            (Turn("user", "Add.", "1 2"), ANSWER),
            f"{INPUT_HEADER}\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<|end_of_text|>",
            "3<|end_of_text|>",
        ),
        ("plain", (Turn("user", "Add.", "1 2"), ANSWER), "Add.\n1 2\n3<|end_of_text|>", "3<|end_of_text|>"),
        ("plain", (Turn("text", " Once.\n"),), " Once.\n<|end_of_text|>", " Once.\n<|end_of_text|>"),
    ],
)
def test_texts_that_the_golden_files_have_not(encoder, name, turns, text, answer):
    assert written(make(name, encoder), *turns) == (text, answer)


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("alpaca", (USER, ANSWER, USER, ANSWER)),
        ("alpaca", (USER, ANSWER, USER)),
        ("alpaca", (Turn("text", "x"),)),
        ("llama3", (Turn("text", "x"),)),
        ("tokenizer", (Turn("text", "x"),)),
    ],
)
def test_what_a_template_cannot_render(encoder, name, turns):
    with pytest.raises(RowFault):
        make(name, encoder).segments(Conversation(turns))


def test_missing_tokens_and_names(legacy, encoder):
    old = TextEncoder(legacy)
    with raises_fault("SF-DATA-TEMPLATE", "data.template"):
        make_template("llama3", old, (2,))
    with raises_fault("SF-DATA-TEMPLATE", "data.template"):
        make("vicunna", encoder)
    with raises_fault("SF-DATA-TEMPLATE", "data.template"):
        make("x", encoder)
    with raises_fault("SF-TOKENIZER", "tokenizer"):
        make_template("plain", encoder, ())
    with raises_fault("SF-TOKENIZER", "tokenizer"):
        make_template("plain", encoder, (encoder.tokenizer.convert_tokens_to_ids("Ġt"),))


def test_identity_differs_with_what_the_template_writes(llama3, llama3_pad):
    def identity(tokenizer: PreTrainedTokenizerFast, name: str, stop: str) -> str:
        return make_template(name, TextEncoder(tokenizer), (tokenizer.convert_tokens_to_ids(stop),)).identity

    eos, other = "<|end_of_text|>", "<|reserved_special_token_0|>"
    assert identity(llama3, "plain", eos) == identity(llama3_pad, "plain", eos)
    assert len({identity(llama3, name, eos) for name in ("plain", "alpaca", "llama3", "tokenizer")}) == 4
    assert identity(llama3, "plain", eos) != identity(llama3, "plain", other)
