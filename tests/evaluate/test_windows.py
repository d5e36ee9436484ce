"""What of a long text a model with few positions is given: tables by hand, and properties for any length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.evaluate.windows import last_tokens, rolling_windows

BOS = 99


@pytest.mark.parametrize(
    ("ids", "room", "bos_id", "kept"),
    [
        ([BOS, 1, 2, 3], 4, BOS, [BOS, 1, 2, 3]),
        ([BOS, 1, 2, 3], 3, BOS, [BOS, 2, 3]),
        ([BOS, 1, 2, 3], 1, BOS, [BOS]),
        ([BOS, 1, 2, 3], 3, None, [1, 2, 3]),
        ([1, 2, 3], 2, BOS, [2, 3]),
        ([1, BOS, 3], 2, BOS, [BOS, 3]),
        ([], 2, BOS, []),
    ],
)
def test_bos_stays_in_front_of_the_last_tokens(ids, room, bos_id, kept):
    assert last_tokens(ids, room, bos_id) == kept


def windows(count: int, positions: int, bos_id: int | None) -> list[tuple[list[int], list[int]]]:
    text = list(range(count))
    return list(rolling_windows([*([] if bos_id is None else [bos_id]), *text], positions, prefix=77, bos_id=bos_id))


def test_windows_by_hand():
    assert windows(7, 4, BOS) == [
        ([BOS], [0, 1, 2, 3]),
        ([BOS, 3], [4, 5, 6]),
    ]
    assert windows(9, 4, BOS)[1:] == [([BOS, 3], [4, 5, 6]), ([BOS, 5, 6], [7, 8])]
    assert windows(10, 4, None) == [  # the table in the docstring of the harness' own function
        ([77], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert windows(0, 4, BOS) == []
    assert list(rolling_windows([5, 6], 4, prefix=77, bos_id=BOS)) == [([BOS], [5, 6])]


@given(st.integers(1, 60), st.integers(2, 12), st.booleans())
def test_each_token_is_predicted_once_from_as_many_as_fit(count, positions, with_bos):
    found = windows(count, positions, BOS if with_bos else None)
    assert [token for _, part in found for token in part] == list(range(count))
    for number, (context, part) in enumerate(found):
        given_in = [*context, *part[:-1]]
        assert len(given_in) == positions or (number == 0 and count < positions)
        behind = given_in[1:] if with_bos or number == 0 else given_in
        assert behind == list(range(part[-1] - len(behind), part[-1]))
        if with_bos:
            assert [place for place, token in enumerate(given_in) if token == BOS] == [0]
