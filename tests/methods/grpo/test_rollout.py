"""What becomes of a rollout's answers before they are learned from: penalties, and groups that are drawn anew."""

from __future__ import annotations

import torch

from surefoot.methods.grpo.rollout import GroupRollout, flat_groups, with_groups, with_penalty
from surefoot.models.rollout import Rollout


def rollout(scores, lengths) -> GroupRollout:
    """Of prompts (0,), (1,) ...; a token is its answer's place."""
    width = max(lengths)
    answers = tuple(Rollout((place,), (place,) * size, True, None) for place, size in enumerate(lengths))
    found = torch.tensor(scores, dtype=torch.float64)
    drawn = torch.arange(len(scores)).float()[:, None].expand(-1, width).clone()
    return GroupRollout(answers, {"own": found}, {"raised": 1}, found, found, torch.tensor(lengths), drawn)


def test_a_penalty_changes_what_is_learned_and_not_the_scores():
    found = with_penalty(rollout([1.0, 1.0, 0.0], [5, 9, 10]), limit=10, buffer=4)
    assert found.learned.tolist() == [1.0, 0.25, -1.0]
    assert found.scores.tolist() == [1.0, 1.0, 0.0]
    assert found.parts["overlong"].tolist() == [0.0, -0.75, -1.0]
    assert not flat_groups(found, 3)[0]


def test_other_answers_take_the_place_of_a_group_with_all_their_numbers():
    found = with_groups(rollout([1, 1, 0, 1, 2, 2], [1, 2, 3, 1, 1, 2]), [0, 2], rollout([7, 8, 9, 9], [4, 1, 1, 5]), 2)
    assert found.scores.tolist() == [7, 8, 0, 1, 9, 9]
    assert found.learned.tolist() == found.scores.tolist() == found.parts["own"].tolist()
    assert [one.response for one in found.answers] == [(0,) * 4, (1,), (2,) * 3, (3,), (2,), (3,) * 5]
    assert found.lengths.tolist() == [len(one.response) for one in found.answers]
    assert found.drawn[:, 0].tolist() == [0, 1, 2, 3, 2, 3]
    assert found.outcomes == {"raised": 2}
    assert flat_groups(found, 2).tolist() == [False, False, True]


def test_an_answer_without_a_token_gives_a_group_no_spread():
    found = rollout([0.0, 1.0], [1, 1])
    assert not flat_groups(found, 2)[0]
    assert flat_groups(GroupRollout(**{**vars(found), "lengths": torch.tensor([0, 1])}), 2)[0]
