"""The template that is planned: by name, by file or by itself; what it needs, what ends its turns, what it warns of."""

import pytest

from helpers.faults import gives
from helpers.model_layouts import LLAMA3_CHAT, LLAMA31_8B, model_facts, small_tokenizer
from surefoot.families import FAMILIES
from surefoot.families.llama_like import LLAMA
from surefoot.families.template_row import Dialogue
from surefoot.families.templates import ANYWHERE, NAMES, ROWS
from surefoot.planning.notes import Notes
from surefoot.planning.plan import Choice
from surefoot.planning.templates import fallback_templates, plan_template, turn_ends

CONTROL = list(dict.fromkeys(token for row in ROWS for token in row.control))


@pytest.fixture
def decide(tmp_path):
    def decide(name, **files):
        notes = Notes()
        facts = small_tokenizer(tmp_path / "tokenizer", **files)
        model = model_facts(tmp_path / "model", LLAMA31_8B | {"vocab_size": facts.size})
        return plan_template(name, model, facts, notes), notes, facts

    return decide


def check_every_row_is_accepted_where_its_tokens_are_and_refused_with_their_names_where_not(decide, row):
    choice, notes, facts = decide(row.name, specials=["<s>", "</s>", *CONTROL])
    assert (choice.value, choice.source, notes.faults) == (row.name, "user", [])
    assert turn_ends(row.name, LLAMA, facts) == list(row.stops)
    _, notes, facts = decide(row.name)
    assert [fault.where for fault in notes.faults] == ["data.template"] * bool(row.control)
    assert all(token in fault.what for fault in notes.faults for token in row.control)
    assert all(fault.fix.endswith(ANYWHERE) for fault in notes.faults)
    assert turn_ends(row.name, LLAMA, facts) == []


def test_every_row_is_accepted_where_its_tokens_are_and_refused_with_their_names_where_not(decide):
    for row in ROWS:
        check_every_row_is_accepted_where_its_tokens_are_and_refused_with_their_names_where_not(decide, row)


def test_what_is_recommended_everywhere_works_everywhere():
    named = ANYWHERE.replace(" or ", ", ").split(", ")
    assert [row.control for row in ROWS if row.name in named] == [()] * 3


def test_a_misspelt_name_is_recognized(decide):
    (near,), (unknown,) = (decide(name)[1].faults for name in ("chat-ml", "klingon"))
    assert {(fault.code, fault.where) for fault in (near, unknown)} == {("SF-DATA-TEMPLATE", "data.template")}
    assert gives(near.fix, "chatml")
    assert all(gives(unknown.fix, name) for name in NAMES)


def test_a_file_is_read_for_its_turn_ends_and_refused_where_it_is_missing(decide, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages }}<|eot_id|>")
    choice, notes, facts = decide(str(path), specials=["<s>", "</s>", *CONTROL])
    assert (choice.value, notes.faults) == (str(path), [])
    assert turn_ends(str(path), LLAMA, facts) == ["<|eot_id|>"]
    assert turn_ends(path.read_text(), LLAMA, facts) == ["<|eot_id|>"]  # in the config itself
    _, notes, _ = decide(str(tmp_path / "no.jinja"))
    assert notes.faults[0].where == "data.template"
    assert str(tmp_path / "no.jinja") in notes.faults[0].what


def test_without_a_chat_template_alpaca_is_planned_and_the_reason_names_dialogues(decide):
    choice, _, _ = decide("auto")
    assert choice.value == "alpaca"
    assert gives(choice.reason, "vicuna")
    assert decide("auto", chat_template="{{ messages }}")[0].value == "tokenizer"


@pytest.mark.parametrize(
    ("name", "warned"), [("llama3", True), ("tokenizer", True), ("alpaca", False), ("chatml", False)]
)
def test_a_base_model_that_never_saw_the_tokens_is_warned_of(tmp_path, name, warned):
    notes = Notes()
    specials = ["<s>", "</s>", *CONTROL]
    facts = small_tokenizer(tmp_path / "tokenizer", specials=specials, chat_template=LLAMA3_CHAT)
    plan_template(name, model_facts(tmp_path / "model", LLAMA31_8B), facts, notes)
    assert bool(notes.cautions) == warned


def test_rows_have_one_place_for_each_text_and_stops_among_their_tokens():
    for row in ROWS:
        slots = (row.user, row.system) if isinstance(row, Dialogue) else (row.instruction, row.input)
        assert all(slot.count("{content}") == 1 for slot in slots)
        assert set(row.stops) <= set(row.control)
        assert "{" not in row.about
    assert len(set(NAMES)) == len(NAMES)


def test_twin_tokens_that_are_ordinary_are_not_enough(decide, monkeypatch):
    monkeypatch.setattr("surefoot.families.tokenizer_facts.TokenizerFacts.is_special", lambda self, token: True)
    with pytest.raises(AssertionError):
        check_every_row_is_accepted_where_its_tokens_are_and_refused_with_their_names_where_not(decide, ROWS[0])


def test_the_key_explains_every_name():
    from surefoot.config.keys import all_keys

    words = all_keys()["data.template"].help.replace(",", " ").replace(".", " ").split()
    assert set(NAMES) <= set(words)


def test_every_row_that_a_family_names_is_a_template_for_dialogues_with_tools():
    rows = {row.name: row for row in ROWS}
    for family in FAMILIES:
        for name in family.templates:
            assert isinstance(rows[name], Dialogue)
            assert rows[name].tools is not None


def test_auto_falls_back_on_rows_that_the_tokenizer_knows(decide):
    for specials, source, expected in [
        (["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|start_header_id|>", ("llama3",)),
        (["<|im_start|>", "<|im_end|>"], "<|im_start|>", ("chatml",)),
        ([], "<|user|>\n{{ content }}", ("zephyr",)),
        ([], "[INST] {{ content }} [/INST]", ("llama2",)),
        ([], "### {{ content }}", ()),
    ]:
        choice, _, facts = decide("auto", specials=["<s>", "</s>", *specials], chat_template=source)
        assert fallback_templates(choice, LLAMA, facts) == expected
        assert fallback_templates(choice, None, facts) == ()
        assert fallback_templates(Choice(choice.value, "asked for", "user"), LLAMA, facts) == ()
        assert fallback_templates(Choice("alpaca", "", "default"), LLAMA, facts) == ("vicuna",)
