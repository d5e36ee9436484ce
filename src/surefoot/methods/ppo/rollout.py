"""One rollout: prompts are answered, their answers go through reward model, reference, actor and critic,
and this experience becomes episodes.

Every rank answers the prompts of its own places; then all ranks know all answers, share out their scoring, and know
all numbers. So each of them computes the same rewards, advantages and holds, and any of them could learn from any
episode. Log-probabilities are computed anew by the code that learns from them: a ratio would else begin with its
difference from the engine that drew the answers. Where the two were found to differ by rounding alone
(`surefoot.methods.ppo.checks.drawn_suffice`) those of the engine are taken, and the actor's pass over the answers is
spared.

Shapes: E episodes, R response tokens of the longest, n of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.data.batching.loader import for_rank
from surefoot.data.batching.rollouts import Episode
from surefoot.methods.losses.ppo import (
    advantages_and_returns,
    answer_distance,
    answer_kl,
    at_places,
    chosen_logprobs,
    explained_variance,
    log_distribution,
    response_mask,
    token_rewards,
    whiten,
)
from surefoot.methods.losses.sft import supervised_places
from surefoot.methods.ppo.holds import Figures
from surefoot.methods.rollouts import Prompts, Write, answered_batches, answers_of_all, as_table
from surefoot.models.ppo_models import PPOModels
from surefoot.models.rollout import Rollout
from surefoot.training.ranks import gather_rows
from surefoot.training.step import Context

Score = Callable[[Sequence[Rollout]], Sequence[float]]


@dataclass(frozen=True)
class Terms:
    """The constants of rewards and advantages; see the config's keys of the same names."""

    reward_clip: float | None
    gamma: float
    lam: float
    whiten: bool


@dataclass(frozen=True)
class Scoring:
    """With what answers are scored: the models, and how they run.

    score: None where the models have a reward model.
    take_drawn: the engine's own log-probabilities stand for the actor's.
    rank, world, totals: as the engine has them.
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
    """All tables [E, R], with 0 beyond an answer.

    scores: [E], NaN where there is none.
    lengths: [E].
    drawn: the log-probabilities of the engine that wrote the answers, NaN where it cannot tell.
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
    """Every rank must ask."""
    count = len(prompts.ids)
    places = range(how.rank, count, how.world)
    written = write([prompts.ids[place] for place in places], places)
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
) -> tuple[tuple[Episode, ...], Figures]:
    """Rewards, advantages and returns of a rollout's answers, and the figures of the rollout.

    kl: coefficient of the penalty. Answers without a token or a finite score are left out.
    """
    kept = (experience.scores.isfinite() & (experience.lengths > 0)).nonzero().squeeze(1)
    left_out = len(experience.answers) - len(kept)
    if not len(kept):
        nothing = float("nan")
        return (), Figures(0, left_out, 0, nothing, nothing, nothing, nothing, nothing, nothing)
    real, scores, lengths = experience.real[kept], experience.scores[kept], experience.lengths[kept]
    logprobs, reference, values = experience.logprobs[kept], experience.reference[kept], experience.values[kept]
    rewards = token_rewards(logprobs, reference, scores, real, kl=kl, clip=terms.reward_clip)
    advantages, returns = advantages_and_returns(rewards, values, real, gamma=terms.gamma, lam=terms.lam)
    if terms.whiten:
        advantages = whiten(advantages, real)
    answers = [experience.answers[place] for place in kept.tolist()]
    figures = Figures(
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
            *(table[row, : len(answer.response)].clone() for table in (logprobs, values, advantages, returns)),
        )
        for row, (place, answer) in enumerate(zip(kept.tolist(), answers, strict=True))
    )
    return episodes, figures


def pulled_back(prompts: Prompts, experience: Experience, terms: Terms, *, kl: float) -> tuple[Episode, ...]:
    """The same answers with the KL penalty alone, for a policy too far from its reference. The critic expects scores as
    well, so it says nothing here and learns nothing: advantages are the penalties to come, returns its own values."""
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
) -> Iterator[tuple[int, tuple[list[float], ...]]]:
    """Of this rank's share, by place: log-probabilities of actor and reference, values, the reward model's score.
    Nothing of the actor where the drawn ones are taken."""
    with how.models.inference():
        for batch in for_rank(answered_batches(answers, how.micro, how.pad_id), how.rank, how.world):
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
            start = 0
            for row, place in enumerate(batch.examples):  # none in a blank one
                assert isinstance(place, int)
                end = start + len(answers[place].response)
                yield place, (*(numbers[start:end] for numbers in lists), scores[row : row + 1])
                start = end
