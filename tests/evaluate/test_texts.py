"""Whether measured texts begin with BOS is told, and can be asked for: then a base and a model of bos.scale compare.
What of a long text a model with few positions is given: tables by hand, and properties for any length.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import zoo
from helpers.faults import raises_fault
from helpers.tiny_models import tiny_llama
from surefoot.evaluate import capture as stage
from surefoot.evaluate import capture_comparison as capture_pictures
from surefoot.evaluate.capture import capture
from surefoot.evaluate.capture_folder import open_capture
from surefoot.evaluate.norms import measure_model_norms
from surefoot.evaluate.texts import last_tokens, rolling_windows

LENGTH = 12


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    monkeypatch.setattr(capture_pictures, "_SHEETS", 0)


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    """Its tokenizer has a BOS and begins no text with it."""
    return zoo.phi3(tmp_path_factory.mktemp("models") / "phi3")


def told(cautions) -> int:
    return sum("--bos" in one for one in cautions)


def test_a_text_without_bos_is_told_and_begins_with_it_where_asked(phi3, tmp_path):
    without = capture(str(phi3), tmp_path / "without", seq_len=LENGTH)
    begun = capture(str(phi3), tmp_path / "with", seq_len=LENGTH, bos=True)
    assert begun.index["ids"] == [1, *without.index["ids"][:-1]]
    assert [told(one.cautions) for one in (without, begun)] == [1, 0]


def test_so_begun_the_base_compares_with_a_model_that_begins_so(phi3, tmp_path):
    capture(str(phi3), tmp_path / "scaled", seq_len=LENGTH, bos=True)
    against = {"against": tmp_path / "scaled"}
    compared = capture(str(phi3), tmp_path / "one", bos=True, **against)
    assert compared.comparison is not None
    assert all(one.equal for one in compared.comparison.differences)
    assert told(capture(str(phi3), tmp_path / "two", **against).cautions) == 0  # it has the other one's ids
    with raises_fault("SF-EVALUATE", against["against"], remedy=["--bos"]):
        capture(str(phi3), tmp_path / "three", bos=False, **against)


def test_twin_a_flag_that_is_not_heard_compares_nothing(phi3, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "with_bos", lambda opened, asked: opened)
    with pytest.raises(AssertionError):
        test_a_text_without_bos_is_told_and_begins_with_it_where_asked(phi3, tmp_path)


def test_norms_begin_as_asked_too(phi3, tmp_path):
    plain, begun = (
        measure_model_norms(str(phi3), out=tmp_path / str(bos), bos=bos, max_samples=3) for bos in (None, True)
    )
    assert begun.reports["model"].tokens == plain.reports["model"].tokens + 3
    assert [told(one.opened.cautions) for one in (plain, begun)] == [1, 0]
    asked = [json.loads((tmp_path / name / "norms.json").read_text())["asked"] for name in ("None", "True")]
    assert ["bos" in one for one in asked] == [False, True]


def test_a_tokenizer_that_begins_with_bos_needs_no_word(tmp_path):
    base = tiny_llama(tmp_path / "base")
    begun = capture(str(base), tmp_path / "with", seq_len=LENGTH)
    without = capture(str(base), tmp_path / "without", seq_len=LENGTH, bos=False)
    assert begun.index["ids"][1:] == without.index["ids"][:-1]
    assert told((*begun.cautions, *without.cautions)) == 0
    assert open_capture(tmp_path / "without").ids == without.index["ids"]


def test_a_model_without_bos_is_one_line(tmp_path):
    with raises_fault("SF-BOS", "--bos"):
        capture(str(zoo.qwen2(tmp_path / "qwen")), tmp_path / "out", bos=True)


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
