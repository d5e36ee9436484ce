"""Answers that the student draws itself in each step, in the place of some of the data's (on-policy distillation).

Which examples of a step, and what is drawn for them, are functions of the seed, the step and the example's place in it,
with the weights before the step. So a resumed run draws the same, nothing about it is saved, and the number of ranks
changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Batch, DrawnBatch, Example, Weighted
from surefoot.data.batching.loader import Layout, for_rank, to_batch
from surefoot.data.batching.order import OWN, uniform
from surefoot.data.prepare import PreparedData
from surefoot.methods.examples import step_layout
from surefoot.methods.method import LoadedModels, RunInputs
from surefoot.methods.rollouts import RolloutEngine, answer_seed, answers_of_all
from surefoot.models.generate import Decoding
from surefoot.models.modes import eval_mode
from surefoot.models.rollout import Rollout
from surefoot.system.errors import Fault, InputError
from surefoot.training.evaluation import last_answer


def check_prompts(config: RunConfig, data: PreparedData) -> None:
    """Raise InputError where answers are to be drawn and records are texts without prompts."""
    texts = [one.source.file for one in data.sources if one.source.layout == "text"]
    if config.draws and texts:
        what = f"draws answers to prompts, but {texts[0]} contains plain texts"
        fix = "leave it out, or train on records with questions"
        raise InputError(Fault("distill.on_policy", what, fix, code="SF-CONFIG-CONFLICT"))


@dataclass(frozen=True)
class Drawing:
    """Gives the steps their batches.

    run: its task gives the places of a step's examples.
    """

    run: RunInputs
    loaded: LoadedModels
    engine: RolloutEngine

    def ready(self, step: int, batches: Sequence[Weighted]) -> Sequence[Weighted]:
        """Return this rank's micro-batches of the step. The given ones, with the data's answers alone, are replaced
        unless nothing is drawn."""
        config, task, plan = self.run.config, self.run.task, self.run.plan
        examples = [task.data.train[int(place)] for place in task.step_places(step)]
        own = uniform(config.seed, (OWN, step), len(examples)) < config.distill.on_policy
        places = [place for place in np.flatnonzero(own).tolist() if examples[place].supervised[1:].any()]
        if not places:
            return batches
        answers = self._draw(step, [last_answer(examples[place])[0] for place in places], places)
        drawn = [_example(answer, examples[place]) for answer, place in zip(answers, places, strict=True)]
        given = [example for place, example in enumerate(examples) if place not in places]
        layout = step_layout(plan, task.data)
        found: list[Weighted] = [DrawnBatch(batch, batch.weight) for batch in _batches(drawn, layout)]
        found += _batches(given, layout)
        found.sort(key=lambda batch: batch.rows.input_ids.numel(), reverse=True)
        return list(for_rank(found, self.loaded.engine.rank, self.loaded.engine.world))

    def _draw(self, step: int, prompts: Sequence[list[int]], places: Sequence[int]) -> tuple[Rollout, ...]:
        """Return an answer to each prompt. places: of the examples in the step, which number their draws."""
        config, tokens, engine = self.run.config, self.run.plan.tokenizer, self.loaded.engine
        most = config.distill.max_new_tokens
        room = [tokens.max_length.value - len(prompt) for prompt in prompts]
        decoding = Decoding(
            most,
            frozenset(tokens.stop.value),
            tokens.pad_id,
            config.distill.sampling_temperature,
            seed=answer_seed(config.seed, step),
        )
        asked = [tuple(prompt) for prompt in prompts]
        mine = range(engine.rank, len(asked), engine.world)
        self.engine.follow()
        with torch.no_grad(), eval_mode(self.loaded.model):
            written = self.engine.rollouts.answer(
                [asked[one] for one in mine],
                decoding,
                [places[one] for one in mine],
                [min(most, room[one]) for one in mine],
            )
        return answers_of_all(asked, written, mine, engine.totals)


def _example(answer: Rollout, asked: Example) -> Example:
    ids = np.array([*answer.prompt, *answer.response], dtype=np.int64)
    return Example(ids, np.arange(len(ids)) >= len(answer.prompt), asked.number)


def _batches(examples: Sequence[Example], layout: Layout) -> list[Batch]:
    groups = layout.groups([(len(one.ids),) for one in examples])
    return [to_batch([examples[place] for place in group], layout) for group in groups]
