"""Prompts answered by a policy, and the answers scored: in a run's rollouts and evaluations, and by `surefoot evaluate
answers` for a finished model.

Every rank generates and scores its own answers; then all ranks get all answers and scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.methods.environments.multi_turn import (
    ENVIRONMENT,
    MultiTurn,
    TurnAnswers,
    TurnRequest,
    counted,
    episode_seed,
)
from surefoot.methods.grpo.reward_models import RewardModel, model_scores
from surefoot.methods.grpo.rollout import GroupRollout, Passes, scored_rollout
from surefoot.methods.losses.grpo import pass_at_k
from surefoot.methods.rewards.answers import Answers, Score
from surefoot.methods.rewards.as_drawn import AsDrawn
from surefoot.methods.rewards.terms import Graded, Reward, grade_all
from surefoot.methods.rollouts import Prompts, answers_of_all, evaluation_seed, prompts_at, shown_of
from surefoot.methods.waiting import WaitReporter
from surefoot.models.generate import Decoding
from surefoot.models.rollout import Rollout, Rollouts
from surefoot.planning.plan import TokenizerPlan
from surefoot.training.ranks import all_or_none, gather_texts


@dataclass(frozen=True)
class DrawnAnswers:
    """This rank's answers to prompts, without scores.

    prompts: of all ranks.
    places: which of them this rank has answered.
    scores: of rewards that were asked while others were drawn, by their labels.
    """

    prompts: Prompts
    places: Sequence[int]
    heard: TurnAnswers
    scores: Mapping[str, Sequence[Score]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answering:
    """How prompts are answered and answers scored.

    limit: most tokens of an answer.
    """

    rollouts: Rollouts
    multi_turn: MultiTurn | None
    rewards: tuple[Reward, ...]
    reward_models: tuple[RewardModel, ...]
    tokenizer: PreTrainedTokenizerBase
    tokens: TokenizerPlan
    limit: int
    passes: Passes
    waits: WaitReporter

    def draw(
        self,
        step: int,
        data: TokenizedDataset,
        where: Sequence[int],
        *,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        needed: bool = False,
        group: int = 0,
    ) -> DrawnAnswers:
        """Generate answers. With a server that does, it needs no model and may run in a thread.

        step: that they are for.
        where: index of each prompt in the data.
        needed: see `MultiTurn.converse`.
        group: answers to each prompt, which follow each other; they are scored while others are drawn, by rewards that
            can. 0: none are.
        """
        how, tokens = self.passes, self.tokens
        decoding = Decoding(
            self.limit, frozenset(tokens.stop.value), tokens.pad_id, temperature, top_p, seed, top_k, among_kept=True
        )
        prompts = prompts_at(data, where)
        places = range(how.rank, len(where), how.world)
        own = [prompts.ids[place] for place in places]
        scores: Mapping[str, Sequence[Score]] = {}
        if self.multi_turn is None:
            with self.waits.during("answering", f"the engine writes answers to {len(places)} prompts"):
                if group and any(one.at_once for one in self.rewards):
                    indices = [where[place] for place in places]
                    with AsDrawn(self.rewards, group, len(places), partial(self._asked_of, data, indices)) as early:
                        heard = TurnAnswers(self.rollouts.answer(own, decoding, places, arrived=early.arrived))
                    scores = early.scores()
                else:
                    shown = shown_of(prompts.ids, prompts.pictures, places, how.processor)
                    heard = TurnAnswers(self.rollouts.answer(own, decoding, places, shown=shown))
        else:
            asked = TurnRequest(
                own,
                [data.record(where[place]) for place in places],
                [prompts.records[place] for place in places],
                [episode_seed(seed, where[place]) for place in places],
                places,
            )
            heard = self.multi_turn.converse(self.rollouts, asked, decoding, step, needed=needed)
        return DrawnAnswers(prompts, places, heard, scores)

    def score(self, data: TokenizedDataset, drawn: DrawnAnswers) -> tuple[GroupRollout, list[dict[str, Any]]]:
        """Score answers; also return each answer's record for the run folder."""
        how, prompts, places, heard = self.passes, drawn.prompts, drawn.places, drawn.heard
        where = prompts.where
        with self.waits.during("ranks", "this rank has its answers, and waits for those of the other ranks"):
            answers = answers_of_all(prompts.ids, heard.answers, places, how.totals)
        by_models: dict[str, list[float | None]] = {}
        for model in self.reward_models:
            with self.waits.during(model.name, f"{model.name} scores {len(answers)} answers"):
                scores = model_scores(model, answers, prompts.pictures, how)
            by_models[model.name] = [scores[place] for place in places]
        with all_or_none(how.totals):
            graded, kept = self._grade(heard, data, [where[place] for place in places], by_models, drawn.scores)
        with self.waits.during("ranks", "this rank has its scores, and waits for those of the other ranks"):
            rollout = scored_rollout(answers, graded, places, self.rewards, how.totals, heard.sums)
            texts = gather_texts(dict(zip(places, kept, strict=True)), len(where), how.totals)
        return rollout, [json.loads(text) for text in texts]

    def _grade(
        self,
        heard: TurnAnswers,
        data: TokenizedDataset,
        places: Sequence[int],
        by_models: Mapping[str, Sequence[float | None]],
        known: Mapping[str, Sequence[Score]],
    ) -> tuple[list[Graded], list[str]]:
        """Return the scores, and each answer with its scores as JSON for the run folder.

        places: index of each answer's prompt in the data.
        by_models: as in `Answers`.
        known: as in `grade_all`.
        """
        answers = heard.answers
        turns = [self._turns(one, heard.given[place] if heard.given else ()) for place, one in enumerate(answers)]
        asked = replace(
            self._asked(answers, [said[-1] for said in turns], data, places),
            by_models=by_models,
            by_environment=heard.scores,
            turns=turns if heard.given else (),
        )

        def asking(label: str) -> AbstractContextManager[None]:
            return self.waits.during(f"reward {label}", f"the reward {label} is asked for {len(asked)} answers")

        graded = grade_all(self.rewards, asked, asking, known)
        return graded, [
            json.dumps(
                {
                    "record": data.name(place),
                    "prompt": prompt,
                    "answer": response,
                    "tokens": answer.drawn,
                    **({"turns": said} if len(said) > 1 else {}),
                    "ended": ended,
                    "score": one.total if math.isfinite(one.total) else None,
                    "rewards": {label: _kept(part) for label, part in one.parts.items()},
                }
            )
            for place, prompt, response, answer, said, ended, one in zip(
                places, asked.prompts, asked.responses, answers, turns, asked.stopped, graded, strict=True
            )
        ]

    def _asked_of(
        self, data: TokenizedDataset, where: Sequence[int], places: Sequence[int], answers: list[Rollout]
    ) -> Answers:
        """What a reward gets about some answers of one turn. where: index in the data of the prompt at each place."""
        words = [self._text(one.response) for one in answers]
        return self._asked(answers, words, data, [where[place] for place in places])

    def _asked(
        self, answers: Sequence[Rollout], words: Sequence[str], data: TokenizedDataset, where: Sequence[int]
    ) -> Answers:
        return Answers(
            [self._text(one.prompt) for one in answers],
            words,
            [one.stretches[-1] for one in answers],
            [data.record(place) for place in where],
            [one.stopped for one in answers],
        )

    def _turns(self, answer: Rollout, given: Sequence[str]) -> list[str]:
        """The texts of an answer: the policy's, with the environment's between them."""
        drawn = [self._text(ids) for ids in answer.stretches[::2]]
        between = zip(drawn[1:], given, strict=False)  # none for what an answer ended with
        return [drawn[0], *(text for own, said in between for text in (said, own))]

    def _text(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def _kept(score: Score) -> dict[str, Any]:
    """The score's entry in the run folder; without a number, its outcome."""
    said = {"score": score.value} if score.outcome == "scored" else {"score": None, "outcome": score.outcome}
    return said | ({"reason": score.reason} if score.reason else {})


@dataclass(frozen=True)
class Evaluated:
    """Scored answers to all P prompts of a data set.

    greedy: one to each, of the likeliest tokens.
    drawn: n to each, [P n] prompt by prompt; None if none were asked for.
    kept: the drawn ones' records for a folder.
    """

    greedy: GroupRollout
    drawn: GroupRollout | None
    kept: Sequence[Mapping[str, Any]]

    def passed(self, least: float) -> tuple[torch.Tensor, torch.Tensor]:
        """[P] each: drawn answers that score at least `least`, and those that have a score."""
        assert self.drawn is not None
        scores = self.drawn.scores.reshape(len(self.greedy.answers), -1)
        return (scores >= least).sum(dim=1), scores.isfinite().sum(dim=1)

    @property
    def sizes(self) -> list[int]:
        """The k of pass@k: powers of two up to n, and n."""
        count = 0 if self.drawn is None else len(self.drawn.answers) // len(self.greedy.answers)
        return sorted({*(2**power for power in range(count.bit_length())), *([count] if count else [])})

    def metrics(self, least: float) -> dict[str, float]:
        """What is logged of an evaluation. least: score of an answer that passes."""
        found = self.greedy
        known = found.scores[found.scores.isfinite()]
        parts = {f"reward_{label}": float(values.nanmean()) for label, values in found.parts.items()}
        return {
            "reward": float(known.mean()) if len(known) else math.nan,
            **(parts if len(parts) > 1 or ENVIRONMENT in found.parts else {}),
            **{f"pass_at_{k}": pass_at_k(*self.passed(least), k) for k in self.sizes},
            **counted(found.talked, len(found.answers)),
            "response_length": float(found.lengths.double().mean()),
            "ended": sum(one.stopped for one in found.answers) / len(found.answers),
        }


def evaluate_answers(
    how: Answering,
    step: int,
    data: TokenizedDataset,
    *,
    count: int,
    temperature: float,
    seed: int,
    needed: bool = False,
) -> Evaluated:
    """Answer all prompts greedily, and `count` times at the temperature: with the same random numbers at every
    evaluation of a seed. top_p and top_k of the training do not count.

    seed: the run's.
    """
    greedy, _ = how.score(data, how.draw(step, data, range(len(data)), temperature=0.0, needed=needed))
    if not count:
        return Evaluated(greedy, None, ())
    where = [place for place in range(len(data)) for _ in range(count)]
    answers = how.draw(step, data, where, temperature=temperature, seed=evaluation_seed(seed), needed=needed)
    return Evaluated(greedy, *how.score(data, answers))
