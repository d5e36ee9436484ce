"""What `make grpo-vllm` asks of second turns: they go on from the very ids that were drawn."""

from __future__ import annotations

import pytest

from grpo_vllm_turns import second_turns

STOP = 9
FIRST = ({"token_ids": [1, 2]}, (3, 4, STOP))


@pytest.mark.parametrize(
    ("prompt", "given"),
    [
        ([1, 2, 3, 4, STOP, 5], [(5,)]),
        ([1, 2, 34, STOP, 5], None),  # twin: the answer was made from text again
        ([1, 2], []),
    ],
)
def test_a_second_turn_begins_with_the_first(prompt, given):
    assert second_turns([FIRST, ({"token_ids": prompt}, (6, STOP))], STOP) == given
