"""Evaluation during training: the loss over all of the evaluation data, and the model's own answers with metrics on
them.

The prompt of an answer is everything before an example's last answer, so a dialogue is answered with its real history.
Decoding is greedy: equal weights give equal answers. A metric is a function of all answers; higher is better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from surefoot.data.batching.batch import Example, Weighted
from surefoot.data.tokenize.dataset import TokenisedDataset
from surefoot.models.generate import generate_answers, pictures_of
from surefoot.models.modes import inference_mode
from surefoot.training.objective import LossSum, Objective
from surefoot.training.report import EvalReport, Unit
from surefoot.training.step import StepSettings


def evaluate_loss(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Weighted],
    *,
    step: int,
    settings: StepSettings,
    device: torch.device,
    unit: Unit = "tokens",
    give_up: Callable[[], bool] = lambda: False,
    totals: Callable[[Sequence[float]], list[float]] = list,
) -> EvalReport | None:
    """Run `objective` without gradients and with dropout off over all batches; the model's mode is restored.

    unit: what the batches weigh; of tokens the loss is a cross entropy, and has a perplexity.
    give_up: called before each batch; once it returns True, the result is None.
    totals: adds numbers up over the ranks, of which each has its own batches, and as many.

    Sums are added in float64, so the result depends on the batch split only through the forward pass itself. A
    non-finite loss is reported as it is.
    """
    started = time.perf_counter()
    loss_sum, weight = 0.0, 0
    sums: dict[str, float] = {}
    tables: dict[str, torch.Tensor] = {}
    with inference_mode(model):
        for batch in batches:
            if give_up():
                return None
            out = one_pass(model, objective, batch, settings=settings, device=device)
            counts = batch.weight > 0  # a blank one is there so that ranks keep step
            loss_sum += float(out.loss) if counts else 0.0
            for name, value in out.sums.items():
                sums[name] = sums.get(name, 0.0) + (float(value) if counts else 0.0)
            for name, table in out.tables.items():
                found = table.double().cpu()
                tables[name] = tables.get(name, 0.0) + (found if counts else torch.zeros_like(found))
            weight += batch.weight
    loss_sum, total, *added = totals([loss_sum, weight, *sums.values()])
    sums = dict(zip(sums, added, strict=True))
    tables = {name: torch.tensor(totals(one.flatten().tolist())).view_as(one) for name, one in tables.items()}
    weight, loss = int(total), loss_sum / total
    means = {name: value / weight for name, value in sums.items()}
    accuracy = means.pop("correct", None)
    seconds = time.perf_counter() - started
    kept = {name: table.tolist() for name, table in tables.items()}
    found = perplexity(loss) if unit == "tokens" else None
    return EvalReport(step, loss, found, accuracy, weight, seconds, means, kept, unit)


def one_pass(
    model: nn.Module, objective: Objective, batch: Weighted, *, settings: StepSettings, device: torch.device
) -> LossSum:
    """Of one batch, to be computed in `inference_mode`."""
    with settings.kernels(), settings.forward():
        return objective(model, batch.to(device))


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Answered:
    """One example with the model's own answer.

    prompt, expected: from the data, special tokens left out of the latter.
    answer: the model's.
    stopped: it ended by a stop token, not at the limit.
    """

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

    positions: the longest sequence the model takes; a prompt that fills them is not answered.
    rows: prompts at once.
    give_up: called before each batch; once it returns True, the result is None.
    """
    examples = [dataset[index] for index in range(min(count or len(dataset), len(dataset)))]
    requested = [last_answer(example) for example in examples]
    answers: list[Answered] = [Answered("", "", "", False)] * len(requested)
    rows = 1 if any(example.pictures for example in examples) else rows
    for places in _batches([len(prompt) for prompt, _ in requested], rows, positions - max_new_tokens):
        if give_up():
            return None
        prompts, shown = [requested[place][0] for place in places], examples[places[0]].pictures
        pictures, sight = None, dataset.sight
        if shown and sight is not None:
            pictures = pictures_of(model, prompts[0], sight.pixels(shown), sight.token_id)
        generated = generate_answers(
            model,
            tokenizer,
            prompts,
            max_new_tokens=max(0, min(max_new_tokens, positions - len(prompts[0]))),
            stop_ids=stop_ids,
            pad_id=pad_id,
            pictures=pictures,
        )
        for place, prompt, answer in zip(places, prompts, generated, strict=True):
            expected = str(tokenizer.decode(requested[place][1], skip_special_tokens=True))
            text = str(tokenizer.decode(prompt))
            asked = sight.with_facts(text, iter(shown)) if shown and sight is not None else text
            answers[place] = Answered(asked, expected, answer.text, answer.stopped)
    return answers


def _batches(lengths: Sequence[int], rows: int, most: int) -> Iterator[list[int]]:
    """Indices of prompts that form a batch, longest first. One longer than `most` leaves fewer positions than an answer
    may take; it is a batch of its own, so that it shortens no other answer."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True)
    alone = [place for place in order if lengths[place] > most]
    yield from ([place] for place in alone)
    for start in range(len(alone), len(order), rows):
        yield order[start : start + rows]


def last_answer(example: Example) -> tuple[list[int], list[int]]:
    """Ids before the example's last stretch of learned tokens, and that stretch."""
    learned = np.flatnonzero(example.supervised)
    breaks = np.flatnonzero(np.diff(learned) > 1)
    start = int(learned[breaks[-1] + 1]) if len(breaks) else int(learned[0])
    return example.ids[:start].tolist(), example.ids[start : int(learned[-1]) + 1].tolist()
