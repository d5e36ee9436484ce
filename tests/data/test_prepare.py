"""From files to data sets: once, then from the cache; a split only when asked; faults by file and key."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from helpers.faults import gives, raises_fault
from helpers.prepared import prepared
from surefoot.data import prepare
from surefoot.data.audit import cautions
from surefoot.data.formats import Conversation, Turn
from surefoot.data.formats import reader as reading
from surefoot.data.formats.registry import scan_format
from surefoot.data.prepare import PreparedData
from surefoot.data.sources.resolve import SourceSpec, first_row
from surefoot.data.tokenize import encode
from surefoot.data.tokenize import tokenize_file as tokenize
from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.data.tokenize.segments import TextEncoder, prompt_ids
from surefoot.system.errors import EnvironmentFault, InputError

ALPACA_DEMO = Path(__file__).parents[3] / "shared/data/instruct/alpaca_en_demo.json"


def records(count: int, start: int = 0) -> list[dict[str, str]]:
    return [
        {"instruction": f"Add {n} and 1!", "input": "", "output": f"It is {n + 1}."}
        for n in range(start, start + count)
    ]


def write(path: Path, values: list) -> Path:
    text = json.dumps(values) if path.suffix == ".json" else "".join(json.dumps(value) + "\n" for value in values)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    return write(tmp_path / "train.jsonl", records(20))


@pytest.fixture
def run(llama3, tmp_path):
    def call(train, evaluation=None, **how) -> PreparedData:
        asked = {"template_asked": False, "max_length": 200, "seed": 3, "cache": tmp_path / "cache", **how}
        layout = asked.pop("layout", "auto")
        specs = [train] if isinstance(train, str | Path | SourceSpec) else train
        evaluation = [evaluation] if isinstance(evaluation, str | Path | SourceSpec) else evaluation

        def spec(one) -> SourceSpec:
            return one if isinstance(one, SourceSpec) else SourceSpec(str(one), format=layout)

        if isinstance(evaluation, list):
            evaluation = [spec(one) for one in evaluation]
        tokenizer, cache = asked.pop("tokenizer", llama3), asked.pop("cache")
        return prepared([spec(one) for one in specs], tokenizer, cache, evaluation, **asked)

    return call


@pytest.fixture
def tokenized(monkeypatch) -> list[int]:
    """How many conversations were tokenized, call by call."""
    seen: list[int] = []
    honest = encode.encode

    def counted(conversations, *arguments, **how):
        seen.append(len(conversations))
        return honest(conversations, *arguments, **how)

    monkeypatch.setattr(tokenize, "encode", counted)
    return seen


def same(one, other) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.ids, b.ids) and np.array_equal(a.supervised, b.supervised) and a.number == b.number
        for a, b in zip(map(one.__getitem__, range(len(one))), map(other.__getitem__, range(len(other))), strict=True)
    )


def test_a_split_that_is_too_large_says_where_the_records_went(run, tmp_path):
    """Of long dialogues the words of the template alone fill the room."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    file = write(tmp_path / "some.jsonl", [{"messages": turns * count} for count in [1] * 10 + [40] * 2 + [1] * 8])
    with raises_fault("SF-DATA-SHARES", "data.eval"):
        run(file, 5000, train_on="last", max_length=2000)
    with raises_fault("SF-DATA-SHARES", "data.eval"):
        run(file, 5000, train_on="last", max_samples=15)


@pytest.mark.parametrize("more", [{"system": "Be kind."}, {"fill": {"NAME": "Ada"}}])
def test_a_sources_system_message_and_placeholders_are_as_if_the_file_had_them(run, tmp_path, more):
    def file(name, system, who):
        turns = [{"role": "user", "content": f"Are you {who}?"}, {"role": "assistant", "content": f"I am {who}."}]
        own = [{"role": "system", "content": "Mine."}, *turns]
        opening = [{"role": "system", "content": system}] if system else []
        return str(write(tmp_path / name, [{"messages": [*opening, *turns]}, {"messages": own}]))

    written = run(file("written.jsonl", more.get("system"), "Ada" if "fill" in more else "{{NAME}}")).train
    plain = file("plain.jsonl", None, "{{NAME}}")
    assert same(run(SourceSpec(plain, **more)).train, written)
    assert not same(run(plain).train, written)


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_system_messages_of_the_records_are_left_out(run, tmp_path, system):
    """With the source's own in their place, if it has one."""
    turns = [{"role": "user", "content": "Are you?"}, {"role": "assistant", "content": "I am."}]
    opening = [{"role": "system", "content": system}] if system else []
    wanted = str(write(tmp_path / "wanted.jsonl", [{"messages": [*opening, *turns]}] * 2))
    own = [{"messages": [{"role": "system", "content": "Mine."}, *turns]}, {"messages": turns}]
    file = str(write(tmp_path / "own.jsonl", own))
    assert same(run(SourceSpec(file, system=system, drop_system=True)).train, run(wanted).train)
    assert not same(run(SourceSpec(file, system=system)).train, run(wanted).train)  # twin


def test_a_constant_field_stands_in_every_record(run, tmp_path):
    answers = [{"output": f"It is {n}.", "n": n} for n in range(3)]
    whole = write(tmp_path / "whole.jsonl", [{**one, "instruction": "Which number?"} for one in answers])
    bare = str(write(tmp_path / "bare.jsonl", answers))
    found = run(SourceSpec(bare, format="alpaca", constant={"instruction": "Which number?"})).train
    assert same(found, run(SourceSpec(str(whole), format="alpaca")).train)
    other = SourceSpec(bare, format="alpaca", columns={"answer": "n"}, constant={"instruction": "Which one?"})
    assert not same(found, run(other).train)
    source, row = first_row(SourceSpec(bare, constant={"instruction": "Which number?"}))  # looked at before a run
    assert scan_format("answers", source.format, [row], bare).layout == "alpaca"
    with raises_fault("SF-DATA-FORMAT", f"{bare}:1"):
        scan_format("answers", "auto", [first_row(SourceSpec(bare))[1]], bare)


@pytest.mark.parametrize("written", [{"constant": {"instructon": "Which?"}}, {"compose": {"instructon": "{{n}}?"}}])
def test_a_misspelt_field_that_a_source_writes_is_refused(run, tmp_path, written):
    """Also where the file has the field, whose own text would be learned. Rewards may read a field of any name."""
    file = str(write(tmp_path / "own.jsonl", [{"instruction": "Say it.", "output": "3", "n": "3"}] * 3))
    with raises_fault("SF-DATA-FORMAT", file, "instructon", remedy=["instruction"]):
        run(SourceSpec(file, **written))
    other = {key: dict.fromkeys(["topic"], *own.values()) for key, own in written.items()}
    assert "topic" in run(SourceSpec(file, **other)).audit.source.unused
    rows = [first_row(SourceSpec(file))[1]]
    scan_format("prompts", "auto", rows, file).refuse_misspelt(["instructon"])


def test_a_composed_field_is_as_if_the_file_had_it(run, tmp_path):
    own = [
        {"q": f"{n} {{{{n}}}}?", "answers": [{"text": f"It is {n}."}], "input": "unread", "a.b": "x"} for n in (1, 2)
    ]
    texts = [{"instruction": f"x Q: {one['q']}", "output": f" {one['answers'][0]['text']}"} for one in own]
    made = {"instruction": "{{a.b}} Q: {{ q }}", "output": " {{answers.0.text}}", "input": ""}
    bare, whole = (str(write(tmp_path / f"{name}.jsonl", rows)) for name, rows in (("bare", own), ("whole", texts)))
    found = run(SourceSpec(bare, compose=made, format="alpaca")).train
    assert same(found, run(SourceSpec(whole, format="alpaca")).train)
    other = {**made, "output": "So: {{answers.0.text}}"}
    assert not same(found, run(SourceSpec(bare, compose=other, format="alpaca")).train)
    _, row = first_row(SourceSpec(bare, compose={"text": "{{q}}"}))  # looked at before a run
    assert row.value.keys() == {"text", "answers", "input", "a.b"}  # a column in a text is not read otherwise
    for wrong in ("{{p}}", "{{answers}}", "{{answers.1.text}}", "{{answers.text}}", "{{q.text}}"):
        with raises_fault("SF-DATA-ROW", f"{bare}:1"):
            run(SourceSpec(bare, compose={"text": wrong}))


def test_nothing_is_held_out_unless_asked(run, file):
    data = run(file)
    assert len(data.train) == 20
    assert data.eval is data.eval_audit is None
    assert [data.train[index].number for index in range(20)] == list(range(1, 21))
    source = data.audit.source
    assert (source.rows, source.used, source.dropped, source.layout, source.template) == (
        20,
        20,
        (),
        "alpaca",
        "tokenizer",
    )
    assert source.unused == ()
    assert data.audit.answers == data.audit.ended == 20


def test_the_second_start_tokenizes_nothing(run, file, tokenized, monkeypatch):
    first = run(file)
    monkeypatch.setattr(reading, "read_rows", None)  # the rows are not even parsed again
    monkeypatch.setattr(TextEncoder, "encode", None)
    second = run(file)
    assert tokenized == [20]
    assert same(first.train, second.train)
    assert first.audit == second.audit


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 199},
        {"max_samples": 19},
        {"train_on": "everything"},
        {"template": "alpaca"},
        {"bos_id": None},
        {"layout": "alpaca"},
    ],
)
def test_another_method_is_another_cache(run, file, tokenized, change):
    run(file)
    run(file, **change)
    assert len(tokenized) == 2


def test_another_content_tokenizer_or_chat_template_is_another_cache(run, file, tokenized, llama3_pad, llama3):
    run(file)
    run(file, tokenizer=llama3_pad, stop_ids=(llama3_pad.eos_token_id,), pad_id=llama3_pad.eos_token_id)
    original = llama3.chat_template
    try:
        llama3.chat_template = original.replace("| trim", "")
        run(file)
    finally:
        llama3.chat_template = original
    write(file, records(19))
    run(file)
    assert tokenized == [20, 20, 20, 19]


def test_the_same_content_elsewhere_is_the_same_cache(run, file, tokenized):
    run(file)
    copy = file.with_name("copy.jsonl")
    copy.write_bytes(file.read_bytes())
    assert run(copy).audit.source.file == str(copy)
    assert tokenized == [20]


def test_a_damaged_cache_is_made_again(run, file, tokenized, tmp_path):
    run(file)
    (path,) = (tmp_path / "cache").rglob("ids.npy")
    intact = path.read_bytes()
    path.write_bytes(intact[:-3] + bytes([intact[-3] ^ 4]) + intact[-2:])
    run(file)
    assert path.read_bytes() == intact
    assert tokenized == [20, 20]


@pytest.mark.parametrize(("asked", "count"), [(5, 5), (0.25, 5)])
def test_a_split_is_disjoint_repeatable_and_said(run, file, asked, count):
    data = run(file, asked)
    assert data.eval is not None
    assert data.eval_audit is not None
    train, held_out = ({one[index].number for index in range(len(one))} for one in (data.train, data.eval))
    assert (len(held_out), train & held_out, train | held_out) == (count, set(), set(range(1, 21)))
    assert same(run(file, asked).eval, data.eval)
    assert not same(run(file, asked, seed=4).eval, data.eval)
    assert gives(data.audit.source.part, count)
    assert gives(data.eval_audit.source.part, count)


def test_an_evaluation_file_is_not_shortened_and_overlap_is_counted(run, file, tmp_path):
    other = write(tmp_path / "eval.json", records(6, start=18))
    data = run(file, str(other), max_samples=19)
    assert data.eval_audit is not None
    assert (data.audit.kept, data.audit.source.rows, data.audit.source.used) == (19, 20, 19)
    assert (data.eval_audit.kept, data.eval_audit.overlap) == (6, 1)
    assert data.eval_audit.source.file == str(other)


def test_too_large_a_split_names_the_key(run, file):
    with raises_fault("SF-DATA-SHARES", "data.eval"):
        run(file, 20)


def test_no_label_left_anywhere_is_an_error(run, file):
    with raises_fault("SF-DATA-LENGTH", "data.max_length", 20):
        run(file, template="alpaca", max_length=20)


def test_a_dropped_row_is_named(run, tmp_path):
    wide = {"instruction": "Add.", "input": "x", "output": "b"}  # its frame is longer than the others'
    file = write(tmp_path / "d.jsonl", [*records(2), wide, *records(2)])
    lengths = run(file, template="alpaca").train.lengths
    data = run(file, template="alpaca", max_length=int(lengths[0]) - 5)
    assert data.audit.source.dropped == ((str(file), 3, 3),)
    assert (data.audit.kept, data.audit.source.rows) == (4, 5)
    assert [data.train[index].number for index in range(4)] == [1, 2, 4, 5]


def test_text_records_need_no_template(run, tmp_path):
    file = write(tmp_path / "text.jsonl", [{"text": "Once."}, {"text": "Twice!"}])
    data = run(file)
    assert (data.template.name, data.audit.source.template, data.audit.source.layout) == ("plain", "plain", "text")
    assert data.audit.supervised_tokens == data.audit.tokens - 2  # all but BOS
    with raises_fault("SF-DATA-ROW", f"{file}:1", 1, remedy=["plain"]):
        run(file, template_asked=True)


def test_unused_fields_are_told(run, tmp_path):
    file = write(tmp_path / "d.json", [{**record, "score": 1} for record in records(2)])
    assert run(file).audit.source.unused == ("score",)


def test_faults_come_with_file_and_line(run, tmp_path, file):
    lines = file.read_text().split("\n")
    lines[6] = lines[6].replace("It is 7.", "")
    file.write_text("\n".join(lines))
    with raises_fault("SF-DATA-ROW", f"{file}:7"):
        run(file)
    with raises_fault("SF-FILE-MISSING", f"{tmp_path}/none.json"):
        run(tmp_path / "none.json")
    assert not (tmp_path / "cache").exists()


def test_pad_that_stands_in_the_text_is_refused_also_from_the_cache(run, file):
    run(file)
    with raises_fault("SF-LABEL-PAD", f"{file}:1"):
        run(file, pad_id=0)


def test_generation_is_given_what_was_trained(run, file, llama3):
    data = run(file)
    example = data.train[4]
    prompt = Conversation((Turn("user", "Add 4 and 1!"),))
    asked = prompt_ids(prompt, data.template, TextEncoder(llama3), llama3.bos_token_id)
    assert example.ids[: example.supervised.argmax()].tolist() == asked


def test_no_absolute_path_is_kept(run, file, tmp_path):
    run(os.path.abspath(file))
    for path in (tmp_path / "cache").rglob("*.json"):
        assert str(tmp_path) not in path.read_text(encoding="utf-8")


@pytest.mark.skipif(not ALPACA_DEMO.exists(), reason="the shared sample data are not here")
@pytest.mark.parametrize("template", ["tokenizer", "llama3", "alpaca", "plain"])
def test_real_data(run, template, llama3):
    data = run(ALPACA_DEMO, template=template, max_length=4096)
    audit = data.audit
    assert (audit.kept, audit.source.rows, audit.source.dropped, audit.truncated) == (999, 999, (), 0)
    assert audit.answers == audit.ended == 999
    values = json.loads(ALPACA_DEMO.read_text(encoding="utf-8"))
    for index in (0, 500, 998):
        example = data.train[index]
        learned = llama3.decode(example.ids[example.supervised].tolist())
        stop = "<|eot_id|>" if template in ("tokenizer", "llama3") else "<|end_of_text|>"
        assert learned.removesuffix(stop).strip() == values[index]["output"].strip()


# --- several sources -------------------------------------------------------------------------------------------------

DIALOGUE = {
    "conversations": [
        {"from": "human", "value": "Add 1 and 1!"},
        {"from": "gpt", "value": "It is 2."},
        {"from": "human", "value": "And 2?"},
        {"from": "gpt", "value": "It is 4."},
    ]
}


@pytest.fixture
def dialogues(tmp_path) -> Path:
    return write(tmp_path / "talk.json", [DIALOGUE] * 6)


def test_sources_lie_one_after_the_other_and_keep_their_names(run, file, dialogues):
    data = run([file, dialogues])
    assert (len(data.train), data.mixture.counts, data.mixture.quotas) == (26, (20, 6), (20, 6))
    assert [audit.source.layout for audit in data.sources] == ["alpaca", "sharegpt"]
    assert data.train[0].number == f"{file}:1"
    assert data.train[25].number == f"{dialogues}:1"  # one line holds the whole list
    assert [data.train[index].ids.tolist() for index in range(20)] == [
        run(file).train[index].ids.tolist() for index in range(20)
    ]
    whole = data.audit
    assert (whole.kept, whole.source.rows, whole.source.layout) == (26, 26, "alpaca, sharegpt")
    assert whole.tokens == sum(audit.tokens for audit in data.sources) == data.train.lengths.sum()
    assert (whole.answers, whole.ended, whole.duplicates) == (32, 32, 5)
    assert (whole.shortest, whole.longest) == (data.train.lengths.min(), data.train.lengths.max())
    assert whole.source.file == f"{file}, {dialogues}"


def test_a_second_source_is_no_reason_to_tokenize_the_first_again(run, file, dialogues, tokenized):
    run(file)
    run([file, dialogues])
    run([dialogues, file])
    assert tokenized == [20, 6]


def test_weights_and_epochs_reach_the_mixture(run, file, dialogues):
    def quotas(**how) -> tuple[int, ...]:
        return run([SourceSpec(str(file), **how), SourceSpec(str(dialogues), **how)]).mixture.quotas

    assert quotas(epochs=1.5) == (30, 9)
    assert quotas(weight=1.0) == (13, 13)


def test_max_samples_of_a_source_goes_before_that_of_all(run, file, dialogues):
    data = run([SourceSpec(str(file), max_samples=7), SourceSpec(str(dialogues))], max_samples=4)
    assert data.mixture.counts == (7, 4)
    assert [audit.source.used for audit in data.sources] == [7, 4]


def test_examples_are_held_out_of_every_source(run, file, dialogues):
    data = run([file, dialogues], 0.5)
    assert [audit.kept for audit in data.sources] == [10, 3]
    assert [audit.kept for audit in data.eval_sources] == [10, 3]
    assert data.mixture.counts == (10, 3)
    numbers = [{one[index].number for index in range(len(one))} for one in (data.train, data.eval)]
    assert not {name for name in numbers[0] & numbers[1] if name.startswith(str(file))}
    assert data.eval_audit.overlap == 3  # the dialogues are copies of each other
    assert data.eval_audit.source.notes == ()


@pytest.fixture
def texts(tmp_path) -> Path:
    """Six texts of one to six examples each."""
    line = "Once upon a time there was a heron. "
    return write(tmp_path / "texts.jsonl", [{"text": f"{n}: {line * 3 * n}"} for n in range(1, 7)])


def halves_of_texts(run, texts, seed) -> tuple[set, set]:
    data = run(texts, 2, chunks=True, max_length=48, seed=seed)
    assert len(data.train) + len(data.eval) == len(run(texts, chunks=True, max_length=48).train) > 12
    assert gives(data.audit.source.part, 2)
    train, held_out = ({one[index].number for index in range(len(one))} for one in (data.train, data.eval))
    return train, held_out


@pytest.mark.parametrize("seed", range(4))
def test_a_text_in_several_examples_is_held_out_whole(run, texts, seed):
    train, held_out = halves_of_texts(run, texts, seed)
    assert (len(train), len(held_out), train & held_out) == (4, 2, set())
    assert halves_of_texts(run, texts, seed) == (train, held_out)


def test_twin_a_split_of_examples_tears_texts_apart(run, texts, monkeypatch):
    monkeypatch.setattr(TokenizedDataset, "records", lambda dataset: np.arange(len(dataset)))
    train, held_out = halves_of_texts(run, texts, 0)
    assert train & held_out


def test_records_are_counted_over_files(run, texts, tmp_path):
    copy = tmp_path / "more.jsonl"
    copy.write_bytes(texts.read_bytes())
    data = run([texts, copy], chunks=True, max_length=48).train
    records = data.records()
    assert sorted(set(records.tolist())) == list(range(12))
    assert [data.row(index)[1] for index in range(len(data))] == [1 + number % 6 for number in records.tolist()]
    middle = data.subset(np.flatnonzero(records == 5))
    assert set(middle.records().tolist()) == {0}


def test_copies_across_sources_are_counted(run, file, tmp_path):
    copy = write(tmp_path / "copy.json", records(3, start=18))
    audits = run([file, copy]).sources
    assert [audit.duplicates for audit in audits] == [0, 2]
    assert [[row[1] for row in audit.duplicate_places] for audit in audits] == [[], [1, 2]]


def test_a_fault_names_the_file_it_is_in(run, file, tmp_path):
    bad = write(tmp_path / "bad.jsonl", [{"instruction": "q", "output": ""}])
    with raises_fault("SF-DATA-ROW", f"{bad}:1"):
        run([file, bad])


def test_texts_and_dialogues_may_be_mixed(run, file, tmp_path):
    texts = write(tmp_path / "text.jsonl", [{"text": "Once upon a time."}])
    data = run([texts, file])
    assert [audit.source.template for audit in data.sources] == ["plain", "tokenizer"]
    assert data.template.name == "tokenizer"  # what generation lays its prompts out with
    assert data.audit.stops == ("<|end_of_text|>", "<|eot_id|>")


def test_all_sources_take_the_template_that_dialogues_need(run, file, dialogues, tokenized):
    """alpaca was planned because the tokenizer brings no template; it cannot hold a dialogue."""
    other = {"template": "alpaca", "template_fallbacks": ("vicuna",)}
    assert run(file, **other).template.name == "alpaca"
    for sources, evaluation in (([file, dialogues], None), ([dialogues, file], None), ([file, dialogues], file)):
        data = run(sources, evaluation, **other)
        assert data.template.name == "vicuna"
        assert all(gives(data.template_reason, value) for value in ("alpaca", "talk.json", 1))
        assert {audit.source.template for audit in (*data.sources, *data.eval_sources)} == {"vicuna"}
    with raises_fault("SF-DATA-ROW", f"{dialogues}:1"):
        run([file, dialogues], **other, template_asked=True)


def test_evaluation_data_changes_no_training_token(run, file, dialogues, tmp_path):
    other = {"template": "alpaca", "template_fallbacks": ("vicuna",)}
    alone = run(file, **other)
    with raises_fault("SF-DATA-ROW", f"{dialogues}:1"):
        run(file, dialogues, **other)
    data = run(dialogues, file, **other)
    assert {audit.source.template for audit in (*data.sources, *data.eval_sources)} == {"vicuna"}
    texts = write(tmp_path / "text.jsonl", [{"text": "Once upon a time."}])
    data = run(texts, [dialogues, file], **other)
    assert [audit.source.template for audit in (*data.sources, *data.eval_sources)] == ["plain", "vicuna", "vicuna"]
    assert run(file, file, **other).train[0].ids.tolist() == alone.train[0].ids.tolist()


def test_twin_where_all_data_decides_evaluation_would_change_what_is_learned(run, file, dialogues, monkeypatch):
    def together(specs, early, method, train, cache):
        return prepare._load_all([*(one.spec for one in train), *specs], method, cache)[:2]

    monkeypatch.setattr(prepare, "_load_evaluation", together)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_evaluation_data_changes_no_training_token(run, file, dialogues, None)


@pytest.mark.parametrize("asked", [False, True])
def test_a_mistake_in_the_evaluation_data_does_not_wait_for_the_training_data(run, file, tmp_path, monkeypatch, asked):
    held = write(tmp_path / "held.jsonl", [*records(2), {"text": "no answer"}])
    real, read = prepare.tokenize, []
    monkeypatch.setattr(prepare, "tokenize", lambda source, *rest: (read.append(source.name), real(source, *rest))[1])
    with raises_fault("SF-DATA-ROW", f"{held}:3"):
        run(file, held, template_asked=asked)
    assert read == [str(held)]
    read.clear()
    with raises_fault("SF-DATA-ROW", f"{held}:3"):  # twin
        run(held, file, template_asked=asked)
    assert read == [str(file), str(held)]
    read.clear()
    run(file, file, template_asked=asked)
    assert read == [str(file)] * 2, "nothing is read once more"


def test_a_pair_of_texts_goes_through_the_template_and_that_is_said(run, tmp_path):
    file = write(tmp_path / "pair.jsonl", [{"prompt": "Add 1 and 1!", "completion": "It is 2."}])
    same = write(tmp_path / "same.jsonl", [{"instruction": "Add 1 and 1!", "output": "It is 2."}])
    lists = [{"role": "user", "content": "Add 1 and 1!"}], [{"role": "assistant", "content": "It is 2."}]
    talk = write(tmp_path / "talk.jsonl", [{"prompt": lists[0], "completion": lists[1]}])
    said = "a pair of texts goes through the template"
    assert run(file).train[0].ids.tolist() == run(same).train[0].ids.tolist() == run(talk).train[0].ids.tolist()
    assert [said in run(one).audit.source.layout_reason for one in (file, same, talk)] == [True, False, False]


def test_placeholders_are_told(run, tmp_path):
    file = write(tmp_path / "d.jsonl", [*records(2), {"instruction": "hi", "output": "I am {{name}} of {{ author }}."}])
    source = run(file).audit.source
    assert (source.placeholders, source.placeholder) == (((str(file), 3, 3),), "{{name}}")
    assert run(file, max_samples=2).audit.source.placeholders == ()


def test_a_function_of_the_user_reads_records_and_its_results_are_cached(run, tmp_path, tokenized):
    file = write(tmp_path / "d.jsonl", [{"q": "Add 1 and 1!", "a": "It is 2."}])

    def read_record(record):
        asked = {"role": "user", "content": record["q"]}
        return [asked, {"role": "assistant", "content": record["a"]}]

    data = run(file, layout="custom", read_record=read_record)
    plain = write(tmp_path / "plain.jsonl", [{"instruction": "Add 1 and 1!", "output": "It is 2."}])
    assert data.train[0].ids.tolist() == run(plain).train[0].ids.tolist()
    assert gives(data.audit.source.layout_reason, "function")
    other = run(file, layout="custom", read_record=lambda record: [*read_record(record)])  # another, the same results
    assert other.audit.source.content == data.audit.source.content
    changed = run(file, layout="custom", read_record=lambda record: [*read_record(record), *read_record(record)])
    assert changed.audit.source.content != data.audit.source.content
    assert tokenized == [1, 1, 1]
    with raises_fault("SF-OWN-FUNCTION", "data.format"):
        run(file, layout="custom")


def test_pretraining_texts_are_split_and_nothing_else_is_taken(run, tmp_path, file, llama3):
    long = "Once upon a time there was a heron. " * 20
    texts = write(tmp_path / "text.jsonl", [{"text": long}, {"text": "Short."}, {"text": long, "title": "x"}])
    data = run(texts, chunks=True, max_length=64)
    whole = run(texts, chunks=True, max_length=10_000)
    assert data.audit.supervised_tokens == whole.audit.supervised_tokens
    assert data.audit.kept - data.audit.continued == whole.audit.kept == 3
    assert (data.audit.truncated, data.audit.stop_lost, data.audit.ended) == (0, 0, 3)
    assert data.train.lengths.max() == 64
    assert data.audit.source.unused == ("title",)
    with raises_fault("SF-DATA-FORMAT", f"{file}:1"):
        run(file, chunks=True)
    renamed = SourceSpec(str(file), columns={"text": "output"})
    source = run(renamed, chunks=True).audit.source
    assert source.layout == "text"
    assert [gives(source.layout_reason, name) for name in ("'text'", "'output'")] == [True, True]


def test_what_a_folder_says_is_not_kept_with_the_file(run, tmp_path):
    """The same content may lie elsewhere, where another thing is true of it."""
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "a.jsonl", records(3))
    assert "folder" not in run(tmp_path / "d" / "a.jsonl").audit.source.layout_reason
    write(tmp_path / "d" / "b.jsonl", records(5, start=3))
    source = run(tmp_path / "d").audit.source
    assert all(gives(source.layout_reason, value) for value in ("'instruction'", "'output'", "folder"))
    assert (source.file, source.rows) == (f"{tmp_path / 'd'} (2 files)", 8)
    assert [run(tmp_path / "d", max_samples=4).train[index].number for index in (2, 3)] == [
        f"{tmp_path / 'd' / 'a.jsonl'}:3",
        f"{tmp_path / 'd' / 'b.jsonl'}:1",
    ]
    assert run(tmp_path / "d", max_samples=3).train[2].number == 3  # the second file is not needed


def test_files_that_max_samples_leaves_out_are_named(run, tmp_path):
    (tmp_path / "d").mkdir()
    for number, name in enumerate("abcdef"):
        write(tmp_path / "d" / f"{name}.jsonl", records(3, start=3 * number))

    def told(count):
        """Names and numbers of each caution that names a file."""
        found = cautions(run(tmp_path / "d", max_samples=count).audit)
        return [re.findall(r"\w\.jsonl|\d+", line.replace(str(tmp_path), "")) for line in found if ".jsonl" in line]

    assert told(5) == [["c.jsonl", "d.jsonl", "e.jsonl", "1"]]  # and one more
    assert told(15) == [["f.jsonl"]]
    assert told(16) == []  # twin: all are read, the last in part
    assert told(18) == []
    assert "b.jsonl" in told(3)[0], "nor is it kept with the tokenized file"


def test_twin_that_forgets_what_other_sources_hold(run, file, tmp_path, monkeypatch):
    alone = prepare.copies_in
    monkeypatch.setattr(prepare, "copies_in", lambda parts: [alone([part])[0] for part in parts])
    with pytest.raises(AssertionError):
        test_copies_across_sources_are_counted(run, file, tmp_path)


INSTRUCT = ALPACA_DEMO.parent


@pytest.mark.skipif(not INSTRUCT.exists(), reason="the shared sample data are not here")
def test_real_dialogues_with_tools(run, llama3):
    """Every answer and every call is learned, results and definitions never."""
    file = INSTRUCT / "sharegpt_multiturn_200.json"
    data = run(file, template="llama3", max_length=100_000)
    values = json.loads(file.read_text(encoding="utf-8"))
    answers = sum(turn["from"] in ("gpt", "function_call") for value in values for turn in value["conversations"])
    assert (data.audit.kept, data.audit.answers, data.audit.ended) == (200, answers, answers)
    for index in (0, 100, 199):
        example, turns = data.train[index], values[index]["conversations"]
        learned = llama3.decode(example.ids[example.supervised].tolist())
        prompt = llama3.decode(example.ids[~example.supervised].tolist())
        for turn in turns:
            if turn["from"] == "gpt":
                assert turn["value"].strip() in learned
            elif turn["from"] == "function_call":
                assert json.loads(turn["value"])["name"] in learned
            elif turn["from"] == "human":
                assert turn["value"].strip() in prompt
            else:
                assert turn["value"].strip() not in learned


@pytest.fixture
def collector(monkeypatch) -> list[bool]:
    """Whether Python looks for cycles while examples are encoded, call by call."""
    seen = []
    real = encode.encode

    def watched(*args, **how):
        seen.append(gc.isenabled())
        return real(*args, **how)

    monkeypatch.setattr(tokenize, "encode", watched)
    return seen


def test_no_time_goes_to_looking_for_cycles_while_examples_are_encoded(run, file, collector):
    assert gc.isenabled()
    run(file)
    assert collector == [False]
    assert gc.isenabled()


def test_who_had_the_collector_off_keeps_it_off_and_a_fault_turns_it_on_again(run, file, tmp_path):
    gc.disable()
    try:
        run(file)
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(InputError):
        run(write(tmp_path / "wrong.jsonl", [{"instruction": 1, "input": "", "output": "a"}]))
    assert gc.isenabled()


def test_twin_with_the_collector_it_would_look(run, file, collector, monkeypatch):
    monkeypatch.setattr(tokenize, "_gc_disabled", nullcontext)
    run(file)
    assert collector == [True]


def test_a_cache_that_cannot_be_written_is_done_without(run, file, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    cache = tmp_path / "taken" / "cache"  # below a file: nobody may make a folder there
    data = run(file, cache=cache)
    assert same(data.train, run(file).train)
    assert str(tmp_path / "taken") in data.audit.source.unkept
    assert sum(data.audit.source.unkept in sentence for sentence in cautions(data.audit)) == 1
    kept = run(file).audit
    assert (kept.source.unkept, cautions(kept)) == (
        "",
        tuple(one for one in cautions(data.audit) if "taken" not in one),
    )
    monkeypatch.setattr("surefoot.system.durable.require_writable", lambda folder: None)  # twin: nobody looks
    monkeypatch.setattr("surefoot.system.durable.make_folders", lambda folder: None)
    with pytest.raises((EnvironmentFault, OSError)):
        run(file, cache=cache)


def test_what_fills_the_disk_beside_a_cache_is_told(run, file, tmp_path, monkeypatch):
    """The examples without a cache need room as well."""
    (tmp_path / "taken").write_text("")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("surefoot.system.disk.write", full)
    monkeypatch.setattr("tempfile.mkdtemp", lambda *_: str(tmp_path))
    with raises_fault("SF-DISK-FULL", tmp_path):
        run(file, cache=tmp_path / "taken" / "cache")


def test_a_function_of_the_user_is_asked_once_for_each_record(run, file, tmp_path):
    """What is learned is what was hashed, also where the function says another thing each time."""
    calls = itertools.count()

    def read_record(record):
        asked = {"role": "user", "content": record["instruction"]}
        return [asked, {"role": "assistant", "content": f"It is {next(calls)}."}]

    data = run(file, layout="custom", read_record=read_record)
    assert next(calls) == 20
    calls = itertools.count()
    again = run(file, layout="custom", read_record=read_record)
    assert again.audit.source.content == data.audit.source.content
    plain = [{**record, "output": f"It is {number}."} for number, record in enumerate(records(20))]
    assert same(data.train, run(write(tmp_path / "plain.jsonl", plain)).train)
    other = run(file, layout="custom", read_record=read_record)  # twin: goes on to count
    assert other.audit.source.content != data.audit.source.content


def test_faults_of_all_batches_are_told_together(run, tmp_path, monkeypatch):
    """And a file that is no JSON to its end is told before them."""
    monkeypatch.setattr(reading, "BATCH", 4)
    values = records(20)
    for place in (2, 13):
        values[place]["output"] = ""
    with pytest.raises(InputError) as caught:
        run(write(tmp_path / "d.jsonl", values))
    (fault,) = caught.value.faults
    assert fault.where == f"{tmp_path / 'd.jsonl'}:3"
    assert "row 14" in fault.fix
    with open(tmp_path / "d.jsonl", "a", encoding="utf-8") as file:
        file.write("{")
    with pytest.raises(InputError) as caught:
        run(tmp_path / "d.jsonl")
    assert caught.value.faults[0].where.startswith(f"{tmp_path / 'd.jsonl'}:21")


def test_another_template_reads_the_records_once_more(run, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BATCH", 4)
    dialogue = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    file = write(tmp_path / "d.jsonl", [{"messages": dialogue[:2]}] * 9 + [{"messages": dialogue}])
    data = run(file, template="alpaca", template_fallbacks=("vicuna",))
    alone = run(file, template="vicuna", template_asked=True)
    assert same(data.train, alone.train)
    assert (data.audit.source.template, data.audit.source.used) == ("vicuna", 10)
    assert data.template_reason != alone.template_reason == ""


def kept_there(examples: TokenizedDataset, shortest: int) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """What Axolotl keeps with min_sample_len and dataset_exact_deduplication."""
    seen: list[tuple[tuple[int, ...], tuple[bool, ...]]] = []
    for index in range(len(examples)):
        row = tuple(examples[index].ids.tolist()), tuple(examples[index].supervised.tolist())
        if len(row[0]) >= shortest and row not in seen:
            seen.append(row)
    return seen


@pytest.mark.parametrize("shortest", [1, 30])
def test_short_examples_and_copies_are_left_out_before_any_are_held_out(run, tmp_path, shortest):
    long = {"instruction": "Count!", "output": " ".join(map(str, range(30)))}
    files = [
        write(tmp_path / "a.jsonl", [*records(6), long, *records(3), *[long | {"input": f"{n}"} for n in range(4)]]),
        write(tmp_path / "b.jsonl", [long, long | {"output": "1 2"}, long | {"input": "b"}, *records(4, start=5)]),
    ]
    whole, chosen = run(files), run(files, min_length=shortest, unique=True)
    expected = kept_there(whole.train, shortest)
    assert kept_there(chosen.train, 1) == expected
    assert len(chosen.train) == len(expected) < len(whole.train)
    assert chosen.audit.duplicates == 0 < whole.audit.duplicates
    assert sum(chosen.mixture.counts) == len(expected)
    halves = run(files, 3, min_length=shortest, unique=True)
    assert len(halves.train) + 3 == len(expected)
    assert halves.eval_audit.overlap == 0 < run(files, 9).eval_audit.overlap


def test_a_source_that_has_only_copies_or_short_examples_is_named(run, file, tmp_path):
    again = write(tmp_path / "again.jsonl", records(5))
    with raises_fault("SF-DATA-LENGTH", "data.unique"):
        run([file, again], unique=True)
    with raises_fault("SF-DATA-LENGTH", "data.min_length"):
        run([file, again], min_length=150)
