"""The proofs fail for every way to get BOS, PAD or a stop token wrong, and the counts are right."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace

import numpy as np
import pytest

from helpers.faults import gives
from helpers.token_files import with_columns
from surefoot.data import audit as audit_module
from surefoot.data import checks as proofs
from surefoot.data.audit import Audit, audit_dataset, cautions
from surefoot.data.checks import copies_in, item_fingerprints
from surefoot.data.tokenize import dataset as dataset_module
from surefoot.data.tokenize.dataset import (
    CONTROL_TEXT,
    GIVEN,
    GOOD,
    PROMPT_CUT,
    PROMPT_LOST,
    STOP_LOST,
    TRUNCATED,
    SourceFacts,
    TokenizedDataset,
    of_files,
)
from surefoot.data.tokenize.segments import Template, TextEncoder
from surefoot.system.errors import InputError

SOURCE = SourceFacts("d.json", "0" * 64, "1" * 64, "alpaca", "it has an output", "llama3", 9, 9)


@pytest.fixture
def encoder(llama3_pad) -> TextEncoder:
    return TextEncoder(llama3_pad)


@pytest.fixture
def ids(llama3_pad) -> dict[str, int]:
    names = {
        "bos": "<|begin_of_text|>",
        "eos": "<|end_of_text|>",
        "eot": "<|eot_id|>",
        "pad": "<|finetune_right_pad_id|>",
    }
    return {name: llama3_pad.convert_tokens_to_ids(text) for name, text in names.items()}


def dataset(*examples: tuple[list[int], str], flags: tuple[int, ...] = (), lost: int = 0) -> TokenizedDataset:
    """Each example: its ids, and a mask such as "..##". lost: whole answers, of the last one."""
    lengths = [len(numbers) for numbers, _ in examples]
    rows = [(place + 1, 10 * (place + 1), flag, 0) for place, flag in enumerate(flags or (0,) * len(examples))]
    rows[-1] = (*rows[-1][:3], lost)
    file = with_columns(
        "d.json",
        ids=np.concatenate([numbers for numbers, _ in examples]).astype(np.uint16),
        mask=np.array([letter == "#" for _, mask in examples for letter in mask]),
        offsets=np.cumsum([0, *lengths]),
        rows=np.array(rows),
    )
    return of_files([file])


def audited(data: TokenizedDataset, encoder: TextEncoder, ids: dict[str, int], **how) -> Audit:
    asked = {"bos_id": ids["bos"], "pad_id": ids["pad"], "train_on": "responses"}
    template = {name: how.pop(name) for name in ("learns_behind_stop", "last_stops", "stop_ids") if name in how}
    template = Template("t", "", segments=tuple, jinja=str, **{"stop_ids": (ids["eos"], ids["eot"])} | template)
    return audit_dataset(data, how.pop("source", SOURCE), encoder, template, **asked | how)


def fault_of(data: TokenizedDataset, encoder: TextEncoder, ids: dict[str, int], **how) -> tuple[str, str, bool]:
    """Code and place, and whether the message names the row of that line."""
    with pytest.raises(InputError) as caught:
        audited(data, encoder, ids, **how)
    (fault,) = caught.value.faults
    return fault.code, fault.where, gives(fault.what, int(fault.where.rpartition(":")[2]) // 10)


def test_a_sound_data_set(encoder, ids):
    data = dataset(
        ([ids["bos"], 5, 6, 7, ids["eot"]], "...##"),
        ([ids["bos"], 0, 0, ids["eos"], 9, 8, ids["eot"], 3], "..##.##."),
        flags=(0, CONTROL_TEXT),
    )
    audit = audited(data, encoder, ids)
    assert (audit.kept, audit.answers, audit.ended) == (2, 3, 3)
    assert (audit.tokens, audit.supervised_tokens, audit.supervised_share) == (13, 6, 6 / 13)
    assert (audit.shortest, audit.median, audit.p95, audit.longest) == (5, 6, 8, 8)
    assert (audit.bos, audit.pad) == ("<|begin_of_text|>", "<|finetune_right_pad_id|>")
    assert audit.stops == ("<|end_of_text|>", "<|eot_id|>")
    assert audit.control_text == 1
    assert audit.duplicates == audit.overlap == audit.truncated == 0


# What can be wrong with BOS: the id list of the second example, its mask, and whether BOS is planned.
WRONG_BOS = {
    "missing": ("5 6 eot", ".##", True),
    "twice": ("bos bos 6 eot", "..##", True),
    "again later": ("bos 6 bos eot", ".###", True),
    "not first": ("6 bos 7 eot", "..##", True),
    "not wanted": ("bos 6 7 eot", "..##", False),
    "not wanted later": ("5 bos 7 eot", "..##", False),
}


def numbers(text: str, ids: dict[str, int]) -> list[int]:
    return [ids[word] if word in ids else int(word) for word in text.split()]


@pytest.mark.parametrize("case", WRONG_BOS)
def test_bos_must_stand_exactly_where_it_was_planned(encoder, ids, case):
    text, mask, planned = WRONG_BOS[case]
    good = "bos 5 eot" if planned else "5 6 eot"
    data = dataset((numbers(good, ids), "..#"), (numbers(text, ids), mask))
    found = fault_of(data, encoder, ids, bos_id=ids["bos"] if planned else None)
    assert found == ("SF-DATA-TEMPLATE", "d.json:20", True)


def test_a_bos_that_also_ends_answers_is_looked_for_at_the_start_only(encoder, ids):
    both = {"bos_id": ids["eos"], "stop_ids": (ids["eos"],)}
    audited(dataset((numbers("eos 5 6 eos", ids), "..##")), encoder, ids, **both)
    assert fault_of(dataset((numbers("eos eos 6 eos", ids), "..##")), encoder, ids, **both)[0] == "SF-DATA-TEMPLATE"
    assert fault_of(dataset((numbers("5 6 eos", ids), ".##")), encoder, ids, **both)[0] == "SF-DATA-TEMPLATE"
    encoder.bos_id = ids["eos"]
    none = {**both, "bos_id": None}
    audited(dataset((numbers("5 eos", ids), ".#"), (numbers("5 6 eos", ids), ".##")), encoder, ids, **none)
    assert fault_of(dataset((numbers("eos 5 6 eos", ids), "..##")), encoder, ids, **none)[0] == "SF-DATA-TEMPLATE"


def test_a_tokenizer_without_bos_has_none_to_prove(encoder, ids):
    encoder.bos_id = None
    assert audited(dataset((numbers("bos 5 eot", ids), ".##")), encoder, ids, bos_id=None).bos is None


def test_pad_that_a_text_contains_is_refused(encoder, ids):
    """Id 0 is "!" in Llama 3: the classic `pad_token_id = 0`."""
    data = dataset((numbers("bos 5 eot", ids), ".##"), (numbers("bos 0 7 eot", ids), "..##"))
    assert fault_of(data, encoder, ids, pad_id=0) == ("SF-LABEL-PAD", "d.json:20", True)
    assert audited(data, encoder, ids, pad_id=4).pad == "row 4"


def test_records_of_ids_may_contain_pad(encoder, ids):
    """They are trained as they are; padding is masked by position."""
    rows = ((numbers("bos 5 eot", ids), ".##"), (numbers("bos 7 0", ids), "..#"))
    audited(dataset(*rows, flags=(0, GIVEN)), encoder, ids, pad_id=0)
    text = dataset(*rows, flags=(GIVEN, 0))
    assert fault_of(text, encoder, ids, pad_id=0) == ("SF-LABEL-PAD", "d.json:20", True)


def test_words_behind_a_stop_are_learned_only_where_the_template_says_so(encoder, ids):
    data = dataset((numbers("bos 5 eot 7", ids), "..##"), (numbers("bos 6 8 eot 7 5 eot", ids), ".####.#"))
    assert audited(data, encoder, ids, learns_behind_stop=True).ended == 3
    assert fault_of(data, encoder, ids)[0] == "SF-LABEL-STOP"
    none = dataset((numbers("bos 5 eot 7 3 8", ids), ".##.##"))
    assert fault_of(none, encoder, ids, learns_behind_stop=True)[0] == "SF-LABEL-STOP"


def test_of_several_answers_the_last_alone_may_stop_where_the_template_says_so(encoder, ids):
    data = dataset((numbers("bos 5 7 3 6 eot", ids), ".#..##"), (numbers("bos 6 eot", ids), ".##"))
    assert audited(data, encoder, ids, last_stops=True).ended == 2
    assert fault_of(data, encoder, ids)[0] == "SF-LABEL-STOP"
    none = dataset((numbers("bos 5 7 3 6", ids), ".#..#"), (numbers("bos 6 eot", ids), ".##"))
    assert fault_of(none, encoder, ids, last_stops=True)[0] == "SF-LABEL-STOP"
    assert audited(dataset((numbers("bos 5", ids), "..")), encoder, ids, last_stops=True).ended == 0


def test_pad_may_be_a_stop_token(encoder, ids):
    audit = audited(dataset((numbers("bos 5 eot", ids), ".##")), encoder, ids, pad_id=ids["eot"])
    assert (audit.answers, audit.ended, audit.pad) == (1, 1, "<|eot_id|>")


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("bos 5 6 eot", "..#."),  # the stop token carries no label
        ("bos 5 6 7", "..##"),  # there is none
        ("bos 5 eot 7", "..##"),  # it is not the last label
        ("bos 5 6 eot 7 8 eot", ".##.#.#"),  # only the second answer ends
    ],
)
def test_an_answer_without_a_learned_stop_is_refused(encoder, ids, text, mask):
    good = (numbers("bos 5 eot", ids), ".##")
    assert fault_of(dataset(good, (numbers(text, ids), mask)), encoder, ids) == ("SF-LABEL-STOP", "d.json:20", True)


def test_a_cut_answer_may_lack_its_stop_and_is_counted(encoder, ids):
    data = dataset(
        (numbers("bos 5 6 7", ids), ".###"), (numbers("bos 5 eot", ids), ".##"), flags=(TRUNCATED | STOP_LOST, 0)
    )
    audit = audited(data, encoder, ids)
    assert (audit.truncated, audit.stop_lost, audit.answers, audit.ended) == (1, 1, 2, 1)


def test_learning_everything_needs_a_stop_somewhere(encoder, ids):
    mode = {"train_on": "everything"}
    audited(dataset((numbers("bos 5 eot 7", ids), ".###")), encoder, ids, **mode)
    assert fault_of(dataset((numbers("bos 5 6 7", ids), ".###")), encoder, ids, **mode)[0] == "SF-LABEL-STOP"


@pytest.mark.parametrize("train_on", ["completion", "everything"])
def test_an_answer_that_lost_its_end_does_not_end_with_an_earlier_stop(encoder, ids, train_on, monkeypatch):
    """Of two examples with two answers each, one was cut within its second answer."""
    cut, whole = (numbers("bos 5 eot 7", ids), ".###"), (numbers("bos 5 eot 7 eot", ids), ".####")
    data = dataset(cut, whole, flags=(TRUNCATED | STOP_LOST, 0))
    audit = audited(data, encoder, ids, train_on=train_on)
    assert (audit.answers, audit.stop_lost, audit.ended) == (2, 1, 1)
    monkeypatch.setattr(proofs, "STOP_LOST", 0)  # twin: by the stop tokens alone
    assert audited(data, encoder, ids, train_on=train_on).ended == 2


def test_parts_do_not_change_what_is_found(encoder, ids, monkeypatch):
    good = (numbers("bos 5 eot", ids), ".##")
    data = dataset(*[good] * 7, (numbers("bos 5 6", ids), ".##"))
    for chunk in (1, 2, 3, 100):
        monkeypatch.setattr(dataset_module, "CHUNK", chunk)
        assert fault_of(data, encoder, ids)[1:] == ("d.json:80", True)
        assert audited(data.subset(range(7)), encoder, ids).answers == 7


def copies(*parts, kind="answers"):
    return [found.tolist() for found in copies_in([item_fingerprints(part, kind) for part in parts])]


def test_copies_and_overlap_are_counted(encoder, ids):
    one, other = (numbers("bos 5 eot", ids), ".##"), (numbers("bos 6 eot", ids), ".##")
    relabeled = (one[0], "..#")
    train, later = dataset(one, other, one, one), dataset(one, relabeled, other)
    assert copies(train, later) == [[2, 3], [0, 2]]
    audit = audited(later, encoder, ids, duplicates=np.array([0, 2]), overlap=np.array([1]))
    assert (audit.overlap, audit.duplicates) == (1, 2)


def test_copies_of_pairs_are_of_both_answers_and_of_judged_ones_with_the_verdict(ids):
    one, other = (numbers("bos 5 eot", ids), ".##"), (numbers("bos 6 eot", ids), ".##")
    pairs = dataset(one, other, other, one, one, other)
    assert copies(pairs, kind="pairs") == [[2]]
    judged = dataset(one, one, one, flags=(0, GOOD, GOOD))
    assert copies(judged, kind="judged") == [[2]]
    assert copies(judged) == [[1, 2]]


def test_samples_are_first_middle_last_with_their_labels(encoder, ids):
    good = (numbers("bos 5 6 eot", ids), "..##")
    samples = audited(dataset(*[good] * 5), encoder, ids).samples
    assert [(sample.number, sample.line, sample.tokens) for sample in samples] == [(1, 10, 4), (3, 30, 4), (5, 50, 4)]
    parts = [(part.text, part.supervised, part.control) for part in samples[0].parts]
    assert parts == [
        ("<|begin_of_text|>", False, True),
        ("&", False, False),
        ("'", True, False),
        ("<|eot_id|>", True, True),
    ]
    assert len(audited(dataset(good), encoder, ids).samples) == 1


def test_cautions_give_numbers_and_places(encoder, ids):
    good = (numbers("bos 5 6 eot", ids), "..##")
    flags = (TRUNCATED | PROMPT_CUT | PROMPT_LOST, TRUNCATED | PROMPT_CUT | STOP_LOST, CONTROL_TEXT, 0)
    data = dataset(good, good, good, (numbers("bos 7 eot", ids), "..#"), flags=flags, lost=2)
    facts = SourceFacts(
        "d.json",
        "",
        "",
        "alpaca",
        "",
        "llama3",
        9,
        9,
        tuple(("d.json", n, 10 * n) for n in range(5, 10)),
        ("answer",),
        ("a note",),
        (("d.json", 1, 10),),
        "{{name}}",
    )
    audit = audited(data, encoder, ids, source=facts, duplicates=np.array([1, 2]), overlap=np.arange(4))
    note, unread, unfilled, *others = cautions(audit)
    assert (note, unread.split()[-1]) == ("a note", "answer")
    assert "{{name}}" in unfilled
    assert [[int(number) for number in re.findall(r"\d+", one)] for one in (unfilled, *others)] == [
        [1, 1, 10],  # records with a placeholder, then row and line
        [5, 5, 50, 6, 60, 7, 70],  # rows that are dropped
        [2, 4, 2, 1, 1, 2],  # truncated of all: the user's text cut and lost, the end of an answer, whole answers
        [1],  # that spell out control tokens
        [2, 2, 20, 3, 30],  # copies
        [4, 4, 1, 10, 2, 20, 3, 30],  # of evaluation in the training data
    ]
    assert [one.endswith("…)") for one in others] == [True, False, False, False, True]


@pytest.mark.parametrize(("flag", "lost"), [(PROMPT_CUT, 0), (PROMPT_CUT | PROMPT_LOST, 0), (STOP_LOST, 2), (0, 0)])
def test_only_what_was_lost_is_named(encoder, ids, flag, lost):
    good, kept = (numbers("bos 5 6 eot", ids), "..##"), (numbers("bos 5 eot", ids), ".##")
    (said,) = cautions(audited(dataset(kept, good, flags=(0, TRUNCATED | flag), lost=lost), encoder, ids))
    assert said.count("; ") == flag.bit_count() + bool(lost)
    assert "0" not in re.findall(r"\d+", said)


def test_rows_of_a_file_of_one_line_are_told_apart(encoder, ids):
    good = (numbers("bos 5 6 eot", ids), "..##")
    audit = audited(dataset(good), encoder, ids)
    facts = replace(audit.source, dropped=(("d.json", 97, 1), ("d.json", 98, 1)))
    (said,) = cautions(replace(audit, source=facts))
    assert re.findall(r"\d+", said) == ["2", "97", "1", "98", "1"]


def test_twin_a_list_that_is_cut_without_a_word(encoder, ids, monkeypatch):
    monkeypatch.setattr(audit_module, "_MOST_PLACES", 3)
    with pytest.raises(AssertionError):
        test_cautions_give_numbers_and_places(encoder, ids)


def test_a_copied_pair_is_named_by_its_record(encoder, ids):
    one, other = (numbers("bos 5 eot", ids), ".##"), (numbers("bos 6 eot", ids), ".##")
    audit = audited(dataset(one, other, other, one), encoder, ids, kind="pairs", duplicates=np.array([1]))
    assert audit.duplicate_places == (("d.json", 3, 30),)  # of the rows that this data set has, the second pair's first


def test_few_cuts_are_no_caution(encoder, ids):
    good = (numbers("bos 5 6 eot", ids), "..##")
    data = dataset(
        *[(numbers(f"bos {n} eot", ids), "..#") for n in range(1, 100)], good, flags=(TRUNCATED,) + (0,) * 99
    )
    assert cautions(audited(data, encoder, ids)) == ()


# --- the checks above have teeth: without a proof its wrong data passes -----------------------------------------------


@pytest.mark.parametrize("case", WRONG_BOS)
def test_twin_without_the_bos_proof(encoder, ids, monkeypatch, case):
    monkeypatch.setattr(proofs, "_check_bos", lambda *arguments: None)
    text, mask, planned = WRONG_BOS[case]
    audited(dataset((numbers(text, ids), mask)), encoder, ids, bos_id=ids["bos"] if planned else None)


def test_twin_without_the_pad_proof(encoder, ids, monkeypatch):
    monkeypatch.setattr(proofs, "_check_pad", lambda *arguments: None)
    audited(dataset((numbers("bos 0 7 eot", ids), "..##")), encoder, ids, pad_id=0)


def test_twin_without_the_stop_proof(encoder, ids, monkeypatch):
    monkeypatch.setattr(proofs, "_check_ends", lambda *arguments: np.ones(1, dtype=bool))
    audited(dataset((numbers("bos 5 6 eot", ids), "..#.")), encoder, ids)


LENGTHS = [(109, 484), (7,), (1, 2, 3), tuple(range(1, 101)), tuple(range(1, 21)), (5, 5, 5, 9)]


def check_that_95_of_100_are_up_to_p95(lengths):
    found = audit_module._lengths(dataset(*[([1] * length, "#" * length) for length in lengths]))
    within = sum(length <= found["p95"] for length in lengths) / len(lengths)
    below = sum(length < found["p95"] for length in lengths) / len(lengths)
    assert below < 0.95 <= within
    assert found["median"] == round(statistics.median(lengths))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_95_of_100_examples_are_up_to_p95(lengths):
    check_that_95_of_100_are_up_to_p95(lengths)


def test_twin_the_length_below_is_not_long_enough(monkeypatch):
    percentile = np.percentile
    monkeypatch.setattr(np, "percentile", lambda values, q, method: percentile(values, q, method="lower"))
    with pytest.raises(AssertionError):
        check_that_95_of_100_are_up_to_p95((109, 484))


def _refused_by_hand(examples: list[tuple[list[int], str]], ids: dict[str, int]) -> int | None:
    """The first row that BOS, PAD or the end of an answer speaks against, looked at token by token."""
    for number, (tokens, _) in enumerate(examples, start=1):
        if [place for place, token in enumerate(tokens) if token == ids["bos"]] != [0]:
            return number
    for number, (tokens, _) in enumerate(examples, start=1):
        if ids["pad"] in tokens:
            return number
    for number, (tokens, mask) in enumerate(examples, start=1):
        for token, here, there in zip(tokens, mask, f"{mask[1:]}.", strict=True):
            if here == "#" and there == "." and token not in (ids["eos"], ids["eot"]):
                return number
    return None


def test_what_is_found_at_once_is_what_is_found_token_by_token(encoder, ids):
    """Of random examples, in which each fault is rare enough that often nothing is wrong."""
    draws = np.random.default_rng(0)
    faults = 0
    for _ in range(150):
        examples = []
        for _ in range(draws.integers(1, 7)):
            words = draws.choice(["5", "6", "eot"], draws.integers(1, 6))
            odd = draws.choice(["", "bos", "pad"], p=[0.94, 0.03, 0.03])
            text = " ".join(["bos" if draws.random() < 0.97 else "5", *words, *([odd] if odd else [])])
            mask = "." + "".join("#" if word == "eot" or draws.random() < 0.05 else "." for word in text.split()[1:])
            examples.append((numbers(text, ids), mask))
        row = _refused_by_hand(examples, ids)
        faults += row is not None
        if row is None:
            found = audited(dataset(*examples), encoder, ids)
            assert found.supervised_tokens == sum(mask.count("#") for _, mask in examples)
        else:
            assert fault_of(dataset(*examples), encoder, ids)[1:] == (f"d.json:{10 * row}", True)
    assert 40 < faults < 140
