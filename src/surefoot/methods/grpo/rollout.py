"""One rollout of GRPO: each prompt is answered several times, and the answers are scored and compared within groups.

Every rank generates its own answers; then all ranks get all answers and divide the passes of reward models. Each rank
scores its own answers; then all ranks get all scores, divide the passes that compute log-probabilities, and share these
too, so that all compute the same advantages.

Log-probabilities are recomputed by the training code, unless the first rollout showed that the engine's differ by
rounding only (`surefoot.methods.ppo.checks.drawn_suffice`).

Shapes: P groups of G answers, E = P G answers group by group, R drawn tokens of the answer with most of them. Tokens
that an environment gave (`surefoot.methods.environments`) are in no table: nothing is learned from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from surefoot.data.batching.groups import GroupEpisode, kept_index
from surefoot.data.batching.loader import Layout, for_rank
from surefoot.data.formats.conversation import Picture
from surefoot.data.tokenize.picture_processor import PictureProcessor
from surefoot.method_facts.losses import GroupLossFacts
from surefoot.methods.environments.multi_turn import ENVIRONMENT, counted
from surefoot.methods.grpo.memory import RolloutStatistics
from surefoot.methods.losses.grpo import group_advantages, overlong_penalty, penalized, without_spread
from surefoot.methods.losses.logprobs import drawn_logprobs
from surefoot.methods.losses.mismatch import Correction, mismatch
from surefoot.methods.losses.ppo import answer_kl, response_mask
from surefoot.methods.reference import ReferenceModel
from surefoot.methods.rewards.answers import LOST
from surefoot.methods.rewards.terms import Graded, Reward
from surefoot.methods.rollouts import Prompts, Totals, answered_batches, as_table, by_answer
from surefoot.models.modes import inference_mode
from surefoot.models.rollout import Rollout
from surefoot.training.ranks import gather_rows
from surefoot.training.step import Context

OVERLONG = "overlong"  # the penalty's name among the rewards


@dataclass(frozen=True)
class Passes:
    """How answers go through models.

    layout: of a pass.
    processor: makes the pixels of their prompts' pictures; None: they have none.
    """

    layout: Layout
    kernels: Context
    forward: Context
    device: torch.device
    processor: PictureProcessor | None = None
    rank: int = 0
    world: int = 1
    totals: Totals = list


@dataclass(frozen=True)
class GroupRollout:
    """Answers of one rollout with their scores.

    parts: reward's label -> [E], NaN where it has no score for the answer.
    outcomes: number of lost rewards by outcome.
    scores: [E], weighted sums of the rewards, NaN if there is none.
    learned: [E], values used for learning: the scores, or their replacement.
    lengths: [E], drawn tokens.
    drawn: [E, R], log-probabilities of the generating engine, NaN if it gives none.
    talked: sums over the answers of what happened between turns, by name; {} without an environment.
    """

    answers: tuple[Rollout, ...]
    parts: dict[str, torch.Tensor]
    outcomes: dict[str, int]
    scores: torch.Tensor
    learned: torch.Tensor
    lengths: torch.Tensor
    drawn: torch.Tensor
    talked: Mapping[str, float] = field(default_factory=dict)

    @property
    def real(self) -> torch.Tensor:
        return response_mask(self.lengths, self.drawn.shape[1])


def scored_rollout(
    answers: tuple[Rollout, ...],
    graded: Sequence[Graded],
    places: Sequence[int],
    rewards: Sequence[Reward],
    totals: Totals,
    talked: Mapping[str, float],
) -> GroupRollout:
    """Gather the scores of all ranks; this rank's are at `places` of the rollout. Collective.

    talked: as in `GroupRollout`, of this rank's answers.
    """
    labels = [one.label for one in rewards]
    own = {
        place: [one.total, *(one.parts[label].value for label in labels)]
        for place, one in zip(places, graded, strict=True)
    }
    table = torch.tensor(gather_rows(own, len(answers), totals), dtype=torch.float64).reshape(len(answers), -1)
    lost = Counter(part.outcome for one in graded for label, part in one.parts.items() if label != ENVIRONMENT)
    counts = totals([float(lost[name]) for name in LOST])
    width = max(1, *(one.drawn for one in answers))
    return GroupRollout(
        answers,
        {label: table[:, 1 + column] for column, label in enumerate(labels)},
        {name: int(count) for name, count in zip(LOST, counts, strict=True)},
        table[:, 0],
        table[:, 0],
        torch.tensor([one.drawn for one in answers]),
        as_table([one.logprobs or [torch.nan] * one.drawn for one in answers], width),
        dict(zip(talked, totals(list(talked.values())), strict=True)),
    )


def with_penalty(rollout: GroupRollout, limit: int, buffer: int) -> GroupRollout:
    """Subtract the penalty of long answers, see `overlong_penalty`. One that any limit ended is as long as `limit`."""
    sizes = [len(one.response) if one.stopped else limit for one in rollout.answers]
    penalty = overlong_penalty(torch.tensor(sizes), limit, buffer)
    return replace(rollout, parts={**rollout.parts, OVERLONG: penalty}, learned=rollout.learned + penalty)


def with_groups(rollout: GroupRollout, groups: Sequence[int], others: GroupRollout, group: int) -> GroupRollout:
    """Replace the answers of these groups.

    groups: group numbers, in the order of `others`.
    group: answers per group.
    """
    places = [number * group + member for number in groups for member in range(group)]
    answers = list(rollout.answers)
    for place, one in zip(places, others.answers, strict=True):
        answers[place] = one
    width = max(rollout.drawn.shape[1], others.drawn.shape[1])

    def both(own: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        # Not in place: the first draw's own figures are computed from `rollout` later.
        found = own.clone()
        found[places] = new
        return found

    return GroupRollout(
        tuple(answers),
        {label: both(values, others.parts[label]) for label, values in rollout.parts.items()},
        {name: count + others.outcomes[name] for name, count in rollout.outcomes.items()},
        both(rollout.scores, others.scores),
        both(rollout.learned, others.learned),
        both(rollout.lengths, others.lengths),
        both(*(nn.functional.pad(one.drawn, (0, width - one.drawn.shape[1])) for one in (rollout, others))),
        {name: count + others.talked[name] for name, count in rollout.talked.items()},
    )


def flat_groups(rollout: GroupRollout, group: int) -> torch.Tensor:
    """[P] bool, True for groups whose answers all have the same score."""
    return without_spread(rollout.learned.where(rollout.lengths > 0, torch.nan).reshape(-1, group))


def compute_logprobs(
    rollout: GroupRollout,
    pictures: Sequence[tuple[Picture, ...]],
    how: Passes,
    temperature: float,
    policy: nn.Module | None,
    reference: ReferenceModel | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probabilities of policy and reference, [E, R] each, 0 after the end of an answer. Collective.

    pictures: of each answer's prompt.
    policy: None takes the engine's log-probabilities in place of the policy's.
    reference: None if the loss needs none.
    """
    asked = [] if policy is None else [ReferenceModel(policy)]
    asked += [] if reference is None else [reference]
    found = dict(_pass(rollout.answers, pictures, asked, how, temperature)) if asked else {}
    count, width = len(rollout.answers), rollout.drawn.shape[1]
    tables = [
        as_table(gather_rows({place: rows[part] for place, rows in found.items()}, count, how.totals), width)
        for part in range(len(asked))
    ]
    return rollout.drawn if policy is None else tables[0], None if reference is None else tables[-1]


def _pass(
    answers: Sequence[Rollout],
    pictures: Sequence[tuple[Picture, ...]],
    asked: Sequence[ReferenceModel],
    how: Passes,
    temperature: float,
) -> Iterator[tuple[int, list[Sequence[float]]]]:
    """Yield, for this rank's share, (index, log-probabilities by each model)."""
    batches = answered_batches(answers, how.layout, pictures, how.processor)
    for batch in for_rank(batches, how.rank, how.world):
        rows, tables = batch.to(how.device), []
        kept = kept_index([answers[int(place)].kept for place in batch.examples])
        kept = None if kept is None else kept.to(how.device)
        for one in asked:
            with inference_mode(one.model), one.use(), how.kernels(), how.forward():
                tables.append(drawn_logprobs(one.model, rows, temperature, kept).tokens.tolist())
        yield from by_answer(batch, answers, tables)


@dataclass(frozen=True)
class Terms:
    """Constants for making episodes from answers and scores.

    group: answers per group.
    kl: coefficient of a penalty in the score.
    correction: importance weights for the engine; None if its log-probabilities replace the training code's.
    """

    facts: GroupLossFacts
    group: int
    kl: float
    masks_overlong: bool
    correction: Correction | None = None


def to_episodes(
    prompts: Prompts,
    rollout: GroupRollout,
    logprobs: torch.Tensor,
    reference: torch.Tensor | None,
    terms: Terms,
    drawn: Sequence[GroupRollout],
) -> tuple[tuple[GroupEpisode, ...], RolloutStatistics]:
    """Make episodes with advantages, and the statistics of the rollout. Answers without a token or a score are left
    out.

    drawn: the answers to the rollout's own prompts, and those generated to replace groups without spread.
    """
    scores = rollout.learned.where(rollout.lengths > 0, torch.nan)
    if terms.kl > 0 and reference is not None:
        scores = penalized(scores, logprobs, reference, rollout.real, terms.kl)
    groups = scores.reshape(-1, terms.group)
    advantages = group_advantages(groups, terms.facts).flatten()
    known = scores.isfinite()
    metrics = mismatch(logprobs, rollout.drawn, rollout.real)
    weights = None
    if terms.correction is not None and metrics:
        weights, metrics["correction_cut"] = terms.correction.weights(logprobs - rollout.drawn, rollout.real)
    episodes = tuple(
        GroupEpisode(
            place // terms.group,
            place % terms.group,
            answer.prompt,
            answer.response,
            prompts.records[place],
            float(advantages[place]),
            answer.stopped or not terms.masks_overlong,
            logprobs[place, : answer.drawn].clone(),
            None if reference is None else reference[place, : answer.drawn].clone(),
            None if weights is None else weights[place, : answer.drawn].clone(),
            answer.kept,
            answer.pieces,
            prompts.where[place],
        )
        for place, answer in enumerate(rollout.answers)
        if known[place]
    )
    return episodes, _figures(rollout, logprobs, reference, terms, drawn, metrics)


def _figures(
    rollout: GroupRollout,
    logprobs: torch.Tensor,
    reference: torch.Tensor | None,
    terms: Terms,
    drawn: Sequence[GroupRollout],
    more: Mapping[str, float],
) -> RolloutStatistics:
    """Statistics of a rollout. Means are over the answers to its own prompts: answers generated to replace groups
    without spread would bias them towards the middle."""
    own, flat = drawn[0], flat_groups(rollout, terms.group)
    known = own.scores.isfinite()
    metrics = {
        "reward": _mean(own.scores),
        "reward_std": float(own.scores[known].std()) if known.sum() > 1 else float("nan"),
        "response_length": float(own.lengths.double().mean()),
        "ended": sum(one.stopped for one in own.answers) / len(own.answers),
        "groups_without_spread": float(flat.double().mean()),
    }
    if len(drawn) > 1:
        metrics["groups_redrawn"] = float(sum(len(one.answers) for one in drawn[1:]) // terms.group)
    if len(own.parts) > 1 or ENVIRONMENT in own.parts:
        metrics |= {f"reward_{label}": _mean(values) for label, values in own.parts.items()}
    metrics |= {f"rewards_{name}": float(count) for name, count in rollout.outcomes.items() if count}
    metrics |= counted(rollout.talked, sum(len(one.answers) for one in drawn))
    if reference is not None:
        metrics["kl"] = float(answer_kl(logprobs, reference, rollout.real).double().mean())
    metrics |= more
    return RolloutStatistics(
        answers=sum(len(one.answers) for one in drawn),
        left_out=sum(int((~one.scores.isfinite() | (one.lengths == 0)).sum()) for one in drawn),
        empty=sum(one.stopped and len(one.response) == 1 for draw in drawn for one in draw.answers),
        groups=len(flat),
        flat=bool(flat.all()) if terms.facts.baseline != "step" else bool(flat_groups(rollout, len(rollout.answers))),
        metrics={name: value for name, value in metrics.items() if value == value},
    )


def _mean(values: torch.Tensor) -> float:
    known = values[values.isfinite()]
    return float(known.mean()) if len(known) else float("nan")
