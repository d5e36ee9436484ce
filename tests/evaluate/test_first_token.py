"""Whether measured texts begin with BOS is told, and can be asked for: then a base and a model of bos.scale compare."""

from __future__ import annotations

import json

import pytest

from helpers import zoo
from helpers.tiny_models import tiny_llama
from surefoot.evaluate import capture_pictures
from surefoot.evaluate import capturing as stage
from surefoot.evaluate.capture_folder import open_capture
from surefoot.evaluate.capturing import capture
from surefoot.evaluate.measure_norms import measure_model_norms
from surefoot.system.errors import InputError

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
    with pytest.raises(InputError, match="only there the text begins with token 1"):
        capture(str(phi3), tmp_path / "three", bos=False, **against)


def test_twin_a_flag_that_is_not_heard_compares_nothing(phi3, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "with_bos", lambda opened, asked: opened)
    with pytest.raises(AssertionError):
        test_a_text_without_bos_is_told_and_begins_with_it_where_asked(phi3, tmp_path)


def test_norms_begin_as_asked_too(phi3, tmp_path):
    plain, begun = (measure_model_norms(str(phi3), out=tmp_path / str(bos), bos=bos, texts=3) for bos in (None, True))
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
    with pytest.raises(InputError, match="--bos"):
        capture(str(zoo.qwen2(tmp_path / "qwen")), tmp_path / "out", bos=True)
