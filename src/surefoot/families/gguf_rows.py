"""What GGUF calls an architecture, and what its files do otherwise than transformers. Facts of llama.cpp, as rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GgufRow:
    """An architecture that llama.cpp runs.

    model_type: config.json's.
    architecture: GGUF's.
    paired: rows of q and k are stored so that the two halves of a rotary pair are neighbours; transformers holds them
        half a head apart.
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

# How a byte-level tokenizer cuts text into words: the pattern in tokenizer.json -> llama.cpp's name for it.
PRE_TOKENIZERS = {
    rf"{_LETTERS}|\p{{N}}{{1,3}}{_REST}": "llama-bpe",
    rf"{_LETTERS}|\p{{N}}{_REST}": "qwen2",
}
GPT2_PRE_TOKENIZER = "gpt-2"  # the pattern that tokenizers has built in

_BEGUN = "llama-bpe"  # the one of these whose texts llama.cpp begins with BOS where the metadata do not say

CONVERTER = "python llama.cpp/convert_hf_to_gguf.py {folder} --outfile {file} --outtype {outtype}"


def find_gguf_row(model_type: str) -> GgufRow | None:
    return next((row for row in ROWS if row.model_type == model_type), None)


def ollama_puts_bos(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> bool:
    """Whether Ollama puts BOS before every prompt of a folder of safetensors, as what `tokenizer_config.json` and
    `tokenizer.json` hold decides. Its converter hands `add_bos_token` on where that is written (convert/tokenizer.go);
    else llama.cpp goes by the kind of the vocabulary (src/llama-vocab.cpp). docs/export.md has the findings.
    """
    if isinstance(config.get("add_bos_token"), bool):
        return config["add_bos_token"]
    cuts = (tokenizer.get("pre_tokenizer") or {}).get("pretokenizers") or ()
    named = {PRE_TOKENIZERS.get(cut["pattern"].get("Regex", "")) for cut in cuts if cut.get("type") == "Split"}
    return is_sentencepiece(tokenizer) or _BEGUN in named


def is_sentencepiece(tokenizer: Mapping[str, Any]) -> bool:
    """Of what `tokenizer.json` holds: BPE over characters that falls back to bytes."""
    return bool(tokenizer.get("model", {}).get("byte_fallback"))
