"""Whether Ollama puts BOS before a prompt: a table by hand, from its converter and llama.cpp's vocabulary."""

import pytest

from surefoot.families.gguf_rows import PRE_TOKENIZERS, ollama_puts_bos

SENTENCEPIECE = {"model": {"type": "BPE", "byte_fallback": True}, "pre_tokenizer": None}
BYTES = {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}


def cut_as(name: str) -> dict:
    (pattern,) = (regex for regex, one in PRE_TOKENIZERS.items() if one == name)
    cuts = [{"type": "Split", "pattern": {"Regex": pattern}}, {"type": "ByteLevel"}]
    return {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts}}


@pytest.mark.parametrize(
    ("tokenizer", "unsaid"),
    [(SENTENCEPIECE, True), (BYTES, False), (cut_as("llama-bpe"), True), (cut_as("qwen2"), False)],
)
def test_what_is_written_goes_and_else_the_kind_of_vocabulary(tokenizer, unsaid):
    assert ollama_puts_bos({}, tokenizer) is unsaid
    assert ollama_puts_bos({"add_bos_token": None}, tokenizer) is unsaid
    assert [ollama_puts_bos({"add_bos_token": said}, tokenizer) for said in (True, False)] == [True, False]
