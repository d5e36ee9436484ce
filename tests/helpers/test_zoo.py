"""The zoo is what it says: loads with transformers, special tokens where the published files have them."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.zoo import ZOO

TEXT = "What is the colour of the sky?"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    return {name: build(root / name) for name, build in ZOO.items()}


@pytest.mark.parametrize("name", ZOO)
def test_loads_as_it_was_saved(built, name):
    """What AutoTokenizer makes of the files gives the ids that the files alone give."""
    text = "Grüße, 汉字 and 12345!\n\n  Two spaces."
    tokenizer = AutoTokenizer.from_pretrained(built[name])
    ids = tokenizer(text).input_ids
    assert ids == Tokenizer.from_file(str(built[name] / "tokenizer.json")).encode(text).ids
    assert max(ids) < json.loads((built[name] / "config.json").read_text())["vocab_size"]
    assert tokenizer.decode(tokenizer(TEXT).input_ids, skip_special_tokens=True).strip() == TEXT


FIRST_IDS = {
    "llama2": ["<unk>", "<s>", "</s>", "<0x00>"],
    "llama3": ["!", '"', "#"],
    "mistral": ["<unk>", "<s>", "</s>", "<0x00>"],
    "qwen2": ["!", '"', "#"],
    "qwen3": ["!", '"', "#"],
    "phi3": ["<unk>", "<s>", "</s>", "<0x00>"],
    "gemma2": ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"],
    "gemma3": ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"],
    "opt": ["<s>", "<pad>", "</s>", "<unk>", "!"],
    "gpt2": ["!", '"', "#"],
}
# BOS that the tokenizer puts in front, EOS, PAD.
ROLES = {
    "llama2": ("<s>", "</s>", None),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", None),
    "mistral": ("<s>", "</s>", None),
    "qwen2": (None, "<|im_end|>", "<|endoftext|>"),
    "qwen3": (None, "<|im_end|>", "<|endoftext|>"),
    "phi3": (None, "<|endoftext|>", "<|endoftext|>"),
    "gemma2": ("<bos>", "<eos>", "<pad>"),
    "gemma3": ("<bos>", "<eos>", "<pad>"),
    "opt": ("</s>", "</s>", "<pad>"),
    "gpt2": (None, "<|endoftext|>", None),
}


@pytest.mark.parametrize("name", ZOO)
def test_special_tokens(built, name):
    tokenizer = AutoTokenizer.from_pretrained(built[name])
    assert tokenizer.convert_ids_to_tokens(range(len(FIRST_IDS[name]))) == FIRST_IDS[name]
    first = tokenizer(TEXT).input_ids[0]
    added = tokenizer.convert_ids_to_tokens(first) if first in tokenizer.all_special_ids else None
    assert (added, tokenizer.eos_token, tokenizer.pad_token) == ROLES[name]
    assert tokenizer(TEXT).input_ids.count(first) == 1 or added is None


OTHERWISE = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "gemma2": {"attn_logit_softcapping": None},
    "gemma3": {"layer_types": ["full_attention"] * 6},
    "llama3": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_traits_are_felt(built, tmp_path: Path, name):
    """The same weights without the trait give other logits on a text of forty tokens or so."""
    ids = AutoTokenizer.from_pretrained(built[name])(TEXT * 4, return_tensors="pt").input_ids
    without = ZOO[name](tmp_path / name, **OTHERWISE[name])
    first, second = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (built[name], without))
    assert (first - second).abs().max() > 1e-2


def test_rows_beside_the_tokens(built):
    """Qwen, Phi-3 and OPT have rows that no token uses, Gemma 3's text models one token without a row."""
    spare = {}
    for name in ("llama3", "qwen2", "phi3", "opt", "gemma3"):
        config = json.loads((built[name] / "config.json").read_text())
        spare[name] = config["vocab_size"] - len(AutoTokenizer.from_pretrained(built[name]))
    assert spare == {"llama3": 0, "qwen2": 7, "phi3": 5, "opt": 7, "gemma3": -1}


CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Why?"},
]
RENDERED = {
    "llama2": "<s>[INST] Hi [/INST] Hello. </s><s>[INST] Why? [/INST]",
    "mistral": "<s>[INST] Hi [/INST]Hello.</s>[INST] Why? [/INST]",
    "qwen2": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "phi3": "<|user|>\nHi<|end|>\n<|assistant|>\nHello.<|end|>\n<|user|>\nWhy?<|end|>\n<|assistant|>\n",
    "gemma2": "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
    "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
}
RENDERED["gemma3"] = RENDERED["gemma2"]


@pytest.mark.parametrize("name", RENDERED)
def test_chat_format(built, name):
    tokenizer = AutoTokenizer.from_pretrained(built[name])
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == RENDERED[name]


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WITH_TOOLS = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "2"},
    {"role": "assistant", "content": "Two."},
]
TOOL_TAILS = {
    "llama3": '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\nTwo.<|eot_id|>",
    "mistral": '[INST] Add.[/INST][TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>'
    '[TOOL_RESULTS] {"content": 2, "call_id": "abcdefghi"}[/TOOL_RESULTS] Two.</s>',
    "qwen2": '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n",
    "qwen3": '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\nTwo.<|im_end|>\n",
}


@pytest.mark.parametrize("name", TOOL_TAILS)
def test_tools(tmp_path: Path, name):
    folder = ZOO[name](tmp_path / name, **({"version": "0.3"} if name == "mistral" else {}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(WITH_TOOLS, tools=TOOLS, tokenize=False)
    assert text.endswith(TOOL_TAILS[name])
    assert '"name": "add"' in text[: -len(TOOL_TAILS[name])]


def test_base_models_have_no_chat_template(tmp_path: Path):
    for name, build in ZOO.items():
        assert AutoTokenizer.from_pretrained(build(tmp_path / name, chat_template=False)).chat_template is None
