"""A tokenizer as GGUF's metadata describe it: every token with its kind, merges or scores, and how text is cut.

Two kinds are written. Byte-level BPE (Llama 3, Qwen) as its merges and the name of its pre-tokenizer. BPE over
characters with byte fallback (Llama 2, Mistral) as scores: there llama.cpp joins the pair whose result has the highest
score, so a token's score is minus the place of the first merge that makes it, which is what SentencePiece itself wrote.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surefoot.families.gguf_rows import GPT2_PRE_TOKENIZER, PRE_TOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens


class NotInGguf(Exception):
    """Something that this writer does not put into a GGUF file; the text says what, as the end of a sentence."""


@dataclass(frozen=True)
class GgufVocabulary:
    """model: "gpt2" for byte-level BPE, "llama" for scores. pre: name of the pre-tokenizer, "" where the model needs
    none. tokens, kinds: one per row of the embedding. merges: of "gpt2". scores: of "llama"."""

    model: str
    pre: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]


def gguf_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> GgufVocabulary:
    """rows: of the embedding; those without a token get names of their own. Raises NotInGguf."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise NotInGguf("the tokenizer has no fast form")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise NotInGguf(f"the tokenizer is {model['type']}, and only BPE is written")
    byte_level = not model.get("byte_fallback")
    pre = _pre_tokenizer(described["pre_tokenizer"]) if byte_level else ""
    tokens, kinds = _tokens(tokenizer, model, rows, byte_level)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not byte_level:
        return GgufVocabulary("llama", "default", tokens, kinds, (), _scores(tokens, kinds, model["merges"]))
    return GgufVocabulary("gpt2", pre, tokens, kinds, tuple(merges), ())


def _pre_tokenizer(described: dict[str, Any] | None) -> str:
    parts = [] if described is None else described.get("pretokenizers", [described])
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and parts[0]["use_regex"] and not parts[0]["add_prefix_space"]:
        return GPT2_PRE_TOKENIZER
    if kinds == ["Split", "ByteLevel"] and parts[0]["behavior"] == "Isolated" and not parts[1]["use_regex"]:
        name = PRE_TOKENIZERS.get(parts[0]["pattern"].get("Regex", ""))
        if name is not None:
            return name
    raise NotInGguf("the tokenizer cuts text into words in a way that has no name here")


def _tokens(
    tokenizer: PreTrainedTokenizerBase, model: dict[str, Any], rows: int, byte_level: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    added = tokenizer.added_tokens_decoder
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    if names and max(names) >= rows:
        raise NotInGguf(f"the tokenizer knows id {max(names)}, and the embedding has {rows} rows")
    kinds = []
    for number in range(rows):
        if number not in names:
            kinds.append(UNUSED)
        elif not byte_level and names[number] == model.get("unk_token"):
            kinds.append(UNKNOWN)
        elif number in added:
            kinds.append(CONTROL if added[number].special else USER_DEFINED)
        elif not byte_level and names[number].startswith("<0x") and len(names[number]) == 6:
            kinds.append(BYTE)
        else:
            kinds.append(NORMAL)
    return tuple(names.get(number, f"[PAD{number}]") for number in range(rows)), tuple(kinds)


def _scores(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[Any]) -> tuple[float, ...]:
    """Higher is joined earlier. Tokens that no merge makes are never the result of one: they come last."""
    first: dict[str, int] = {}
    for merge in merges:
        made = "".join(merge.split(" ") if isinstance(merge, str) else merge)
        first.setdefault(made, len(first))
    last = len(first)
    return tuple(
        float(-first.get(token, last + number)) if kind == NORMAL else 0.0
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    )
