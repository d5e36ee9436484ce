"""One rollout of PPO: generate answers, run reward model, reference, actor and critic on them, and make episodes.

Every rank generates answers to its own prompts; then all ranks share all answers, divide their scoring, and share all
results. So all ranks compute the same rewards, advantages and holds, and each can learn from any episode.

Log-probabilities are recomputed by the training code: otherwise ratios would start with the difference to the
generating engine. If the two were found to differ by rounding only (`surefoot.methods.ppo.checks.drawn_suffice`), the
engine's are used, which saves the actor's pass over the answers.

Shapes: E episodes, R response tokens of the longest, n of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.data.batching.loader import Layout, for_rank
from surefoot.data.batching.rollouts import Episode
from surefoot.methods.losses.logprobs import chosen_logprobs, log_distribution
from surefoot.methods.losses.ppo import (
    advantages_and_returns,
    answer_distance,
    answer_kl,
    at_places,
    explained_variance,
    response_mask,
    token_rewards,
    whiten,
)
from surefoot.methods.losses.sft import supervised_places
from surefoot.methods.ppo.holds import RolloutStatistics
from surefoot.methods.rollouts import Prompts, Write, answered_batches, answers_of_all, as_table, by_answer
from surefoot.models.ppo_models import PPOModels
from surefoot.models.rollout import Rollout
from surefoot.training.ranks import all_or_none, gather_rows
from surefoot.training.step import Context

Score = Callable[[Sequence[Rollout]], Sequence[float]]


@dataclass(frozen=True)
class Terms:
    """Constants of rewards and advantages, from the config keys of the same names."""

    reward_clip: float | None
    gamma: float
    lam: float
    whiten: bool


@dataclass(frozen=True)
class Scoring:
    """The models that score answers, and how they run.

    score: None if the models include a reward model.
    take_drawn: whether the engine's log-probabilities replace the actor's.
    rank, world, totals: of the training engine.
    """

    models: PPOModels
    score: Score | None
    take_drawn: bool
    pad_id: int
    micro: int
    kernels: Context
    forward: Context
    device: torch.device
    rank: int
    world: int
    totals: Callable[[Sequence[float]], list[float]]


@dataclass(frozen=True)
class Experience:
    """A rollout's answers with their tables [E, R], 0 after the end of an answer.

    scores: [E], NaN if there is none.
    lengths: [E].
    drawn: log-probabilities of the generating engine, NaN if it gives none.
    """

    answers: tuple[Rollout, ...]
    scores: torch.Tensor
    lengths: torch.Tensor
    drawn: torch.Tensor
    logprobs: torch.Tensor
    reference: torch.Tensor
    values: torch.Tensor

    @property
    def real(self) -> torch.Tensor:
        return response_mask(self.lengths, self.logprobs.shape[1])


def make_experience(prompts: Prompts, write: Write, how: Scoring, temperature: float) -> Experience:
    """Generate and score answers. Collective: every rank must call it."""
    count = len(prompts.ids)
    places = range(how.rank, count, how.world)
    written = write([prompts.ids[place] for place in places], places)
    with all_or_none(how.totals):
        scores = [] if how.score is None else how.score(written)
    answers = answers_of_all(prompts.ids, written, places, how.totals)
    found = dict(_pass_through(answers, how, temperature))
    numbers = [
        gather_rows({place: rows[part] for place, rows in found.items()}, count, how.totals) for part in range(4)
    ]
    logprobs, reference, values, own_scores = numbers
    if how.score is not None:
        own_scores = gather_rows({p: [float(s)] for p, s in zip(places, scores, strict=True)}, count, how.totals)
    width = max(1, *(len(answer.response) for answer in answers))
    drawn = [answer.logprobs or [torch.nan] * len(answer.response) for answer in answers]
    if how.take_drawn:
        logprobs = drawn
    return Experience(
        answers,
        torch.tensor([row[0] if row else torch.nan for row in own_scores]),
        torch.tensor([len(answer.response) for answer in answers]),
        *(as_table(rows, width) for rows in (drawn, logprobs, reference, values)),
    )


def to_episodes(
    prompts: Prompts, experience: Experience, terms: Terms, *, kl: float
) -> tuple[tuple[Episode, ...], RolloutStatistics]:
    """Compute rewards, advantages and returns of a rollout, and its statistics.

    kl: coefficient of the penalty. Answers without a token or a finite score are left out.
    """
    kept = (experience.scores.isfinite() & (experience.lengths > 0)).nonzero().squeeze(1)
    left_out = len(experience.answers) - len(kept)
    if not len(kept):
        nothing = float("nan")
        return (), RolloutStatistics(0, left_out, 0, nothing, nothing, nothing, nothing, nothing, nothing)
    real, scores, lengths = experience.real[kept], experience.scores[kept], experience.lengths[kept]
    logprobs, reference, values = experience.logprobs[kept], experience.reference[kept], experience.values[kept]
    rewards = token_rewards(logprobs, reference, scores, real, kl=kl, clip=terms.reward_clip)
    advantages, returns = advantages_and_returns(rewards, values, real, gamma=terms.gamma, lam=terms.lam)
    if terms.whiten:
        # Over the whole rollout, which every rank has: per rank or micro-batch the result would depend on the split.
        advantages = whiten(advantages, real)
    answers = [experience.answers[place] for place in kept.tolist()]
    figures = RolloutStatistics(
        answers=len(kept),
        left_out=left_out,
        empty=sum(answer.stopped and len(answer.response) == 1 for answer in answers),
        reward=float(scores.double().mean()),
        reward_std=float(scores.double().std(correction=0)),
        kl=float(answer_kl(logprobs, reference, real).double().mean()),
        distance=float(answer_distance(logprobs, reference, real).double().mean()),
        response_length=float(lengths.double().mean()),
        ended=sum(answer.stopped for answer in answers) / len(answers),
        explained_variance=explained_variance(values, returns, real),
    )
    episodes = tuple(
        Episode(
            place,
            prompts.ids[place],
            answer.response,
            prompts.records[place],
            # Copies: a slice would keep the rollout's whole table in memory.
            *(table[row, : len(answer.response)].clone() for table in (logprobs, values, advantages, returns)),
        )
        for row, (place, answer) in enumerate(zip(kept.tolist(), answers, strict=True))
    )
    return episodes, figures


def pulled_back(prompts: Prompts, experience: Experience, terms: Terms, *, kl: float) -> tuple[Episode, ...]:
    """Make episodes with the KL penalty only, for a policy too far from its reference. The critic's values include
    scores, so they are not used, and the critic learns nothing: advantages are future penalties, returns its own
    values."""
    silent = replace(
        experience,
        scores=experience.scores.where(~experience.scores.isfinite(), 0.0),
        values=torch.zeros_like(experience.values),
    )
    episodes, _ = to_episodes(prompts, silent, replace(terms, whiten=False), kl=kl)
    return tuple(
        replace(one, values=own, returns=own)
        for one in episodes
        for own in (experience.values[one.place, : len(one.response)].clone(),)
    )


def _pass_through(
    answers: Sequence[Rollout], how: Scoring, temperature: float
) -> Iterator[tuple[int, list[Sequence[float]]]]:
    """Yield, for this rank's share, (index, (log-probabilities of actor and reference, values, the reward model's
    score)). The actor's are empty if the engine's are used."""
    with how.models.inference():
        for batch in for_rank(answered_batches(answers, Layout(how.pad_id, how.micro)), how.rank, how.world):
            with how.kernels(), how.forward():
                rows = batch.to(how.device)
                places, targets = supervised_places(rows)
                parts = [how.models.reference_logits_at]
                if not how.take_drawn:
                    parts.insert(0, how.models.actor_logits_at)
                tables = [chosen_logprobs(log_distribution(part(rows, places), temperature), targets) for part in parts]
                tables.append(at_places(how.models.values(rows, places), rows).float())
                scores = [] if how.score else how.models.scores(rows).tolist()
            lists = [[]] * how.take_drawn + [table.tolist() for table in tables]
            for row, (place, parts) in enumerate(by_answer(batch, answers, lists)):
                yield place, [*parts, scores[row : row + 1]]
