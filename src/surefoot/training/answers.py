"""What a model writes itself, beside what the data says: answers to tokenised examples, and metrics on them.

The prompt is everything before an example's last answer, so a dialogue is asked with its real history. Decoding is
greedy: equal weights give equal answers. A metric is a function of all answers; higher is better.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from surefoot.data.batch import Example
from surefoot.data.dataset import TokenisedDataset
from surefoot.models.generate import generate_answers


@dataclass(frozen=True)
class Answered:
    """prompt, expected: from the data, special tokens left out of the latter. answer: the model's. stopped: it ended
    by a stop token, not at the limit."""

    prompt: str
    expected: str
    answer: str
    stopped: bool


Metric = Callable[[Sequence[Answered]], float]


def exact_match(answers: Sequence[Answered]) -> float:
    """Share of answers that ended by themselves and equal the expected text, blanks around both left out."""
    return sum(one.stopped and one.answer.strip() == one.expected.strip() for one in answers) / len(answers)


METRICS: Mapping[str, Metric] = {"exact_match": exact_match}


def answer_examples(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    dataset: TokenisedDataset,
    *,
    count: int | None,
    stop_ids: Collection[int],
    pad_id: int,
    max_new_tokens: int,
    positions: int,
    rows: int,
    give_up: Callable[[], bool] = lambda: False,
) -> list[Answered] | None:
    """Answers to the first `count` examples (None: all), in their order.

    positions: the longest sequence the model takes; a prompt that fills them is not answered. rows: prompts at once.
    give_up: asked before each batch; None is returned once it says so.
    """
    asked = [last_answer(dataset[index]) for index in range(min(count or len(dataset), len(dataset)))]
    answers: list[Answered] = [Answered("", "", "", False)] * len(asked)
    for places in _batches([len(prompt) for prompt, _ in asked], rows, positions - max_new_tokens):
        if give_up():
            return None
        prompts = [asked[place][0] for place in places]
        generated = generate_answers(
            model,
            tokenizer,
            prompts,
            max_new_tokens=max(0, min(max_new_tokens, positions - len(prompts[0]))),
            stop_ids=stop_ids,
            pad_id=pad_id,
        )
        for place, prompt, answer in zip(places, prompts, generated, strict=True):
            expected = str(tokenizer.decode(asked[place][1], skip_special_tokens=True))
            answers[place] = Answered(str(tokenizer.decode(prompt)), expected, answer.text, answer.stopped)
    return answers


def _batches(lengths: Sequence[int], rows: int, roomy: int) -> Iterator[list[int]]:
    """Places of prompts that are asked together, longest first. One longer than `roomy` leaves fewer positions than an
    answer may take; it is asked alone, so that it shortens nobody else's answer."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True)
    alone = [place for place in order if lengths[place] > roomy]
    yield from ([place] for place in alone)
    for start in range(len(alone), len(order), rows):
        yield order[start : start + rows]


def last_answer(example: Example) -> tuple[list[int], list[int]]:
    """Ids before the example's last stretch of learned tokens, and that stretch."""
    learned = np.flatnonzero(example.supervised)
    breaks = np.flatnonzero(np.diff(learned) > 1)
    start = int(learned[breaks[-1] + 1]) if len(breaks) else int(learned[0])
    return example.ids[:start].tolist(), example.ids[start : int(learned[-1]) + 1].tolist()
