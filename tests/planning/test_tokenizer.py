"""PAD, BOS, stop tokens and template, over tokenizers laid out like real ones."""

import dataclasses
import json

import pytest

from helpers.faults import gives
from helpers.model_layouts import (
    LLAMA2_7B,
    LLAMA3_CHAT,
    LLAMA31_8B,
    llama2_tokenizer,
    llama3_tokenizer,
    model_facts,
    run_config,
    small_tokenizer,
)
from surefoot.families.bos_zero import BOS_FILE, bos_file
from surefoot.families.llama_like import LLAMA
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning import tokenizer as module
from surefoot.planning.notes import Notes
from surefoot.planning.tokenizer import plan_tokenizer

SMALL = LLAMA31_8B | {"vocab_size": 12}
TURNS = ["<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@pytest.fixture
def decide(tmp_path):
    def decide(files, config=SMALL, *, family=True, **request):
        notes = Notes()
        model = model_facts(tmp_path / "model", config)
        if not family:
            model = dataclasses.replace(model, family=None)
        return plan_tokenizer(run_config(**request), model, files, notes), notes

    return decide


@pytest.fixture
def small(tmp_path):
    return lambda **changes: small_tokenizer(tmp_path / "tokenizer", **changes)


def keys(notes):
    return [fault.where for fault in notes.faults]


def pad(plan):
    return plan.pad_token.value, plan.pad_id, plan.added_rows


class TestPad:
    def test_the_tokenizers_own_comes_first(self, decide, small):
        roles = {"eos_token": "</s>", "pad_token": "<pad>"}
        plan, notes = decide(small(specials=["<s>", "</s>", "<pad>"], roles=roles), SMALL | {"vocab_size": 13})
        assert pad(plan) == ("<pad>", 12, 0)
        assert not notes.cautions

    def test_llama_30_gets_a_reserved_token_and_never_the_exclamation_mark(self, decide, tmp_path):
        plan, _ = decide(read_tokenizer_facts(llama3_tokenizer(tmp_path)), LLAMA31_8B)
        assert pad(plan) == ("<|reserved_special_token_0|>", 128_002, 0)
        assert plan.pad_token.source == "family"

    def test_llama_31_gets_its_reserved_pad(self, decide, tmp_path):
        plan, _ = decide(read_tokenizer_facts(llama3_tokenizer(tmp_path, pad=True)), LLAMA31_8B)
        assert pad(plan) == ("<|finetune_right_pad_id|>", 128_004, 0)

    def test_llama_2_gets_unk_which_is_special_though_its_id_is_0(self, decide, tmp_path):
        plan, _ = decide(read_tokenizer_facts(llama2_tokenizer(tmp_path)), LLAMA2_7B)
        assert pad(plan) == ("<unk>", 0, 0)

    def test_a_pad_that_text_can_contain_is_passed_over(self, decide, small):
        plan, notes = decide(small(roles={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "!"}))
        assert plan.pad_id != 0
        assert "'!'" in notes.cautions[0]

    def test_trusting_such_a_pad_would_be_noticed(self, decide, small, monkeypatch):
        monkeypatch.setattr("surefoot.families.tokenizer_facts.TokenizerFacts.is_special", lambda self, token: True)
        with pytest.raises(AssertionError):
            self.test_a_pad_that_text_can_contain_is_passed_over(decide, small)

    def test_a_pad_beyond_the_embedding_is_passed_over(self, decide, small):
        roles = {"eos_token": "</s>", "pad_token": "<pad>"}
        plan, notes = decide(small(specials=["<s>", "</s>", "<pad>"], roles=roles))
        assert pad(plan) == ("</s>", 11, 0)
        assert gives("\n".join(notes.cautions), 12)  # rows of the embedding

    def test_a_reserved_token_that_the_template_writes_is_not_free(self, decide, small):
        specials = ["<s>", "</s>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]
        config = SMALL | {"vocab_size": 14}
        free, _ = decide(small(specials=specials), config)
        taken, _ = decide(small(specials=specials, chat_template="x <|reserved_special_token_0|>"), config)
        assert free.pad_id == 12
        assert taken.pad_id == 13

    def test_a_reserved_token_that_ends_a_generation_is_not_free(self, decide, small):
        specials = ["<s>", "</s>", "<|reserved_special_token_0|>"]
        plan, _ = decide(small(specials=specials, stops=[11, 12]), SMALL | {"vocab_size": 13})
        assert plan.pad_id == 11

    def test_a_spare_row_belongs_to_no_token(self, decide, small):
        plan, _ = decide(small(), SMALL | {"vocab_size": 16})
        assert pad(plan) == ("<|pad|>", 12, 0)

    def test_eos_is_the_last_resort(self, decide, small):
        plan, _ = decide(small())
        assert pad(plan) == ("</s>", 11, 0)

    def test_an_unknown_family_has_no_reserved_tokens(self, decide, small):
        tokenizer = small(specials=["<s>", "</s>", "<|reserved_special_token_0|>"])
        plan, _ = decide(tokenizer, SMALL | {"vocab_size": 13}, family=False)
        assert plan.pad_token.value == "</s>"

    @pytest.mark.parametrize(("rows", "added"), [(12, 1), (13, 0), (20, 0)])
    def test_add_appends_a_row_only_where_none_is_spare(self, decide, small, rows, added):
        plan, _ = decide(small(), SMALL | {"vocab_size": rows}, tokenizer={"pad": "add"})
        assert pad(plan) == ("<|pad|>", 12, added)
        assert plan.pad_token.source == "user"

    @pytest.mark.parametrize(("rows", "added"), [(14, 0), (13, 0), (12, 1)])
    def test_add_takes_the_added_token_that_the_tokenizer_has(self, decide, small, rows, added):
        """As the tokenizer of a run that added it: another id under that text would be none of the tokenizer's."""
        tokenizer = small(specials=["<s>", "</s>", "<|pad|>", "<last>"])
        plan, notes = decide(tokenizer, SMALL | {"vocab_size": rows}, tokenizer={"pad": "add"})
        assert pad(plan) == ("<|pad|>", 12, added)
        assert not notes.faults

    def test_passing_it_over_would_be_noticed(self, decide, small, monkeypatch):
        monkeypatch.setattr(module, "ADDED_PAD", "<|other|>")
        with pytest.raises(AssertionError):
            self.test_add_takes_the_added_token_that_the_tokenizer_has(decide, small, 14, 0)

    def test_an_ordinary_token_is_not_added_as_pad(self, decide, small):
        ordinary = small(ordinary=["!", *"abcdefgh", "<|pad|>"])
        _, notes = decide(ordinary, SMALL | {"vocab_size": 20}, tokenizer={"pad": "add"})
        assert keys(notes) == ["tokenizer.pad"]
        assert gives(notes.faults[0].what, 9)  # its id
        assert gives(notes.faults[0].what, "<|pad|>")
        plan, notes = decide(ordinary, SMALL | {"vocab_size": 20})  # nor does it get a spare row
        assert (pad(plan), notes.faults) == (("</s>", 11, 0), [])

    @pytest.mark.parametrize("rows", [12, 20])
    def test_nothing_else_adds_rows(self, decide, small, rows):
        assert decide(small(), SMALL | {"vocab_size": rows})[0].added_rows == 0

    def test_a_named_token_must_exist_and_be_special(self, decide, small):
        plan, notes = decide(small(), tokenizer={"pad": "</s>"})
        assert not notes.faults
        assert pad(plan) == ("</s>", 11, 0)
        ordinary = decide(small(), tokenizer={"pad": "!"})[1]
        missing = decide(small(), tokenizer={"pad": "</S>"})[1]
        assert keys(ordinary) == keys(missing) == ["tokenizer.pad"]
        assert "ordinary" in str(ordinary.faults[0])
        assert gives(missing.faults[0].fix, "</s>")

    def test_a_named_token_needs_a_row(self, decide, small):
        _, notes = decide(small(specials=["<s>", "</s>", "<pad>"]), tokenizer={"pad": "<pad>"})
        assert keys(notes) == ["tokenizer.pad"]


class TestRows:
    def test_ordinary_tokens_without_a_row_are_refused(self, decide, small):
        _, notes = decide(small(), SMALL | {"vocab_size": 9})
        assert keys(notes)[0] == "model"

    def test_special_ones_are_only_mentioned(self, decide, small):
        _, notes = decide(small(specials=["<s>", "</s>", "<x>"]))
        assert not notes.faults
        assert "<x>" in notes.cautions[0]


class TestBos:
    def test_llama_gets_it_whether_or_not_the_tokenizer_adds_one(self, decide, small):
        for by_processor in (True, False):
            plan, _ = decide(small(bos_by_processor=by_processor))
            assert plan.bos.value is True
            assert plan.bos_id == 10

    def test_a_family_that_uses_none_gets_none(self, decide, small, monkeypatch):
        other = dataclasses.replace(LLAMA, uses_bos=False)
        monkeypatch.setattr("surefoot.families.model_facts.find", lambda model_type: other)
        assert decide(small(bos_by_processor=True))[0].bos.value is False

    def test_an_unknown_family_follows_its_tokenizer(self, decide, small):
        assert decide(small(bos_by_processor=True), family=False)[0].bos.value is True
        assert decide(small(bos_by_processor=False), family=False)[0].bos.value is False

    def test_a_token_that_begins_turns_is_no_bos(self, decide, small):
        """SmolLM2 says that it is a Llama, and names <|im_start|> as BOS."""
        roles = {"bos_token": "<|im_start|>", "eos_token": "</s>"}
        begins_turns = small(specials=["<|im_start|>", "</s>"], roles=roles)
        assert decide(begins_turns)[0].bos.value is False
        assert decide(begins_turns, bos={"prepend": "on"})[0].bos.value is True  # asked for
        other = small(specials=["<s>", "</s>"], roles=roles | {"bos_token": "<s>"})
        assert decide(other)[0].bos.value is True  # twin

    def test_without_a_token_there_is_none(self, decide, small):
        tokenizer = small(roles={"eos_token": "</s>"})
        plan, notes = decide(tokenizer)
        assert (plan.bos.value, plan.bos_id, notes.cautions) == (False, None, [])

    @pytest.mark.parametrize("request_", [{"prepend": "on"}, {"scale": 0.1}, {"prepend": "on", "scale": 0.0}])
    def test_eos_stands_in_where_one_is_asked_for(self, decide, small, request_):
        plan, notes = decide(small(roles={"eos_token": "</s>"}), bos=request_)
        assert (plan.bos.value, plan.bos.source, plan.bos_id) == (True, "user", 11)
        assert "</s>" in notes.cautions[0]
        assert not decide(small(), bos=request_)[1].cautions  # twin: with a BOS nothing is said

    def test_a_scale_forces_it_on(self, decide, small, monkeypatch):
        other = dataclasses.replace(LLAMA, uses_bos=False)
        monkeypatch.setattr("surefoot.families.model_facts.find", lambda model_type: other)
        plan, _ = decide(small(bos_by_processor=True), bos={"scale": 0.1})
        assert plan.bos.value is True
        assert [gives(plan.bos.reason, one) for one in ("bos.scale", 0.1)] == [True, True]
        assert (plan.bos_scale.value, plan.bos_scale.source) == (0.1, "user")
        assert not decide(small(bos_by_processor=True), bos={"scale": 0.1})[1].cautions
        assert "bos.scale 2" in decide(small(bos_by_processor=True), bos={"scale": 2.0})[1].cautions[0]
        plan, _ = decide(small(bos_by_processor=True), bos={"scale": 1.0})
        assert (plan.bos.value, plan.bos_scale.value) == (False, 1.0)

    def test_a_base_that_was_trained_with_a_factor_keeps_it_or_the_run_is_refused(self, decide, small, tmp_path):
        (tmp_path / "model").mkdir()
        path = tmp_path / "model" / BOS_FILE
        path.write_text(json.dumps(bos_file(0.1)))
        plan, notes = decide(small(), bos={"scale": 0.1})
        assert (plan.bos_scale.value, notes.faults, notes.cautions) == (0.1, [], [])
        assert keys(decide(small())[1]) == ["bos.scale"]
        plan, notes = decide(small(), bos={"scale": 0.2})
        assert plan.bos_scale.value == 0.2
        (caution,) = notes.cautions
        assert all(gives(caution, one) for one in ("bos.scale", 0.2, 0.1, BOS_FILE)), caution
        path.unlink()
        assert not decide(small())[1].faults

    def test_what_is_asked_for_wins(self, decide, small):
        plan, _ = decide(small(bos_by_processor=True), bos={"prepend": "off"})
        assert (plan.bos.value, plan.bos.source) == (False, "user")


class TestTemplate:
    def test_auto_takes_the_tokenizers_own_else_alpaca(self, decide, small):
        assert decide(small(chat_template="{{ x }}"))[0].template.value == "tokenizer"
        assert decide(small())[0].template.value == "alpaca"

    def test_names(self, decide, small):
        for name in ("alpaca", "plain"):
            plan, notes = decide(small(), data={"train": "unused.jsonl", "template": name})
            assert not notes.faults
            assert (plan.template.value, plan.template.source) == (name, "user")
        _, notes = decide(small(), data={"train": "unused.jsonl", "template": "alpacca"})
        assert [(fault.code, fault.where) for fault in notes.faults] == [("SF-DATA-TEMPLATE", "data.template")]
        assert gives(notes.faults[0].fix, "alpaca")

    def test_the_tokenizers_own_must_exist(self, decide, small):
        _, notes = decide(small(), data={"train": "unused.jsonl", "template": "tokenizer"})
        assert keys(notes) == ["data.template"]

    def test_llama3_needs_its_tokens(self, decide, small):
        request = {"train": "unused.jsonl", "template": "llama3"}
        _, notes = decide(small(specials=TURNS[:-1]), SMALL | {"vocab_size": 14}, data=request)
        assert keys(notes) == ["data.template"]
        assert "<|eot_id|>" in str(notes.faults[0])
        assert "<|start_header_id|>" not in str(notes.faults[0])
        assert not decide(small(specials=TURNS), SMALL | {"vocab_size": 15}, data=request)[1].faults


class TestStop:
    CONFIG = SMALL | {"vocab_size": 15}

    def test_eos_comes_first_then_the_templates_turn_end(self, decide, small):
        plan, _ = decide(small(specials=TURNS, chat_template=LLAMA3_CHAT), self.CONFIG)
        assert plan.stop.value == (11, 14)

    def test_a_template_that_writes_no_turn_end_stops_at_eos(self, decide, small):
        assert decide(small(specials=TURNS), self.CONFIG)[0].stop.value == (11,)

    def test_generation_config_adds_its_own(self, decide, small):
        tokenizer = small(specials=TURNS, chat_template=LLAMA3_CHAT, stops=[11, 14, 13])
        plan, notes = decide(tokenizer, self.CONFIG)
        assert plan.stop.value == (11, 14, 13)
        assert not notes.cautions

    def test_a_turn_end_that_generation_config_forgets_is_said(self, decide, small):
        _, notes = decide(small(specials=TURNS, chat_template=LLAMA3_CHAT, stops=[11]), self.CONFIG)
        assert "<|eot_id|>" in notes.cautions[0]

    def test_an_ordinary_token_never_stops(self, decide, small):
        assert decide(small(stops=[11, 3]))[0].stop.value == (11,)

    def test_without_eos_the_run_is_refused(self, decide, small):
        assert keys(decide(small(roles={"bos_token": "<s>"}))[1]) == ["tokenizer"]
        _, notes = decide(small(roles={"bos_token": "<s>", "eos_token": "<end>"}))
        assert [(fault.code, fault.where) for fault in notes.faults] == [("SF-TOKENIZER", "tokenizer")]
        assert gives(notes.faults[0].what, "<end>")


class TestAdded:
    def test_tokens_come_first_and_pad_behind_them(self, decide, small):
        plan, notes = decide(small(), tokenizer={"add": ["<a>", "<b>"], "add_special": ["<c>"], "pad": "add"})
        assert not notes.faults
        assert (plan.added.value, plan.added_ids, plan.added_special) == (("<a>", "<b>", "<c>"), (12, 13, 14), ("<c>",))
        assert pad(plan) == ("<|pad|>", 15, 4)
        assert plan.rows == 16

    def test_rows_that_the_embedding_has_are_used(self, decide, small):
        plan, _ = decide(small(), SMALL | {"vocab_size": 13}, tokenizer={"add": ["<a>", "<b>"]})
        assert (plan.added_ids, plan.added_rows, plan.rows) == ((12, 13), 1, 14)
        plan, _ = decide(small(), SMALL | {"vocab_size": 64}, tokenizer={"add": ["<a>", "<b>"]})
        assert (plan.added_ids, plan.added_rows, plan.rows) == ((12, 13), 0, None)
        assert plan.pad_id == 14  # twin: without the tokens it is 12

    def test_a_token_that_is_there_needs_no_row(self, decide, small):
        plan, _ = decide(small(), tokenizer={"add_special": ["</s>"]})
        assert (plan.added_ids, plan.added_rows) == ((11,), 0)

    def test_a_control_token_may_become_eos(self, decide, small):
        request = {"train": "unused.jsonl", "template": "chatml"}
        tokens = {"add_special": ["<|im_start|>", "<|im_end|>"], "eos": "<|im_end|>"}
        plan, notes = decide(small(), data=request, tokenizer=tokens)
        assert not notes.faults
        assert plan.stop.value == (13,)
        assert keys(decide(small(), data=request, tokenizer=tokens | {"add_special": []})[1]) == [
            "tokenizer.eos",
            "data.template",
        ]


class TestUntrainedChatTokens:
    def test_a_llama_3_base_model_is_warned_about(self, decide, tmp_path):
        request = {"train": "unused.jsonl", "template": "llama3"}
        base = read_tokenizer_facts(llama3_tokenizer(tmp_path / "base"))
        chat = read_tokenizer_facts(llama3_tokenizer(tmp_path / "chat", chat=True))
        assert "base model" in "\n".join(decide(base, LLAMA31_8B, data=request)[1].cautions)
        assert not decide(base, LLAMA31_8B)[1].cautions  # alpaca writes no chat tokens
        assert not decide(chat, LLAMA31_8B)[1].cautions


class TestMaxLength:
    @pytest.mark.parametrize(("positions", "expected"), [(131_072, 2048), (2048, 2048), (2047, 2047), (512, 512)])
    def test_auto_is_the_usual_length_or_all_positions(self, decide, small, positions, expected):
        plan, notes = decide(small(), SMALL | {"max_position_embeddings": positions})
        assert not notes.faults
        assert (plan.max_length.value, plan.max_length.source) == (expected, "default")

    def test_auto_without_a_limit_would_be_noticed(self, decide, small, monkeypatch):
        monkeypatch.setattr(module, "USUAL_LENGTH", 2**20)
        with pytest.raises(AssertionError):
            self.test_auto_is_the_usual_length_or_all_positions(decide, small, 131_072, 2048)

    def test_what_is_asked_for_is_honoured_up_to_the_models_positions(self, decide, small):
        config = SMALL | {"max_position_embeddings": 512}
        plan, notes = decide(small(), config, data={"train": "unused.jsonl", "max_length": 512})
        assert not notes.faults
        assert (plan.max_length.value, plan.max_length.source) == (512, "user")
        _, notes = decide(small(), config, data={"train": "unused.jsonl", "max_length": 513})
        assert keys(notes) == ["data.max_length"]
        assert gives(notes.faults[0].fix, 512)


@pytest.mark.parametrize(("role", "token"), [("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>")])
def test_tokens_of_the_config_must_be_the_tokenizers_own(decide, small, role, token):
    specials = ["<s>", "</s>", "<unk>"]
    files = small(specials=specials, roles={f"{role}_token": token})
    config = SMALL | {"vocab_size": 16}
    assert f"tokenizer.{role}" not in keys(decide(files, config, tokenizer={role: token})[1])
    assert f"tokenizer.{role}" in keys(decide(files, config, tokenizer={role: "<other>"})[1])
    unset = small(specials=specials, roles={})
    assert f"tokenizer.{role}" in keys(decide(unset, config, tokenizer={role: token})[1])
