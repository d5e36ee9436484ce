"""Ids and label mask: one BOS, supervised stop tokens, cuts that spare the answer; for any conversation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.faults import raises_fault
from surefoot.data.batching.batch import IGNORE, Example, collate
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, ToolCall, Turn
from surefoot.data.tokenize import encode as encode_module
from surefoot.data.tokenize import segments as segments_module
from surefoot.data.tokenize import truncate as cut_module
from surefoot.data.tokenize.encode import Encoded, EncodeSettings, encode
from surefoot.data.tokenize.segments import TextEncoder, prompt_ids
from surefoot.data.tokenize.truncate import Truncation

PLENTY = 100_000  # tokens: nothing is cut
words = st.sampled_from(["Four", "two", " ", "\n", "ä", "!", "<|eot_id|>", "<|begin_of_text|>", "</s>", "[INST]"])
texts = st.lists(words, min_size=1, max_size=6).map("".join).filter(str.strip)


@st.composite
def conversations(draw, turns: int = 3) -> Conversation:
    system = [Turn("system", draw(texts))] if draw(st.booleans()) else []
    pairs = [
        turn
        for _ in range(draw(st.integers(1, turns)))
        for turn in (Turn("user", draw(texts)), Turn("assistant", draw(texts)))
    ]
    return Conversation((*system, *pairs), draw(st.integers(1, 99)), 1)


def run(
    encoder: TextEncoder, name: str, conversation: Conversation, *, bos=True, max_length=PLENTY, train_on="responses"
):
    template = make_template(name, encoder, (encoder.tokenizer.eos_token_id,))
    bos_id = encoder.bos_id if bos else None
    how = EncodeSettings(encoder=encoder, bos_id=bos_id, max_length=max_length, train_on=train_on)
    (one,) = encode([conversation], template, how, "d.json")
    return one, template


def text_of(encoder: TextEncoder, ids: np.ndarray) -> str:
    return encoder.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)


any_setting = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
modes = st.sampled_from(["responses", "last", "everything"])
named = st.sampled_from(["llama3", "plain", "tokenizer"])


@any_setting
@given(conversations(), named, st.booleans(), modes)
def test_every_example_is_well_formed(llama3, conversation, name, bos, train_on):
    encoder = TextEncoder(llama3)
    one, template = run(encoder, name, conversation, bos=bos, train_on=train_on)
    segments = template.segments(conversation)
    assert one.ids.shape == one.supervised.shape
    assert one.number == conversation.number
    assert (one.ids == encoder.bos_id).sum() == (1 if bos else 0)  # also where a text spells it out
    assert (one.ids[0] == encoder.bos_id) == bos
    written = "".join(segment.text for segment in segments).removeprefix("<|begin_of_text|>")
    assert text_of(encoder, one.ids[int(bos) :]) == written
    answers = [segment for segment in segments if segment.answer]
    if train_on == "last":
        answers = [segment for segment in answers if segment.turn == answers[-1].turn]
    if train_on == "everything":
        assert one.supervised.tolist() == [False] + [True] * (len(one.ids) - 1)
    else:
        assert text_of(encoder, one.ids[one.supervised]) == "".join(segment.text for segment in answers)
        stops = sum(np.isin(one.ids[one.supervised], template.stop_ids))
        assert stops == len({segment.turn for segment in answers})  # one per answer, none from a text
    assert not one.truncated
    assert not one.stop_lost


@any_setting
@given(conversations(), st.sampled_from(["llama3", "plain", "tokenizer", "alpaca"]), st.booleans())
def test_generation_is_given_the_ids_of_training(any_encoder, conversation, name, bos):
    if name == "llama3" and "<|eot_id|>" not in any_encoder.control.values():
        name = "plain"
    if name == "alpaca":
        conversation = Conversation(conversation.turns[: 2 + (conversation.turns[0].role == "system")])
    one, template = run(any_encoder, name, conversation, bos=bos)
    for place, turn in enumerate(conversation.turns):
        if turn.role == "assistant":
            asked = prompt_ids(
                Conversation(conversation.turns[:place]), template, any_encoder, any_encoder.bos_id if bos else None
            )
            assert one.ids[: len(asked)].tolist() == asked
            assert one.supervised[len(asked)]


@any_setting
@given(conversations(turns=2), named, st.booleans(), modes, st.integers(8, 80))
def test_cutting_keeps_bos_frame_and_answers(llama3, conversation, name, bos, train_on, max_length):
    encoder = TextEncoder(llama3)
    whole, template = run(encoder, name, conversation, bos=bos, train_on=train_on)
    one, _ = run(encoder, name, conversation, bos=bos, train_on=train_on, max_length=max_length)
    assert one.truncated == (len(whole.ids) > max_length)
    assert len(one.ids) <= max_length
    assert (one.ids == encoder.bos_id).sum() == (1 if bos else 0)
    assert is_subsequence(one.ids, whole.ids)
    answers = {segment.turn for segment in template.segments(conversation) if segment.answer}
    learned = {max(answers)} if train_on == "last" else answers
    content = sum(
        len(ids)
        for segment in template.segments(conversation)
        if segment.content and not (segment.answer and segment.turn in learned)
        for ids in [encoder.tokenizer(segment.text, add_special_tokens=False, split_special_tokens=True)["input_ids"]]
    )
    room = max_length - (len(whole.ids) - content - int(whole.supervised.sum()))  # but for the template's words
    if train_on != "everything" and whole.supervised.sum() + min(content, room // 4) <= room:
        # Cutting prompt texts down to a quarter of the room is enough, so every label survives.
        assert one.ids[one.supervised].tolist() == whole.ids[whole.supervised].tolist()
        assert not one.stop_lost
    kept_labels = one.ids[one.supervised].tolist()
    if train_on != "everything":
        assert whole.ids[whole.supervised][: len(kept_labels)].tolist() == kept_labels  # only the end can be missing


def is_subsequence(part: np.ndarray, whole: np.ndarray) -> bool:
    rest = iter(whole.tolist())
    return all(number in rest for number in part.tolist())


LONG = Conversation(
    (
        Turn("system", "STUVWXYZQK"),
        Turn("user", "0123456789"),
        Turn("assistant", "ABCDEFGHIJ"),
        Turn("user", "9876543210"),
        Turn("assistant", "JIHGFEDCBA"),
    ),
    7,
    1,
)


@pytest.mark.parametrize(
    ("cut", "train_on", "kept"),
    [
        (0, "responses", "STUVWXYZQK|0123456789|ABCDEFGHIJ|9876543210|JIHGFEDCBA|"),
        (3, "responses", "STUVWXYZQK|3456789|ABCDEFGHIJ|9876543210|JIHGFEDCBA|"),
        (13, "responses", "UVWXYZQK||ABCDEFGHIJ|876543210|JIHGFEDCBA|"),
        (23, "responses", "||ABCDEFGHIJ|6543210|JIHGFEDCBA|"),
        (30, "responses", "||ABCDEFGHIJ|43210|JIHGFE"),
        (31, "responses", "||ABCDEFGHIJ|43210|JIHGF"),
        (36, "responses", "||ABCDEFGHIJ|3210|J"),
        (13, "last", "STUVWXYZQK||DEFGHIJ|9876543210|JIHGFEDCBA|"),
        (33, "last", "ZQK|||3210|JIHGFEDCBA|"),
        (41, "last", "|||10|JIHGFEDC"),
        (48, "last", "||||JIH"),
        (33, "everything", "||ABCDEFGHIJ|3210|JIHG"),
    ],
)
def test_what_is_cut_first(llama3, cut, train_on, kept):
    """Each character of the texts is one token; the template's words between them are shown as a bar. With 30 tokens of
    prompts and 22 of answers, cutting c leaves a room of 52 - c, of which the prompts keep a quarter."""
    encoder = TextEncoder(llama3)
    whole, _ = run(encoder, "llama3", LONG, train_on=train_on)
    one, _ = run(encoder, "llama3", LONG, train_on=train_on, max_length=len(whole.ids) - cut)
    text = text_of(encoder, one.ids[1:])
    for role in ("system", "user", "assistant"):
        text = text.replace(f"<|start_header_id|>{role}<|end_header_id|>\n\n", "")
    assert text.replace("<|eot_id|>", "|") == kept
    assert one.truncated == (cut > 0)
    assert one.stop_lost == (not kept.endswith("|"))
    assert one.prompt_cut == ("|0123456789|" not in kept)
    assert one.prompt_lost == kept.startswith("||||")


CALL = ToolCall("dig", {})
ASKED = Conversation(
    (
        Turn("system", "STUVWXYZ"),
        Turn("user", "0123456789"),
        Turn("assistant", "", calls=(CALL,)),
        Turn("tool", "KLMNOPQRST" * 2),
        Turn("assistant", "ABCDEFGHIJ"),
    ),
    7,
    1,
)


@any_setting
@given(conversations(turns=2), named, modes, st.integers(8, 900))
def test_a_short_prompt_needs_no_look_at_which_text_a_token_is_of(llama3, conversation, name, train_on, max_length):
    long = replace(conversation, turns=(*conversation.turns[:-1], Turn("assistant", "two " * 200)))
    quick, _ = run(TextEncoder(llama3), name, long, max_length=max_length, train_on=train_on)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_module, "_may_give_way", lambda prompt, max_length: True)
        slow, _ = run(TextEncoder(llama3), name, long, max_length=max_length, train_on=train_on)
    for field, own, other in zip(Encoded._fields, quick, slow, strict=True):
        assert np.array_equal(own, other), field


def test_a_short_prompt_is_not_encoded_again(llama3, monkeypatch):
    monkeypatch.setattr(TextEncoder, "spans", lambda self, piece: pytest.fail("encoded again"))
    long = Conversation((Turn("user", "Four"), Turn("assistant", "two " * 200)), 7, 1)
    one, _ = run(TextEncoder(llama3), "llama3", long, max_length=400)
    assert one.truncated
    assert len(one.ids) == 400


def test_a_question_that_is_gone_is_lost_whatever_else_of_the_prompt_is_left(llama3):
    """Its system text and the results of tools are prompt as well, and answer nothing without it."""
    encoder = TextEncoder(llama3)
    whole, _ = run(encoder, "llama3", ASKED)
    seen = set()
    for room in range(20, len(whole.ids) + 1):
        one, _ = run(encoder, "llama3", ASKED, max_length=room)
        text = text_of(encoder, one.ids)
        asked = any(digit in text for digit in "0123456789")
        assert one.prompt_lost == (not asked)
        if one.usable:
            assert one.prompt_cut == ("0123456789" not in text)
        seen.add((asked, "KLM" in text or "RST" in text))
    assert (False, True) in seen  # where counting all of the prompt would find nothing lost


def test_a_later_question_that_goes_with_its_answer_takes_no_beginning(llama3):
    """The first answer is longer than there is room for: its own prompt, within its quarter, stays."""
    encoder = TextEncoder(llama3)
    turns = (Turn("user", "01"), Turn("assistant", "ABCDEFGHIJ" * 9), Turn("user", "23"), Turn("assistant", "KLM"))
    one, _ = run(encoder, "llama3", Conversation(turns, 1, 1), max_length=60)
    assert "23" not in text_of(encoder, one.ids)
    assert (one.truncated, one.prompt_cut, one.prompt_lost) == (True, False, False)


def test_a_dialogue_tells_how_many_answers_it_lost_whole(llama3):
    """Five answers, of which three remain to their end: then no answer lost only its end."""
    encoder = TextEncoder(llama3)
    turns = tuple(Turn(role, letter * 10) for letter in "abcde" for role in ("user", "assistant"))
    whole, _ = run(encoder, "llama3", Conversation(turns, 1, 1))
    found = {}
    for room in range(30, len(whole.ids) + 1):
        one, _ = run(encoder, "llama3", Conversation(turns, 1, 1), max_length=room)
        text = text_of(encoder, one.ids[one.supervised])
        complete, begun = text.count("<|eot_id|>"), len([part for part in text.split("<|eot_id|>") if part])
        assert one.answers_lost == 5 - begun
        assert one.stop_lost == (begun == 0 or complete < begun)
        found[complete, begun] = room
    assert {(3, 3), (3, 4), (5, 5)} <= set(found)


def test_an_answer_beyond_max_length_leaves_no_label(llama3):
    one, _ = run(
        TextEncoder(llama3), "alpaca", Conversation((Turn("user", "u"), Turn("assistant", "a")), 3, 1), max_length=20
    )
    assert not one.supervised.any()
    assert one.stop_lost
    assert len(one.ids) == 20


MARKED = Conversation((*LONG.turns[:2], replace(LONG.turns[2], learned=False), *LONG.turns[3:]), 7, 1)


@pytest.mark.parametrize("train_on", ["responses", "last", "everything"])
def test_an_answer_that_the_data_marks_is_not_learned(llama3, train_on):
    encoder = TextEncoder(llama3)
    one, _ = run(encoder, "llama3", MARKED, train_on=train_on)
    whole, _ = run(encoder, "llama3", LONG, train_on=train_on)
    assert one.ids.tolist() == whole.ids.tolist()
    unlearned = text_of(encoder, one.ids[whole.supervised & ~one.supervised])
    assert unlearned == ("" if train_on == "last" else "ABCDEFGHIJ<|eot_id|>")
    assert not (one.supervised & ~whole.supervised).any()


def test_last_is_the_last_that_may_be_learned(llama3):
    encoder = TextEncoder(llama3)
    turns = (*LONG.turns[:4], replace(LONG.turns[4], learned=False))
    one, _ = run(encoder, "llama3", Conversation(turns, 7, 1), train_on="last")
    assert text_of(encoder, one.ids[one.supervised]) == "ABCDEFGHIJ<|eot_id|>"


def chunked(encoder: TextEncoder, text: str, max_length: int, bos_id: int | None) -> list[Encoded]:
    template = make_template("plain", encoder, (encoder.tokenizer.eos_token_id,))
    record = Conversation((Turn("text", text),), 3, 30)
    how = EncodeSettings(encoder=encoder, bos_id=bos_id, max_length=max_length, chunks=True)
    return list(encode([record], template, how, "d.json"))


@any_setting
@given(st.text(st.sampled_from("abc !é"), min_size=1, max_size=60).filter(str.strip), st.integers(2, 40), st.booleans())
def test_chunks_learn_every_token_once_and_lose_none(llama3, text, max_length, bos):
    """Against the text in one piece: the same targets, each predicted from the token before it."""
    encoder = TextEncoder(llama3)
    bos_id = encoder.bos_id if bos else None
    (whole,) = chunked(encoder, text, PLENTY, bos_id)
    parts = chunked(encoder, text, max_length, bos_id)
    assert all(len(part.ids) <= max_length for part in parts)

    def targets(one: Encoded) -> list[tuple[int, int]]:
        return [(int(one.ids[t - 1]), int(one.ids[t])) for t in np.flatnonzero(one.supervised) if t > 0]

    assert [pair for part in parts for pair in targets(part)] == targets(whole)
    assert sum(len(part.ids) for part in parts) == len(whole.ids) + len(parts) - 1  # one token of overlap each
    assert [part.continues for part in parts] == [False] + [True] * (len(parts) - 1)
    assert [part.continued for part in parts] == [True] * (len(parts) - 1) + [False]
    assert {(part.number, part.line, part.truncated) for part in parts} == {(3, 30, False)}
    assert sum(int((part.ids == encoder.bos_id).sum()) for part in parts) == int(bos)


def test_a_text_record_is_learned_in_full_and_cut_at_its_end(llama3):
    encoder = TextEncoder(llama3)
    record = Conversation((Turn("text", "abcdefgh"),), 1, 1)
    whole, _ = run(encoder, "plain", record)
    assert text_of(encoder, whole.ids) == "<|begin_of_text|>abcdefgh<|end_of_text|>"
    assert whole.supervised.tolist() == [False] + [True] * 9
    cut, _ = run(encoder, "plain", record, max_length=8)
    assert text_of(encoder, cut.ids) == "<|begin_of_text|>abcdefg"
    assert cut.stop_lost
    without, _ = run(encoder, "plain", record, bos=False)
    assert text_of(encoder, without.ids) == "abcdefgh<|end_of_text|>"
    assert not without.supervised[0]  # nothing comes before it that could predict it


def test_a_tokenizer_that_puts_blanks_gets_prompts_like_everyone_elses(legacy):
    encoder = TextEncoder(legacy)
    one, template = run(
        encoder, "tokenizer", Conversation((Turn("user", "Two and two?"), Turn("assistant", "The answer")))
    )
    prompt = legacy.apply_chat_template(
        [{"role": "user", "content": "Two and two?"}], add_generation_prompt=True, return_dict=False
    )
    assert one.ids[: len(prompt)].tolist() == prompt
    assert (
        text_of(encoder, one.ids) == "<s> [INST] Two and two? [/INST] The answer </s>"
    )  # ▁ after <s> is the tokenizer's
    assert template.stop_ids == (legacy.eos_token_id,)


def test_a_bos_that_the_template_writes_stands_once_and_can_be_refused(llama3):
    encoder = TextEncoder(llama3)
    conversation = Conversation((Turn("user", "u"), Turn("assistant", "a")))
    with_bos, _ = run(encoder, "tokenizer", conversation)
    without, _ = run(encoder, "tokenizer", conversation, bos=False)
    named, _ = run(encoder, "llama3", conversation)
    assert with_bos.ids.tolist() == [encoder.bos_id, *without.ids.tolist()] == named.ids.tolist()


def test_the_mask_counts_what_the_loss_counts(llama3):
    one, _ = run(TextEncoder(llama3), "tokenizer", LONG)
    batch = collate([Example(one.ids.astype(np.int64), one.supervised, 0)], pad_id=0)
    assert batch.weight == one.supervised.sum()
    assert batch.targets[batch.targets != IGNORE].tolist() == one.ids[one.supervised].tolist()


def test_faults_of_the_template_name_the_row(llama3):
    with raises_fault("SF-DATA-ROW", "d.json:1", 7, "alpaca"):
        run(TextEncoder(llama3), "alpaca", LONG)


def test_many_conversations_come_out_in_order(llama3, monkeypatch):
    monkeypatch.setattr(encode_module, "_CHUNK", 3)
    encoder = TextEncoder(llama3)
    template = make_template("plain", encoder, (encoder.tokenizer.eos_token_id,))
    many = [Conversation((Turn("user", "u" * n), Turn("assistant", "a")), n, n) for n in range(1, 8)]
    how = EncodeSettings(encoder=encoder, bos_id=None, max_length=99)
    found = list(encode(many, template, how, "d.json"))
    assert [one.number for one in found] == [one.line for one in found] == list(range(1, 8))
    assert [text_of(encoder, one.ids).index("\n") for one in found] == list(range(1, 8))


# --- the checks above have teeth: a twin breaks one line, and its check then fails ------------------------------------


def test_twin_with_chunks_side_by_side_loses_targets(llama3, monkeypatch):
    def side_by_side(whole, max_length):
        for start in range(0, len(whole.ids), max_length):
            part = slice(start, start + max_length)
            yield whole._replace(ids=whole.ids[part], supervised=whole.supervised[part])

    monkeypatch.setattr(encode_module, "in_chunks", side_by_side)
    with pytest.raises(AssertionError):
        test_chunks_learn_every_token_once_and_lose_none.hypothesis.inner_test(llama3, "abcabcabc", 5, True)


def test_twin_that_learns_what_the_data_marks(llama3, monkeypatch):
    monkeypatch.setattr(
        encode_module,
        "learned_turns",
        lambda runs, conversation, train_on: {run.turn for run in runs if run.answer},
    )
    with pytest.raises(AssertionError):
        test_an_answer_that_the_data_marks_is_not_learned(llama3, "responses")


def test_twin_that_doubles_bos(llama3, monkeypatch):
    monkeypatch.setattr(segments_module, "itertools", SimpleNamespace(takewhile=lambda unwanted, ids: ()))
    with pytest.raises(AssertionError):
        test_every_example_is_well_formed.hypothesis.inner_test(llama3, LONG, "tokenizer", True, "responses")


def test_twin_that_reads_control_tokens_in_texts(llama3, monkeypatch):
    monkeypatch.setattr(TextEncoder, "control_places", lambda self, text: [])
    spelled = Conversation((Turn("user", "a<|begin_of_text|>"), Turn("assistant", "b<|eot_id|>c")), 1, 1)
    with pytest.raises(AssertionError):
        test_every_example_is_well_formed.hypothesis.inner_test(llama3, spelled, "llama3", True, "responses")


def test_twin_that_leaves_the_stop_token_unlearned(llama3, monkeypatch):
    honest = encode_module._mask

    def without_last(runs, learned, train_on):
        mask = honest(runs, learned, train_on)
        mask[np.flatnonzero(mask)[-1]] = False
        return mask

    monkeypatch.setattr(encode_module, "_mask", without_last)
    with pytest.raises(AssertionError):
        test_every_example_is_well_formed.hypothesis.inner_test(llama3, LONG, "llama3", True, "responses")


def test_twin_that_cuts_the_end_first(llama3, monkeypatch):
    monkeypatch.setattr(
        encode_module, "choose_tokens", lambda *arguments: Truncation(np.arange(arguments[-1]), False, False)
    )
    with pytest.raises(AssertionError):
        test_what_is_cut_first(llama3, 3, "responses", "STUVWXYZQK|3456789|ABCDEFGHIJ|9876543210|JIHGFEDCBA|")


def test_twin_that_takes_a_long_prompt_for_a_short_one(llama3, monkeypatch):
    monkeypatch.setattr(cut_module, "_may_give_way", lambda prompt, max_length: prompt > max_length)
    with pytest.raises(AssertionError):
        test_a_short_prompt_needs_no_look_at_which_text_a_token_is_of.hypothesis.inner_test(
            llama3, LONG, "llama3", "responses", 150
        )


def test_twin_that_looks_at_every_prompt(llama3, monkeypatch):
    monkeypatch.setattr(cut_module, "_may_give_way", lambda prompt, max_length: True)
    with pytest.raises(pytest.fail.Exception):
        test_a_short_prompt_is_not_encoded_again(llama3, monkeypatch)
