"""Rollouts: from answers to episodes by hand, the checks before the first update, and ranks that share the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.faults import raises_fault
from surefoot.methods.ppo.checks import DRAWN_MEAN, DRAWN_MOST, START_TOLERANCE, check_start, drawn_suffice
from surefoot.methods.ppo.rollout import Experience, Terms, pulled_back, to_episodes
from surefoot.methods.rollouts import Prompts, _from_row, _to_row
from surefoot.models.rollout import Rollout
from surefoot.system.errors import EnvironmentFault

TERMS = Terms(reward_clip=5.0, gamma=1.0, lam=1.0, whiten=False)
PROMPTS = Prompts([(1, 2), (3,), (4, 5, 6)], [10, 11, 12], range(3), [()] * 3)
ANSWERS = (
    Rollout((1, 2), (7, 8, 2), True, (-1.0, -2.0, -0.5)),
    Rollout((3,), (2,), True, (-0.25,)),
    Rollout((4, 5, 6), (9, 9), False, (-1.0, -1.0)),
)


def table(*rows: list[float]) -> torch.Tensor:
    return torch.tensor([[*row, *[0.0] * (3 - len(row))] for row in rows])


def experience(scores=(2.0, -9.0, 1.0)) -> Experience:
    logprobs = table([-1.0, -2.0, -0.5], [-0.25], [-1.0, -1.0])
    return Experience(
        ANSWERS,
        torch.tensor(scores),
        torch.tensor([3, 1, 2]),
        drawn=logprobs.clone(),
        logprobs=logprobs,
        reference=table([-1.5, -1.0, -0.5], [-0.75], [-1.0, -1.0]),
        values=table([0.5, 1.0, -0.5], [0.25], [0.0, 0.0]),
    )


def test_episodes_worked_out_by_hand():
    episodes, figures = to_episodes(PROMPTS, experience(), TERMS, kl=0.1)
    # Rewards of the first: -0.05, 0.1, 2; with lambda 1 the returns are what is still to come.
    assert episodes[0].returns.tolist() == pytest.approx([2.05, 2.1, 2.0])
    assert episodes[0].advantages.tolist() == pytest.approx([1.55, 1.1, 2.5])
    assert episodes[1].returns.tolist() == pytest.approx([-5.05])  # the score is clipped to -5
    assert [len(one.response) for one in episodes] == [3, 1, 2]
    assert [one.number for one in episodes] == [10, 11, 12]
    assert figures.reward == pytest.approx(-2.0)  # of the scores as they came
    assert figures.kl == pytest.approx((-0.5 + 0.5 + 0.0) / 3)
    assert (figures.answers, figures.empty, figures.ended) == (3, 1, pytest.approx(2 / 3))
    assert figures.response_length == 2.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_answer_without_a_finite_score_is_left_out_and_changes_no_other(bad):
    episodes, figures = to_episodes(PROMPTS, experience((2.0, bad, 1.0)), replace(TERMS, whiten=True), kl=0.1)
    assert [one.place for one in episodes] == [0, 2]
    assert (figures.answers, figures.left_out) == (2, 1)
    assert all(one.advantages.isfinite().all() for one in episodes)
    assert figures.reward == pytest.approx(1.5)


def test_none_left_is_no_episode_and_no_error():
    episodes, figures = to_episodes(PROMPTS, experience((float("nan"),) * 3), TERMS, kl=0.1)
    assert episodes == ()
    assert (figures.answers, figures.left_out) == (0, 3)


def test_an_answer_without_tokens_is_left_out():
    found = replace(
        experience(), answers=(*ANSWERS[:2], replace(ANSWERS[2], response=())), lengths=torch.tensor([3, 1, 0])
    )
    assert [one.place for one in to_episodes(PROMPTS, found, TERMS, kl=0.1)[0]] == [0, 1]


def test_pulled_back_is_the_penalty_alone_and_the_critic_stays_as_it_is():
    scored, _ = to_episodes(PROMPTS, experience(), TERMS, kl=0.1)
    found = pulled_back(PROMPTS, experience((50.0, float("nan"), -50.0)), replace(TERMS, whiten=True), kl=0.1)
    assert [one.place for one in found] == [0, 2]
    # Rewards of the first: -0.05, 0.1, 0, whatever it scored and whatever the critic expected; see above with scores.
    assert found[0].advantages.tolist() == pytest.approx([0.05, 0.1, 0.0])
    assert found[1].advantages.tolist() == [0.0, 0.0]
    assert found[0].returns.tolist() == found[0].values.tolist() == [0.5, 1.0, -0.5]
    assert scored[0].advantages.tolist() != pytest.approx([0.05, 0.1, 0.0])  # the twin


SILENT = (replace(ANSWERS[0], logprobs=None), replace(ANSWERS[2], response=(), logprobs=None))


@pytest.mark.parametrize("answer", [*ANSWERS, *SILENT])
def test_answers_travel_between_ranks_as_they_are(answer):
    assert _from_row(answer.prompt, _to_row(answer, answer.prompt)) == answer


def at_the_start() -> Experience:
    found = experience()
    return replace(found, reference=found.logprobs.clone())


def checked(found: Experience, compute: str) -> tuple[float, float | None]:
    return check_start("ppo", found.real, found.logprobs, found.reference, found.drawn, compute)


def suffices(found: Experience, compute: str) -> bool:
    return drawn_suffice(found.real, found.logprobs, found.drawn, compute)


def test_a_policy_that_is_its_reference_and_its_engine_passes():
    assert checked(at_the_start(), "fp32") == (0.0, 1.0)
    unknown = replace(at_the_start(), drawn=torch.full((3, 3), torch.nan))
    assert checked(unknown, "fp32") == (0.0, None)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("table", ["reference", "drawn"])
def test_what_differs_by_more_than_rounding_is_refused_with_its_numbers(table, compute):
    found = at_the_start()
    near, far = (replace(found, **{table: getattr(found, table) + by * START_TOLERANCE[compute]}) for by in (0.9, 1.2))
    checked(near, compute)
    with raises_fault("SF-PLAN-BROKEN", "ppo", f"{START_TOLERANCE[compute]:g}"):
        checked(far, compute)


def test_what_is_not_a_number_is_refused():
    with pytest.raises(EnvironmentFault):
        checked(replace(at_the_start(), logprobs=torch.full((3, 3), torch.nan)), "fp32")


def test_drawn_log_probabilities_stand_for_the_actors_where_they_differ_by_rounding():
    found = at_the_start()

    def apart(*differences: float) -> bool:
        return suffices(replace(found, drawn=found.logprobs + table(list(differences[:3]), [0.0], [0.0])), "fp32")

    assert apart(0.0, 0.0, 0.0)
    assert apart(DRAWN_MEAN, -DRAWN_MEAN, DRAWN_MEAN)
    assert not apart(3 * DRAWN_MEAN, -3 * DRAWN_MEAN, 3 * DRAWN_MEAN)  # on average, whatever the sign
    long = replace(found, lengths=torch.tensor([3, 3, 3]), logprobs=torch.zeros(3, 3), drawn=torch.zeros(3, 3))
    assert suffices(long, "fp32")
    assert not suffices(long, "bf16")
    long.drawn[1, 1] = 1.1 * DRAWN_MOST  # one token alone
    assert not suffices(long, "fp32")
    assert not apart(float("nan"), 0.0, 0.0)


def test_an_engine_that_cannot_tell_is_never_taken_at_its_word():
    assert not suffices(replace(at_the_start(), drawn=torch.full((3, 3), torch.nan)), "fp32")
    assert not suffices(replace(at_the_start(), lengths=torch.tensor([0, 0, 0])), "fp32")
