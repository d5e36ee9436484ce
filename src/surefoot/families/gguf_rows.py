"""GGUF architectures and how their files differ from transformers. Facts from llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GgufRow:
    """An architecture that llama.cpp supports.

    model_type: name in config.json.
    architecture: name in GGUF.
    paired: whether the two rows of a rotary pair in q and k are adjacent; in transformers they are half a head apart.
    """

    model_type: str
    architecture: str
    paired: bool


ROWS = (
    GgufRow("llama", "llama", paired=True),
    GgufRow("mistral", "llama", paired=True),
    GgufRow("qwen2", "qwen2", paired=False),
    GgufRow("qwen3", "qwen3", paired=False),
)

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Pre-tokenizer pattern of byte-level tokenizers in tokenizer.json -> llama.cpp's name.
PRE_TOKENIZERS = {
    rf"{_LETTERS}|\p{{N}}{{1,3}}{_REST}": "llama-bpe",
    rf"{_LETTERS}|\p{{N}}{_REST}": "qwen2",
}
GPT2_PRE_TOKENIZER = "gpt-2"  # the default pattern of the tokenizers library

_ADDS_BOS = "llama-bpe"  # llama.cpp prepends BOS for this one unless the metadata say otherwise

CONVERTER = "python llama.cpp/convert_hf_to_gguf.py {folder} --outfile {file} --outtype {outtype}"


def find_gguf_row(model_type: str) -> GgufRow | None:
    return next((row for row in ROWS if row.model_type == model_type), None)


def ollama_puts_bos(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> bool:
    """Return whether Ollama prepends BOS to every prompt of a safetensors folder.

    config, tokenizer: the content of `tokenizer_config.json` and `tokenizer.json`. Ollama's converter passes
    `add_bos_token` on if it is set (convert/tokenizer.go); otherwise llama.cpp decides by the kind of vocabulary
    (src/llama-vocab.cpp). See docs/export.md.
    """
    if isinstance(config.get("add_bos_token"), bool):
        return config["add_bos_token"]
    cuts = (tokenizer.get("pre_tokenizer") or {}).get("pretokenizers") or ()
    named = {PRE_TOKENIZERS.get(cut["pattern"].get("Regex", "")) for cut in cuts if cut.get("type") == "Split"}
    return is_sentencepiece(tokenizer) or _ADDS_BOS in named


def is_sentencepiece(tokenizer: Mapping[str, Any]) -> bool:
    """Return whether a `tokenizer.json` is SentencePiece-like: BPE over characters with byte fallback."""
    return bool(tokenizer.get("model", {}).get("byte_fallback"))
