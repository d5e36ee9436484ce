"""Evaluation during training: the loss over the evaluation data, and metrics of generated answers.

The prompt is everything before an example's last answer, so a dialogue keeps its real history. Decoding is greedy, so
equal weights give equal answers. A metric is a function of all answers; higher is better.
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
from surefoot.data.tokenize.dataset import TokenizedDataset
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
    """Evaluate `objective` over all batches without gradients and with dropout off; then restore the model's mode.

    step: optimizer steps done, for the report.
    unit: what batch weights count; for "tokens" the loss is a cross entropy and the report has a perplexity.
    give_up: called before each batch; if it returns True, the result is None.
    totals: sums host numbers over the ranks; each rank has the same number of batches.

    Sums accumulate in float64, so the batch split affects the result only through the forward pass. A non-finite loss
    is reported unchanged.
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
            counts = batch.weight > 0  # batches of weight 0 give all ranks the same number of batches
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
    # The loss of a method with a teacher is none; its objective tells the cross entropy beside it.
    found = perplexity(means.get("cross_entropy", loss)) if unit == "tokens" else None
    return EvalReport(step, loss, found, accuracy, weight, seconds, means, kept, unit)


def one_pass(
    model: nn.Module, objective: Objective, batch: Weighted, *, settings: StepSettings, device: torch.device
) -> LossSum:
    """Compute one batch; call it inside `inference_mode`."""
    with settings.kernels(), settings.forward():
        return objective(model, batch.to(device))


def perplexity(loss: float) -> float:
    """Return exp(loss), or inf if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Answered:
    """One example with the model's generated answer.

    prompt: prompt from the data, with special tokens.
    expected: reference answer, without special tokens.
    answer: generated answer.
    stopped: whether it ended with a stop token rather than at the length limit.
    """

    prompt: str
    expected: str
    answer: str
    stopped: bool


Metric = Callable[[Sequence[Answered]], float]


def exact_match(answers: Sequence[Answered]) -> float:
    """Return the fraction of answers that stopped by themselves and equal the expected text after stripping."""
    return sum(one.stopped and one.answer.strip() == one.expected.strip() for one in answers) / len(answers)


METRICS: Mapping[str, Metric] = {"exact_match": exact_match}


def answer_examples(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    dataset: TokenizedDataset,
    *,
    count: int | None,
    stop_ids: Collection[int],
    pad_id: int,
    max_new_tokens: int,
    positions: int,
    rows: int,
    give_up: Callable[[], bool] = lambda: False,
) -> list[Answered] | None:
    """Generate answers to the first `count` examples (None: all), in their order.

    stop_ids: token ids that end an answer.
    pad_id: token id for padding.
    positions: longest sequence the model supports; a prompt that fills it gets an empty answer.
    rows: batch size.
    give_up: called before each batch; if it returns True, the result is None.
    """
    examples = [dataset[index] for index in range(min(count or len(dataset), len(dataset)))]
    requested = [last_answer(example) for example in examples]
    answers: list[Answered] = [Answered("", "", "", False)] * len(requested)
    # Pictures have inputs of different shapes, which `generate_answers` takes for one prompt only.
    rows = 1 if any(example.pictures for example in examples) else rows
    for places in _batches([len(prompt) for prompt, _ in requested], rows, positions - max_new_tokens):
        if give_up():
            return None
        prompts, shown = [requested[place][0] for place in places], examples[places[0]].pictures
        pictures, processor = None, dataset.processor
        if shown and processor is not None:
            pictures = pictures_of(model, prompts[0], processor.pixels(shown), processor.token_id)
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
            full_prompt = dataset.with_facts(place, str(tokenizer.decode(prompt)))
            answers[place] = Answered(full_prompt, expected, answer.text, answer.stopped)
    return answers


def _batches(lengths: Sequence[int], rows: int, most: int) -> Iterator[list[int]]:
    """Yield batches of prompt indices, longest first. A prompt longer than `most` leaves too few positions for a full
    answer; it gets a batch of its own, so that it shortens no other answer."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True)
    alone = [place for place in order if lengths[place] > most]
    yield from ([place] for place in alone)
    for start in range(len(alone), len(order), rows):
        yield order[start : start + rows]


def last_answer(example: Example) -> tuple[list[int], list[int]]:
    """Split an example into the ids before its last run of supervised tokens, and that run."""
    learned = np.flatnonzero(example.supervised)
    breaks = np.flatnonzero(np.diff(learned) > 1)
    start = int(learned[breaks[-1] + 1]) if len(breaks) else int(learned[0])
    return example.ids[:start].tolist(), example.ids[start : int(learned[-1]) + 1].tolist()
