"""How many held-out questions a model answers correctly, counted in two ways.

accuracy: the most likely of the eight possible answers is the right one. All eight are right equally often, so a model
    that does not know the rooms scores one in eight, whatever else it can do. Fair to a base model that has never seen
    a question.
exact: the greedily generated answer, up to its stop token, equals the expected one. This is what a user sees, but it is
    unfair to the base: a model that knew the rooms and used other words would score 0.

Shapes: Q questions, A possible answers, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from surefoot.commands.quickstart.world import Record, answers
from surefoot.data.batching.batch import IGNORE, Example, collate
from surefoot.data.formats import Conversation, Turn
from surefoot.data.tokenize.encode import EncodeSettings, encode
from surefoot.methods.open_model import OpenModel, conversation_ids
from surefoot.models.forward import hidden_states, output_head
from surefoot.models.generate import generate_answers
from surefoot.models.modes import eval_mode

_QUESTIONS_AT_ONCE = 16  # times eight answers: one forward pass
_ANSWER_TOKENS = 24  # room for a base model to ramble; a right answer has six tokens


@dataclass(frozen=True)
class Score:
    """Shares between 0 and 1, see above. written: the model's generated answer to each question."""

    accuracy: float
    exact: float
    written: tuple[str, ...]


def score(model: nn.Module, opened: OpenModel, records: Sequence[Record]) -> Score:
    """Ask `model` all questions in its training format. Restores the model's train/eval mode."""
    with eval_mode(model), torch.no_grad(), opened.context():
        chosen = list(_likeliest(model, opened, records))
        prompts = [conversation_ids(opened, [_question(record)]) for record in records]
        generated = generate_answers(
            model,
            opened.tokenizer,
            prompts,
            max_new_tokens=_ANSWER_TOKENS,
            stop_ids=opened.template.stop_ids,
            pad_id=opened.pad_id,
        )
    written = tuple(answer.text for answer in generated)
    exact = [one.stopped and one.text == record["output"] for one, record in zip(generated, records, strict=True)]
    right = [answer == record["output"] for answer, record in zip(chosen, records, strict=True)]
    return Score(float(np.mean(right)), float(np.mean(exact)), written)


def _likeliest(model: nn.Module, opened: OpenModel, records: Sequence[Record]) -> Iterator[str]:
    """For each question, the possible answer (with its stop token) of highest probability."""
    options = answers()
    device = next(model.parameters()).device
    for start in range(0, len(records), _QUESTIONS_AT_ONCE):
        rows = [
            Conversation((_question(record), Turn("assistant", option)))
            for record in records[start : start + _QUESTIONS_AT_ONCE]
            for option in options
        ]
        batch = collate(_examples(rows, opened), opened.pad_id).to(device)
        logits = output_head(model)(hidden_states(model, batch)).float()  # [Q * A, T, V]
        surprise = F.cross_entropy(logits.transpose(1, 2), batch.targets, ignore_index=IGNORE, reduction="none")
        for best in surprise.sum(dim=1).view(-1, len(options)).argmin(dim=1).tolist():
            yield options[best]


def _examples(rows: Sequence[Conversation], opened: OpenModel) -> list[Example]:
    how = EncodeSettings(encoder=opened.encoder, bos_id=opened.bos_id, max_length=opened.positions)
    encoded = encode(rows, opened.template, how, "quickstart")
    return [Example(one.ids.astype(np.int64), one.supervised, number) for number, one in enumerate(encoded)]


def _question(record: Record) -> Turn:
    return Turn("user", record["instruction"], record["input"])
