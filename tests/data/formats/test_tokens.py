"""Records of token ids: read as transformers' Trainer and TRL mark them, and trained as they are."""

from __future__ import annotations

import json

import numpy as np
import pytest

from helpers.faults import raises_fault
from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.data.formats import RowFault
from surefoot.data.formats.conversation import Tokens
from surefoot.data.formats.registry import recognize
from surefoot.data.formats.supervised import read_tokens
from surefoot.data.prepare import prepare_data
from surefoot.data.sources.records import Row
from surefoot.data.sources.resolve import SourceSpec
from surefoot.methods.examples import prepare_examples
from surefoot.models.load import load_tokenizer
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.make_plan import make_plan


def prepared(folder, rows, format="auto", **changes):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(tiny_llama(folder / "model"))
    settings = {
        "template": "tokenizer",
        "template_asked": False,
        "tokenizer": tokenizer,
        "bos_id": tokenizer.bos_token_id,
        "pad_id": len(tokenizer) - 1,
        "stop_ids": [tokenizer.eos_token_id],
        "max_length": 16,
        "max_samples": None,
        "train_on": "responses",
        "seed": 0,
        "cache": folder / "cache",
        **changes,
    }
    return prepare_data([SourceSpec(str(path), format=format)], None, **settings)


@pytest.mark.parametrize(
    ("record", "ids", "learned"),
    [
        ({"input_ids": [5, 6, 7]}, (5, 6, 7), (True, True, True)),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, (5, 6, 7), (False, False, True)),
        # padding on either side
        ({"input_ids": [0, 5, 6], "labels": [-100, 5, 6], "attention_mask": [0, 1, 1]}, (5, 6), (True, True)),
        ({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}, (5, 6), (True, True)),
        # TRL's masks
        ({"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}, (5, 6, 7), (False, True, True)),
        ({"input_ids": [5, 6, 7], "assistant_masks": [0, 0, 1]}, (5, 6, 7), (False, False, True)),
    ],
)
def test_ids_and_labels_are_those_of_the_record(record, ids, learned):
    assert read_tokens(record).tokens == Tokens(ids, learned)


@pytest.mark.parametrize(
    "record",
    [
        {"input_ids": [5, 6, 7], "labels": [-100, 5, 6]},  # shifted by one: the trainer shifts
        {"input_ids": [5, 6, 7], "labels": [-100, 6]},
        {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]},
        {"input_ids": [5, 6, 7], "labels": [5, -100, -100]},  # nothing predicts the first token
        {"input_ids": "5 6 7"},
        {"input_ids": [5.0, 6.0]},
    ],
)
def test_a_record_that_cannot_be_meant_is_refused(record):
    with pytest.raises(RowFault):
        read_tokens(record)


def test_they_are_recognized_before_texts_that_they_were_made_from():
    row = Row(1, 1, {"messages": [{"role": "user", "content": "Hi"}], "input_ids": [5, 6]})
    assert recognize(row, "d.json")[0] == "tokens"


def test_what_is_trained_is_what_the_record_has(tmp_path):
    """No BOS is added, no stop token is asked for, and a long row loses its end."""
    found = prepared(
        tmp_path, [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]}, {"input_ids": list(range(5, 45))}]
    )
    one, two = found.train[0], found.train[1]
    assert one.ids.tolist() == [5, 6, 7, 8]
    assert one.supervised.tolist() == [False, True, False, True]
    assert two.ids.tolist() == list(range(5, 21))
    assert np.flatnonzero(~two.supervised).tolist() == [0]
    assert (found.audit.truncated, found.audit.bos, found.audit.source.layout) == (1, None, "tokens")


def test_twin_a_text_without_bos_is_refused_where_it_is_not_given_as_ids(tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.data.tokenize.cache.GIVEN", 0)
    with raises_fault("SF-DATA-TEMPLATE", f"{tmp_path / 'rows.jsonl'}:1"):
        prepared(tmp_path, [{"input_ids": [5, 6, 7, 8]}])


def test_an_id_that_the_tokenizer_lacks_is_named(tmp_path):
    with raises_fault("SF-DATA-ROW", f"{tmp_path / 'rows.jsonl'}:2", 99999) as caught:
        prepared(tmp_path, [{"input_ids": [5, 6]}, {"input_ids": [5, 99999]}])
    assert "data.template" not in caught.value.faults[0].fix  # no template would help


PAIR = {
    "chosen": {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    "rejected": {"input_ids": [5, 8], "labels": [-100, 8]},
}
JUDGED = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7], "label": False}


@pytest.mark.parametrize("asked", ["auto", "token-pairs"])
def test_pairs_are_two_records_of_token_ids(tmp_path, asked):
    found = prepared(tmp_path, [PAIR], kind="pairs", format=asked)
    assert [one.ids.tolist() for one in found.train] == [[5, 6, 7], [5, 8]]
    assert [one.supervised.tolist() for one in found.train] == [[False, True, True], [False, True]]
    assert found.train.good.tolist() == [True, False]
    assert found.audit.source.layout == "token-pairs"


def test_a_pair_that_loses_an_answer_is_left_out_whole(tmp_path):
    long = {"input_ids": list(range(5, 25)), "labels": [*[-100] * 18, 23, 24]}
    found = prepared(tmp_path, [{**PAIR, "rejected": long}, PAIR], kind="pairs")
    assert [one.ids.tolist() for one in found.train] == [[5, 6, 7], [5, 8]]
    kept = prepared(tmp_path, [{**PAIR, "rejected": long}, PAIR], kind="pairs", max_length=20)  # twin
    assert len(kept.train) == 4


def test_of_pairs_supervised_training_learns_the_better_one(tmp_path):
    found = prepared(tmp_path, [PAIR], format="token-pairs")
    assert [one.ids.tolist() for one in found.train] == [[5, 6, 7]]


@pytest.mark.parametrize("good", [True, False])
def test_a_judged_answer_is_a_record_of_token_ids_with_a_label(tmp_path, good):
    found = prepared(tmp_path, [{**JUDGED, "label": good}], kind="judged")
    assert found.train[0].supervised.tolist() == [False, False, True]
    assert found.train.good.tolist() == [good]
    assert found.audit.source.layout == "token-judged"


UNMARKED = {
    "dpo": {**PAIR, "rejected": {"input_ids": [5, 8]}},
    "kto": {"input_ids": [5, 6, 7], "label": True},
    "reward": {"chosen": {"input_ids": [5, 6, 7]}, "rejected": {"input_ids": [5, 8]}},
}


@pytest.mark.parametrize("marks", [{}, {"labels": [5, 6, 7]}, {"completion_mask": [1, 1, 1]}])
def test_a_judged_row_that_marks_no_prompt_is_named(tmp_path, marks):
    rows = [JUDGED, {"input_ids": [5, 6, 7], **marks, "label": True}]
    with raises_fault("SF-DATA-ROW", f"{tmp_path / 'rows.jsonl'}:2"):
        prepared(tmp_path, rows, kind="judged", after_prompt=True)
    marked = [JUDGED, {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "label": True}]  # twin
    assert len(prepared(tmp_path, marked, kind="judged", after_prompt=True).train) == 2


@pytest.mark.parametrize("stage", UNMARKED)
def test_a_prompt_is_marked_where_answers_are_compared_and_not_where_rows_are_scored(tmp_path, monkeypatch, stage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(UNMARKED[stage]) + "\n")
    base = tiny_llama(tmp_path / "base")
    data = {"train": str(tmp_path / "rows.jsonl"), "max_length": 16}
    config = run_config(model=str(base), stage=stage, data=data)
    tokens = make_plan(config, measure=False).tokenizer
    tokenizer = planned_tokenizer(base, tokens)
    if stage == "reward":
        assert len(prepare_examples(config, tokens, tokenizer).train) == 2
        return
    with raises_fault("SF-DATA-ROW", f"{tmp_path / 'rows.jsonl'}:1"):
        prepare_examples(config, tokens, tokenizer)


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        ("pairs", {**PAIR, "rejected": {"input_ids": [5, 8], "labels": [-100, -100]}}),
        ("pairs", {**PAIR, "rejected": "a text"}),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}),
        ("judged", {**JUDGED, "label": "yes"}),
        ("judged", {"prompt": "a", "completion": "b", "label": True}),
    ],
)
def test_one_that_cannot_be_meant_is_named(tmp_path, kind, second):
    with raises_fault("SF-DATA-ROW", f"{tmp_path / 'rows.jsonl'}:2"):
        prepared(tmp_path, [PAIR if kind == "pairs" else JUDGED, second], kind=kind)
