"""Facts from tokenizer files against what transformers makes of the same files."""

import json

import pytest
from transformers import AutoTokenizer

from helpers.faults import raises_fault
from helpers.model_layouts import llama2_tokenizer, llama3_tokenizer, small_tokenizer, tokenizer_files
from helpers.tiny_models import llama3_tokenizer as real_tokenizer
from surefoot.families.tokenizer_facts import read_tokenizer_facts


@pytest.mark.parametrize("chat_template", [True, False])
@pytest.mark.parametrize("pad", [True, False])
def test_facts_agree_with_transformers(tmp_path, chat_template, pad):
    folder = real_tokenizer(tmp_path, chat_template=chat_template, pad=pad)
    facts, tokenizer = read_tokenizer_facts(folder), AutoTokenizer.from_pretrained(folder)
    assert dict(facts.ids) == tokenizer.get_vocab()
    assert facts.size == len(tokenizer)
    assert (facts.bos.text, facts.bos.id) == (tokenizer.bos_token, tokenizer.bos_token_id)
    assert (facts.eos.text, facts.eos.id) == (tokenizer.eos_token, tokenizer.eos_token_id)
    assert facts.pad is None
    assert tokenizer.pad_token is None
    assert facts.chat_template == tokenizer.chat_template
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert dict(facts.special) == added
    assert facts.adds_bos is (tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id) is True


def test_text_becomes_no_special_token_and_every_ordinary_one_can_come_from_text(tmp_path):
    folder = real_tokenizer(tmp_path)
    facts, tokenizer = read_tokenizer_facts(folder), AutoTokenizer.from_pretrained(folder)
    seen = set(tokenizer("! What is the colour of the sky?", add_special_tokens=False)["input_ids"])
    assert not seen & facts.special.keys()
    assert max(seen) < facts.ordinary_size <= min(facts.special)


def test_llama3_layout(tmp_path):
    facts = read_tokenizer_facts(llama3_tokenizer(tmp_path))
    assert facts.ids["!"] == 0
    assert not facts.is_special("!")
    assert (facts.size, facts.ordinary_size, facts.bos.id) == (128_256, 128_000, 128_000)
    assert facts.pad is None
    assert facts.chat_template is None


def test_llama2_layout(tmp_path):
    facts = read_tokenizer_facts(llama2_tokenizer(tmp_path))
    assert facts.is_special("<unk>")
    assert facts.ids["<unk>"] == 0
    assert facts.size == facts.ordinary_size == 32_000
    assert facts.adds_bos


def test_a_token_may_be_written_as_text_or_as_an_object(tmp_path):
    facts = small_tokenizer(tmp_path, roles={"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    assert facts.bos.text == "<s>"
    assert facts.eos.text == "</s>"


def test_special_tokens_map_fills_what_the_config_leaves_open(tmp_path):
    small_tokenizer(tmp_path, roles={"eos_token": "</s>", "bos_token": None})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "a"}))
    facts = read_tokenizer_facts(tmp_path)
    assert facts.bos.text == "<s>"
    assert facts.eos.text == "</s>"


def test_tokens_that_only_the_config_lists_are_in_the_vocabulary(tmp_path):
    small_tokenizer(
        tmp_path, roles={"eos_token": "</s>", "added_tokens_decoder": {"12": {"content": "<p>", "special": True}}}
    )
    facts = read_tokenizer_facts(tmp_path)
    assert facts.is_special("<p>")
    assert facts.size == 13


def test_a_role_whose_token_does_not_exist_is_missing(tmp_path):
    facts = small_tokenizer(tmp_path, roles={"eos_token": "</s>", "pad_token": "[PAD]"})
    assert facts.pad is None
    assert facts.missing == {"pad": "[PAD]"}


def test_naming_an_ordinary_token_as_pad_does_not_make_it_special(tmp_path):
    facts = small_tokenizer(tmp_path, roles={"eos_token": "</s>", "pad_token": "!"})
    assert facts.pad.id == 0
    assert not facts.is_special("!")


def test_stop_tokens_of_generation_config(tmp_path):
    facts = small_tokenizer(tmp_path, stops=[11, 10])
    assert facts.stops == (11, 10)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 11}')
    assert read_tokenizer_facts(tmp_path).stops == (11,)


def test_the_jinja_file_comes_before_the_config(tmp_path):
    small_tokenizer(tmp_path, chat_template="config's")
    assert read_tokenizer_facts(tmp_path).chat_template == "config's"
    (tmp_path / "chat_template.jinja").write_text("file's")
    assert read_tokenizer_facts(tmp_path).chat_template == "file's"


def test_of_named_templates_the_default_counts(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    roles = {"eos_token": "</s>", "chat_template": named}
    assert small_tokenizer(tmp_path, roles=roles).chat_template == "D"


@pytest.mark.parametrize(
    ("name", "text", "code", "where"),
    [
        ("tokenizer.json", None, "SF-FILE-MISSING", "tokenizer.json"),
        ("tokenizer.json", '{"model": {"vocab": [["a", 0]]}}', "SF-TOKENIZER", "tokenizer.json"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}', "SF-TOKENIZER", ""),
        ("tokenizer_config.json", "{,}", "SF-FILE-UNREADABLE", "tokenizer_config.json:1:2"),
        ("generation_config.json", "[]", "SF-FILE-UNREADABLE", "generation_config.json"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, text, code, where):
    tokenizer_files(tmp_path, ["a"], ["</s>"], roles={"eos_token": "</s>"})
    (tmp_path / name).unlink(missing_ok=True)
    if text is not None:
        (tmp_path / name).write_text(text)
    with raises_fault(code, tmp_path / where):
        read_tokenizer_facts(tmp_path)


ORDINARY, CONTROL = ["<think>", "the", "<call>"], ["<|im_start|>", "<think>"]


@pytest.mark.parametrize("eos", [None, "<|im_start|>"])
def test_added_tokens_get_the_ids_that_transformers_gives(tmp_path, eos):
    """Some are in the vocabulary, one is named twice."""
    folder = real_tokenizer(tmp_path)
    facts = read_tokenizer_facts(folder).with_added(ORDINARY, CONTROL, eos)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(ORDINARY)
    tokenizer.add_tokens(CONTROL, special_tokens=True)
    assert [facts.ids[token] for token in (*ORDINARY, *CONTROL)] == tokenizer.convert_tokens_to_ids(
        [*ORDINARY, *CONTROL]
    )
    assert facts.size == len(tokenizer)
    assert [facts.is_special(token) for token in ("<think>", "<call>", "<|im_start|>")] == [True, False, True]
    assert facts.eos.text == (eos or tokenizer.eos_token)
    assert facts.with_added([], []) == facts
