"""Pairs, judged answers and prompts from a file to batches: one prompt for both answers, no pair torn, all counted."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from helpers.faults import raises_fault
from helpers.prepared import prepared
from surefoot.data.audit import cautions
from surefoot.data.batching import loader
from surefoot.data.batching.batch import IGNORE
from surefoot.data.batching.loader import Layout, judged_batches, pair_batches, prompt_batches
from surefoot.data.batching.order import part_of, step_examples
from surefoot.data.sources.resolve import SourceSpec
from surefoot.data.tokenize import encode as encode_kinds

SEED = 3


def pair(number, asked=4, better=3, worse=5):
    return {"prompt": f"{number} " + "why " * asked, "chosen": "so " * better + "b", "rejected": "no " * worse + "w"}


def verdict(number):
    return {"prompt": f"why {number}?", "completion": "so " * (number % 5 + 1), "label": number % 3 == 0}


@pytest.fixture
def run(llama3, tmp_path):
    def call(values, kind, evaluation=None, **how):
        path = tmp_path / "records.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        spec = SourceSpec(str(path), share=how.pop("share", None), format=how.pop("layout", "auto"))
        stops = (llama3.eos_token_id, llama3.convert_tokens_to_ids("<|eot_id|>"))
        asked = {"max_length": 200, "stop_ids": stops, "seed": SEED, "kind": kind, **how}
        return prepared([spec], llama3, tmp_path / "cache", evaluation, **asked)

    return call


def prompts_of(data, pair_number):
    found = []
    for row in (2 * pair_number, 2 * pair_number + 1):
        example = data[row]
        found.append(example.ids[: int(np.argmax(example.supervised))].tolist())
    return found


def check_pairs(data):
    """Every pair: one record, better first, one prompt, an answer to the end of the row."""
    assert data.good.tolist() == [True, False] * (len(data) // 2)
    for number in range(len(data) // 2):
        better, worse = data[2 * number], data[2 * number + 1]
        assert better.number == worse.number
        first, second = prompts_of(data, number)
        assert first == second
        for one in (better, worse):
            assert one.supervised[len(first) :].all()


def test_a_pair_is_two_neighbors_with_one_prompt(run):
    prepared = run([pair(n) for n in range(10)], "pairs")
    assert prepared.rows_per_item == 2
    assert (len(prepared.train), prepared.mixture.epoch_size) == (20, 10)
    check_pairs(prepared.train)
    assert prepared.audit.kept == 10


@pytest.mark.parametrize("max_length", [26, 30, 36, 50])
@pytest.mark.parametrize("sizes", [(60, 3, 5), (60, 40, 2), (3, 60, 9), (40, 40, 40)])
def test_both_rows_lose_the_same_of_the_prompt(run, max_length, sizes):
    data = run([pair(1, *sizes), pair(2)], "pairs", max_length=max_length).train
    check_pairs(data)
    assert max(data.lengths) <= max_length
    whole = run([pair(1, *sizes), pair(2)], "pairs", max_length=500).train
    own, full = prompts_of(data, 0)[0], prompts_of(whole, 0)[0]
    fixed = len(prompts_of(run([pair(1) | {"prompt": "x"}], "pairs").train, 0)[0]) - 1  # the template's own words
    answers = [data.length(row) - len(own) for row in (0, 1)]
    if answers != [whole.length(row) - len(full) for row in (0, 1)]:  # only after the prompt has given way
        assert len(own) - fixed <= (max_length - fixed) // 4
        assert len(own) + max(answers) == max_length
    for row in (0, 1):  # what is left of an answer is its beginning
        left, right = data[row].ids[len(own) :], whole[row].ids[len(full) :]
        assert left.tolist() == right[: len(left)].tolist()


def test_twin_cut_one_by_one_the_prompts_differ(run, monkeypatch):
    def alone(better, worse, prompt, template, how):
        kept = [(row, encode_kinds._choose_tokens(row, how)) for row in (better, worse)]
        return [encode_kinds.cut_to(row, own, template.stop_ids) for row, own in kept]

    monkeypatch.setattr(encode_kinds, "cut_pair", alone)
    data = run([pair(1, 60, 3, 12)], "pairs", max_length=40).train
    with pytest.raises(AssertionError):
        check_pairs(data)


def test_the_caution_tells_pairs_from_answers(run):
    """Two of three are cut: of one the longer answer loses its end, of the other both."""
    audit = run([pair(1, 60, 3, 60), pair(2, 60, 60, 60), pair(3, 0, 1, 1)], "pairs", max_length=40).audit
    assert re.findall(r"\d+", cautions(audit)[0]) == ["2", "3", "2", "3", "6"]


def test_twin_prompts_that_lose_their_beginning_uncounted(run, monkeypatch):
    honest = encode_kinds._choose_tokens
    monkeypatch.setattr(encode_kinds, "_choose_tokens", lambda *given: honest(*given)._replace(prompt_cut=False))
    with pytest.raises(AssertionError):
        test_the_caution_tells_pairs_from_answers(run)


def test_a_pair_that_keeps_no_answer_is_dropped_as_one(run):
    prepared = run([pair(1, 60, 3, 5), pair(2, 0, 1, 1)], "pairs", max_length=22)
    check_pairs(prepared.train)
    assert len(prepared.train) % 2 == 0
    assert len(prepared.train) // 2 + len(prepared.audit.source.dropped) == 2


def test_no_part_of_the_data_tears_a_pair(run):
    prepared = run([pair(n) for n in range(11)], "pairs", 3, max_samples=9)
    check_pairs(prepared.train)
    check_pairs(prepared.eval)
    assert (len(prepared.train), len(prepared.eval), prepared.mixture.epoch_size) == (12, 6, 6)


def test_the_audit_counts_pairs(run):
    values = [pair(n, better=2, worse=6) for n in range(24)] + [pair(30) | {"rejected": pair(30)["chosen"]}] + [pair(1)]
    values.append(pair(40) | {"rejected": ""})
    audit = run([*values, values[0]], "pairs").audit
    facts = audit.pairs
    assert (audit.kept, audit.duplicates, facts.identical, facts.at_start, facts.empty) == (28, 1, 1, 0, 1)
    assert facts.worse_longer == 26
    numbers = [re.findall(r"\d+%?", said) for said in cautions(audit)]
    assert ["1", "28"] in [one[:2] for one in numbers]
    assert any("93%" in one for one in numbers)
    assert [one.verdict for one in audit.samples] == ["better", "worse"] * 3


def test_pair_batches_hold_the_step_whatever_their_size(run):
    data = run([pair(n, better=n % 4, worse=7 - n % 3) for n in range(9)], "pairs").train
    _, step = step_examples(SEED, 0, run([pair(n) for n in range(9)], "pairs").mixture, 7)
    whole = pair_batches(data, step, Layout(0, most=7))[0]
    assert whole.weight == 7
    better = int((whole.rows.targets[:7] != IGNORE).sum())
    for micro in (1, 2, 3):
        batches = pair_batches(data, step, Layout(0, most=micro))
        assert sum(one.weight for one in batches) == 7
        assert {one.answer_share for one in batches} == {7 / better}
        assert {one.row_share for one in batches} == {7 / (sum(whole.rows.lengths[:7]) - 7)}
        assert sorted(name for one in batches for name in one.examples) == sorted(whole.examples)
        longest = [max(one.rows.lengths) for one in batches]
        assert longest == sorted(longest, reverse=True)
    for place, common in enumerate(whole.common):
        first, second = whole.rows.input_ids[place].tolist(), whole.rows.input_ids[7 + place].tolist()
        assert first[:common] == second[:common]
        assert first[common] != second[common]


def test_judged_batches_give_each_prompt_the_next_answer(run):
    data = run([verdict(n) for n in range(8)], "judged").train
    assert data.good.tolist() == [n % 3 == 0 for n in range(8)]
    step = [5, 1, 6, 2, 5]

    def rows(batches, name):
        return {
            (number, tuple(ids[:length]))
            for one in batches
            for batch in [getattr(one, name)]
            for number, ids, length in zip(batch.examples, batch.input_ids.tolist(), batch.lengths, strict=True)
        }

    whole = judged_batches(data, step, Layout(0, most=5), others=True)
    for micro in (1, 2):
        split = judged_batches(data, step, Layout(0, most=micro), others=True)
        assert rows(split, "rows") == rows(whole, "rows")
        assert rows(split, "others") == rows(whole, "others")
        assert {(one.good_share, one.bad_share) for one in split} == {(5, 5 / 4)}
    following = dict(rows(whole, "others"))
    prompt, answer = (int(np.argmax(data[index].supervised)) for index in (1, 6))
    assert following[2] == (*data[1].ids[:prompt].tolist(), *data[6].ids[answer:].tolist())
    assert judged_batches(data, step, Layout(0, most=5), others=False)[0].others is None
    assert (
        judged_batches(data, [5], Layout(0, most=5), others=True)[0].others is None
    )  # nobody else's answer is its own


def test_twin_answers_of_the_micro_batch_would_depend_on_its_size(run, monkeypatch):
    data = run([verdict(n) for n in range(8)], "judged").train

    def names(micro):
        found = judged_batches(data, [5, 1, 6, 2], Layout(0, most=micro), others=True)
        others = [one.others for one in found if one.others is not None]
        return sorted(tuple(ids) for one in others for ids in one.input_ids.tolist())

    monkeypatch.setattr(loader, "_with_answer", lambda prompt, other, most: prompt)
    assert names(1) != sorted(map(tuple, names(2)))


def test_prompts_end_where_the_model_writes_and_long_ones_are_named(run):
    values = [pair(n) for n in range(5)] + [pair(9, asked=80)]
    prepared = run(values, "prompts", max_length=60)
    data = prepared.train
    assert len(data) == 5
    assert not any(data.supervised(index) for index in range(5))
    assert [(place[1], place[2]) for place in prepared.audit.source.dropped] == [(6, 1)]
    both = run(values, "pairs", max_length=500).train
    assert [data[n].ids.tolist() for n in range(5)] == [prompts_of(both, n)[0] for n in range(5)]
    batches = prompt_batches(data, range(5), Layout(0, most=2))
    assert [one.weight for one in batches] == [2, 2, 1]
    assert all((one.rows.targets == IGNORE).all() for one in batches)
    found = {name: ids for one in batches for name, ids in zip(one.examples, one.prompts, strict=True)}
    assert found[3] == tuple(data[2].ids.tolist())


def test_nothing_but_long_prompts_is_refused(run):
    with raises_fault("SF-DATA-LENGTH", "data.max_length"):
        run([pair(9, asked=80)], "prompts", max_length=20)


def test_the_cache_knows_the_kind(run):
    values = [pair(n) for n in range(4)]
    assert len(run(values, "pairs").train) == 8
    assert len(run(values, "prompts").train) == 4
    assert len(run(values, "answers", layout="preference").train) == 4


@pytest.mark.parametrize("count", [3, 27, 270])
def test_shares_are_disjoint_and_together_everything(count):
    for of in ([2, 4, 4], [1, 1], [0.5, 0.25, 0.25]):
        parts = [part_of(count, of, take, SEED) for take in range(1, len(of) + 1)]
        assert sorted(np.concatenate(parts)) == list(range(count))
        assert [len(one) for one in parts] != [count]
    assert not np.array_equal(part_of(count, [1, 1], 1, SEED), part_of(count, [1, 1], 1, SEED + 1)) or count == 3


def test_phases_share_no_record_though_they_learn_different_things(run):
    values = [pair(n, asked=80 if n % 4 == 0 else 3) for n in range(20)]
    phases = [
        run(values, kind, share=((2, 4, 4), take, False), layout=layout, max_length=70)
        for take, kind, layout in ((1, "answers", "preference"), (2, "pairs", "auto"), (3, "prompts", "auto"))
    ]
    seen = [{one.train.row(index)[1] for index in range(len(one.train))} for one in phases]
    seen = [names | {place[1] for place in one.audit.source.dropped} for names, one in zip(seen, phases, strict=True)]
    assert [len(names) for names in seen] == [4, 8, 8]
    assert set.union(*seen) == set(range(1, 21))
    assert re.findall(r"\d+", phases[1].audit.source.part) == ["2", "2", "4", "4", "8", "20"]


def test_twin_parts_of_several_shuffles_overlap():
    parts = [part_of(270, [2, 4, 4], take, SEED + take) for take in (1, 2, 3)]
    assert sorted(np.concatenate(parts)) != list(range(270))


def test_a_pair_is_left_out_whole(run):
    values = [pair(0), pair(1), pair(0), pair(2, worse=1), pair(3, better=1)]
    assert {one.number for one in map(run(values, "pairs", unique=True).train.__getitem__, range(8))} == {1, 2, 4, 5}
    shortest = int(run(values, "pairs").train.lengths.reshape(-1, 2).min(axis=1)[3:].max()) + 1
    data = run(values, "pairs", min_length=shortest).train
    check_pairs(data)
    assert [data[2 * number].number for number in range(len(data) // 2)] == [1, 2, 3]
