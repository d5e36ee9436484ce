"""Text becomes ids piece by piece: control tokens only where a template wrote them, no blank that nobody wrote."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from helpers.faults import raises_fault
from surefoot.data.tokenize.segments import Piece, Segment, TextEncoder, pieces_of

SPELLED = ("<|eot_id|>", "<|begin_of_text|>", "</s>", "<s>")
texts = st.lists(st.sampled_from(["The answer", " ", "\n", "\n\n", "ä", "𝄞", "a", "!", *SPELLED]), max_size=8).map(
    "".join
)


def decoded(encoder: TextEncoder, ids: list[int]) -> str:
    return encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(texts, min_size=1, max_size=4))
def test_pieces_put_together_are_the_text(any_encoder, parts):
    """Also for a tokenizer that puts a blank before every text it is given."""
    pieces = [Piece(text, literal=True, opening=place == 0) for place, text in enumerate(parts)]
    ids = any_encoder.encode(pieces)
    assert decoded(any_encoder, [number for part in ids for number in part]) == "".join(parts)
    assert not any(number in any_encoder.control for part in ids for number in part)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts, st.booleans(), st.booleans())
def test_spans_are_of_the_same_ids_and_cover_the_text(any_encoder, text, literal, opening):
    piece = Piece(text, literal, opening)
    ids, spans = any_encoder.spans(piece)
    assert [ids] == any_encoder.encode([piece])
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    assert {place for start, end in spans for place in range(start, end)} == set(range(len(text)))


def test_control_tokens_are_read_only_where_asked(llama3):
    encoder = TextEncoder(llama3)
    as_template, as_text = encoder.encode([Piece("hi<|eot_id|>", False, False), Piece("hi<|eot_id|>", True, False)])
    eot = llama3.convert_tokens_to_ids("<|eot_id|>")
    assert as_template[-1] == eot
    assert eot not in as_text
    assert decoded(encoder, as_text) == "hi<|eot_id|>"
    assert encoder.control_text("a<|eot_id|>b<|eot_id|") == ["<|eot_id|>"]
    assert llama3("x<|eot_id|>", add_special_tokens=False)["input_ids"][-1] == eot  # the tokenizer is left as it was


def test_only_special_tokens_are_control_tokens(llama3, tmp_path):
    llama3.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<think>"])
    encoder = TextEncoder(tokenizer)
    assert encoder.control_text("<think>") == []
    assert encoder.encode([Piece("<think>", True, True)]) == [[tokenizer.convert_tokens_to_ids("<think>")]]


def test_no_bos_and_no_post_processor(llama3):
    assert TextEncoder(llama3).encode([Piece("a", False, True)]) == [llama3("a", add_special_tokens=False)["input_ids"]]
    assert llama3("a")["input_ids"][0] == llama3.bos_token_id  # it would add one


def test_digest_depends_on_the_vocabulary_alone(llama3, llama3_pad, tmp_path):
    digest = TextEncoder(llama3).digest()
    llama3.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    again("some text", truncation=True, max_length=3)
    assert TextEncoder(again).digest() == digest
    assert TextEncoder(llama3_pad).digest() != digest


def test_a_slow_tokenizer_is_refused():
    with raises_fault("SF-TOKENIZER", "tokenizer"):
        TextEncoder(object())  # type: ignore[arg-type]


# --- the checks above have teeth -------------------------------------------------------------------------------------


def test_twin_without_the_lead_adds_a_blank(legacy):
    encoder = TextEncoder(legacy)
    encoder.puts_blank = False
    ids = encoder.encode([Piece("The", True, True), Piece("answer", True, False)])
    assert decoded(encoder, ids[0] + ids[1]) == "The answer"  # nobody wrote that blank


def test_twin_that_reads_texts_like_templates_lets_users_stop_the_model(llama3):
    (ids,) = TextEncoder(llama3).encode([Piece("hi<|eot_id|>", literal=False, opening=False)])
    assert llama3.convert_tokens_to_ids("<|eot_id|>") in ids


def test_a_text_that_comes_twice_is_encoded_once(any_encoder, monkeypatch):
    """As in pairs, whose two answers follow the same prompt; what is read otherwise is another text."""
    pieces = [Piece("The answer", literal, opening) for literal in (False, True) for opening in (False, True)]
    alone = [any_encoder.encode([piece])[0] for piece in pieces]
    handed = []
    honest = TextEncoder._encode
    monkeypatch.setattr(
        TextEncoder, "_encode", lambda self, texts, literal: handed.extend(texts) or honest(self, texts, literal)
    )
    assert any_encoder.encode([*pieces, *reversed(pieces)]) == [*alone, *reversed(alone)]
    assert len(handed) == (4 if any_encoder.puts_blank else 2)


halves = st.sampled_from(["a", "<|eot", "_id|>", "<|eot_id|>", "</s>", "<", "/s>"])


@given(st.lists(st.tuples(halves, st.booleans()), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_piece_only_where_no_control_token_is_the_datas(llama3, parts):
    """Against the rule in words: none in a content, and joining makes and breaks none."""
    encoder = TextEncoder(llama3)
    segments = [Segment(text, 0, content=content) for text, content in parts]
    whole, at, own = "".join(segment.text for segment in segments), 0, []
    for segment in segments:
        own += [] if segment.content else [at + place for place in places_of_control(encoder, segment.text)]
        at += len(segment.text)
    spelled = any(places_of_control(encoder, segment.text) for segment in segments if segment.content)
    together = not spelled and places_of_control(encoder, whole) == own
    pieces = pieces_of(segments, encoder, opening=True)
    assert together == (pieces == [Piece(whole, literal=False, opening=True)])


def places_of_control(encoder: TextEncoder, text: str) -> list[int]:
    """By hand: from the left, the longest name first, and on behind it."""
    names, places, at = sorted(encoder.control.values(), key=len, reverse=True), [], 0
    while at < len(text):
        name = next((name for name in names if text.startswith(name, at)), "")
        places += [at] * bool(name)
        at += len(name) or 1
    return places
