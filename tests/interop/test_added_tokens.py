"""Tokens that other tools' configs add."""

import pytest

from interop.axolotl_configs import CHAT, axolotl, refused
from interop.small_configs import outcome, translated
from interop.test_statements import translated as script
from surefoot.system.errors import InputError

CHATML = ["<|im_start|>", "<|im_end|>"]


def test_axolotls_tokens():
    found = axolotl(**CHAT, tokens=["<think>"])
    assert found.config["tokenizer"] == {"add": ["<think>"]}
    assert outcome(found, "tokens") == "changed"  # what trains beside an adapter


def test_control_tokens_are_those_of_the_template():
    tokens = {"tokens": ["<|im_start|>", "<call>"], "special_tokens": {"eos_token": "<|im_end|>"}}
    found = axolotl(**CHAT, **tokens, chat_template="chatml").config["tokenizer"]
    assert found == {"eos": "<|im_end|>", "add": ["<call>"], "add_special": CHATML}
    listed = {"special_tokens": {"additional_special_tokens": CHATML}}
    assert axolotl(**CHAT, **listed, chat_template="chatml").config["tokenizer"] == {"add_special": CHATML}
    assert axolotl(**CHAT, **listed).config["tokenizer"] == {"add": CHATML}  # twin: another template


def test_without_new_tokens_eos_is_only_checked():
    found = axolotl(**CHAT, special_tokens={"eos_token": "</s>"}, chat_template="chatml").config["tokenizer"]
    assert found == {"eos": "</s>"}


def test_axolotls_early_form():
    roles = {"pad_token": "<pad>", "bos_token": "<s>"}
    assert axolotl(**CHAT, tokens=roles).config["tokenizer"] == {"pad": "<pad>", "bos": "<s>"}
    assert refused(**CHAT, tokens={"mask_token": "<m>"}) == {"special_tokens"}


def test_llama_factorys_tokens():
    new = {"template": "chatml", "add_tokens": "<a>, <b>", "add_special_tokens": "<|im_start|>,<c>"}
    found = translated("factory", **new, resize_vocab=True)
    assert found.config["tokenizer"] == {"add": ["<a>", "<b>", "<c>"], "add_special": ["<|im_start|>"]}
    assert outcome(found, "resize_vocab") == "carried"
    assert outcome(translated("factory", resize_vocab=True, finetuning_type="full"), "resize_vocab") == "listed"
    with pytest.raises(InputError):
        translated("factory", resize_vocab=True)  # LoRA, and embeddings in full


def test_a_scripts_tokens():
    added = 'tokenizer.add_tokens(["<a>"])\ntokenizer.add_special_tokens({"additional_special_tokens": ["<b>"]})\n'
    found = script(before=added + "model.resize_token_embeddings(len(tokenizer))\n")
    assert found.config["tokenizer"] == {"add": ["<a>", "<b>"]}
    both = 'tokenizer.add_special_tokens({"pad_token": "<p>", "additional_special_tokens": ["<b>"]})\n'
    assert script(before=both).config["tokenizer"] == {"pad": "add", "add": ["<b>"]}
    for unread in ("tokenizer.add_tokens(own())", 'tokenizer.add_special_tokens({"eos_token": "<e>"})'):
        with pytest.raises(InputError):
            script(before=f"{unread}\n")
