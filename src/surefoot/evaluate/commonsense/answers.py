"""How a model answers a question of the commonsense sets: with a text that it writes, or by the likeliest option.

published: four beams, 32 new tokens, no sampling, the legacy prompt. The originals hand the model no mask, so pads of a
shorter prompt were attended; here they are masked, which is what their scripts' batch size of 1 comes to.
fast: each option is scored as the answer that training writes, "the correct answer is …".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from surefoot.data.formats import Conversation, Turn
from surefoot.data.tokenize.segments import Template
from surefoot.data.tokenize.text_encoder import Piece
from surefoot.evaluate.commonsense.protocol import SENTENCE, AnswerSet, extract, options_of, response_of
from surefoot.methods.open_model import OpenModel
from surefoot.models.beams import beam_answers
from surefoot.models.continuations import log_likelihoods

Record = dict[str, Any]
BEAMS, NEW_TOKENS = 4, 32
OPTION_TOKENS = 16  # room that the longest option certainly fits into


def conversation(record: Record, answer: str | None = None) -> Conversation:
    question = Turn("user", record["instruction"], record.get("input") or "")
    return Conversation((question, *([Turn("assistant", answer)] if answer is not None else [])))


def generated(
    opened: OpenModel,
    template: Template,
    one: AnswerSet,
    records: Sequence[Record],
    prompts: Sequence[list[int]],
) -> Iterator[Record]:
    answers = beam_answers(
        opened.model,
        opened.tokenizer,
        prompts,
        beams=BEAMS,
        max_new_tokens=NEW_TOKENS,
        stop_ids=template.stop_ids,
        pad_id=opened.pad_id,
    )
    for answer in answers:
        response = response_of(answer.text)
        yield {"output_pred": response, "pred": extract(response, one)}


def likeliest(
    opened: OpenModel,
    template: Template,
    one: AnswerSet,
    records: Sequence[Record],
    prompts: Sequence[list[int]],
) -> Iterator[Record]:
    offered = [options_of(record, one) for record in records]
    ids = [
        [option_ids(opened, template, record, option) for option in options]
        for record, options in zip(records, offered, strict=True)
    ]
    scored = log_likelihoods(opened.model, prompts, ids, pad_id=opened.pad_id)
    for options, scores in zip(offered, scored, strict=True):
        best = options[scores.index(max(scores))]
        likelihoods = {option: round(score, 6) for option, score in zip(options, scores, strict=True)}
        yield {"output_pred": SENTENCE.format(best), "pred": best, "log_likelihoods": likelihoods}


def option_ids(opened: OpenModel, template: Template, record: Record, option: str) -> list[int]:
    """The answer's tokens as training wrote them, without what ends an answer."""
    segments = template.segments(conversation(record, SENTENCE.format(option)))
    answer = [segment for segment in segments if segment.answer]
    last = max(place for place, segment in enumerate(answer) if segment.content)
    text = "".join(segment.text for segment in answer[: last + 1])
    (ids,) = opened.encoder.encode([Piece(text, literal=True, opening=False)])
    return ids
