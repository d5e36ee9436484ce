"""Write a GGUF file from a model folder with the `gguf` package: llama.cpp's names and layout, one tensor in memory at
a time.

Matrices keep the folder's dtype; norms and biases are fp32, as llama.cpp computes them. Unsupported models raise
`NotInGguf`; llama.cpp's own converter supports more.

Two kinds of tokenizer are supported. Byte-level BPE (Llama 3, Qwen) is written as its merges and the name of its
pre-tokenizer. BPE over characters with byte fallback (Llama 2, Mistral) is written as scores: llama.cpp merges the pair
whose result has the highest score, so a token's score is minus the index of the first merge that makes it, as in
SentencePiece's own files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from surefoot.families.gguf_rows import GPT2_PRE_TOKENIZER, PRE_TOKENIZERS, GgufRow, find_gguf_row
from surefoot.models.facts import model_config
from surefoot.models.folder import stored_tensors

_ROTARY_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class ChatSettings:
    """Chat settings of the file.

    bos_id: prepended to every text; None for none.
    stops: ids that end an answer, EOS first.
    pad_id: None for none.
    chat_template: Jinja.
    """

    bos_id: int | None
    stops: tuple[int, ...]
    pad_id: int | None
    chat_template: str | None


def write_gguf(
    folder: Path, file: Path, tokenizer: PreTrainedTokenizerBase, chat: ChatSettings, *, name: str, window: int | None
) -> None:
    """Write the model in `folder` as one GGUF file. Raises NotInGguf for unsupported models.

    folder: a model in transformers' format.
    chat: chat settings.
    name: display name of the model.
    window: size of the attention window of layers with sliding attention; None for full attention.
    """
    import gguf

    config = model_config(folder)
    row = require_row(config, window)
    stored = stored_tensors(folder)
    rows = stored["model.embed_tokens.weight"].shape[0]
    vocabulary = gguf_vocabulary(tokenizer, rows)
    writer = gguf.GGUFWriter(file, row.architecture)
    _describe_model(writer, config, name, rows)
    _describe_tokenizer(writer, vocabulary, tokenizer, chat)
    names = _gguf_names(gguf, row, config.num_hidden_layers, stored)
    factors = _rotary_factors(config)
    if factors is not None:
        writer.add_tensor_info(_ROTARY_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for theirs, ours in names.items():
        shape, dtype, raw = _form(gguf, stored[ours].shape, stored[ours].dtype)
        writer.add_tensor_info(theirs, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for theirs, ours in names.items():
        with safe_open(stored[ours].file, framework="pt") as opened:
            tensor = opened.get_tensor(ours)
        writer.write_tensor_data(_data(_in_gguf_order(tensor, theirs, row, config)))
    writer.close()


def require_row(config: PreTrainedConfig, window: int | None) -> GgufRow:
    """Raise NotInGguf for a model that this writer cannot describe completely."""
    row = find_gguf_row(config.model_type)
    if row is None:
        raise NotInGguf(f"model_type {config.model_type!r} is not supported by surefoot's GGUF writer")
    if window is not None:
        raise NotInGguf(f"some layers have an attention window of {window} tokens, which the file cannot express")
    kind = _rotary(config)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        raise NotInGguf(f"its rotary scaling {kind!r} is not supported")
    return row


def _describe_model(writer: Any, config: PreTrainedConfig, name: str, rows: int) -> None:
    import gguf

    heads, rotary = config.num_attention_heads, _rotary(config)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds: dict[Any, Any] = {
        torch.float32: gguf.LlamaFileType.ALL_F32,
        torch.float16: gguf.LlamaFileType.MOSTLY_F16,
        torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
    }
    writer.add_name(name)
    writer.add_file_type(kinds[config.dtype])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rotary["rope_theta"])
    if rotary["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rotary["factor"])
    writer.add_vocab_size(rows)


def _describe_tokenizer(
    writer: Any, vocabulary: GgufVocabulary, tokenizer: PreTrainedTokenizerBase, chat: ChatSettings
) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(True)
    bos = tokenizer.bos_token_id if chat.bos_id is None else chat.bos_id
    for number, add in (
        (bos, writer.add_bos_token_id),
        (chat.stops[0] if chat.stops else tokenizer.eos_token_id, writer.add_eos_token_id),
        (chat.stops[1] if len(chat.stops) > 1 else None, writer.add_eot_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (chat.pad_id, writer.add_pad_token_id),
    ):
        if isinstance(number, int):
            add(number)
    writer.add_add_bos_token(chat.bos_id is not None)
    writer.add_add_eos_token(False)
    if chat.chat_template is not None:
        writer.add_chat_template(chat.chat_template)


def _gguf_names(gguf: Any, row: GgufRow, layers: int, stored: dict[str, Any]) -> dict[str, str]:
    """Return GGUF's name -> transformers' name for every tensor. Raises NotInGguf for one without a counterpart."""
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == row.architecture)
    table = gguf.get_tensor_name_map(architecture, layers)
    names = {}
    for ours in stored:
        theirs = table.get_name(ours, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise NotInGguf(f"GGUF has no name for {ours}")
        names[theirs] = ours
    return names


def _form(gguf: Any, shape: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], np.dtype[Any], Any]:
    """Return shape, NumPy dtype of the bytes and GGUF type of the tensor in the file."""
    types = gguf.GGMLQuantizationType
    if len(shape) == 1 or dtype == "F32":
        return shape, np.dtype(np.float32), types.F32
    if dtype == "F16":
        return shape, np.dtype(np.float16), types.F16
    if dtype == "BF16":
        return shape, np.dtype(np.int16), types.BF16
    raise NotInGguf(f"weights of type {dtype} are not supported")


def _data(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.float() if tensor.ndim == 1 else tensor
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


def _in_gguf_order(tensor: torch.Tensor, theirs: str, row: GgufRow, config: PreTrainedConfig) -> torch.Tensor:
    if not row.paired or (".attn_q." not in theirs and ".attn_k." not in theirs):
        return tensor
    heads = config.num_attention_heads if ".attn_q." in theirs else config.num_key_value_heads
    return pair_rotary_rows(tensor, heads)


def pair_rotary_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows (or elements of a bias) of each head from (half, index) to (index, half): 0, d/2, 1, d/2 + 1, …"""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _rotary(config: PreTrainedConfig) -> dict[str, Any]:
    found: dict[str, Any] = dict(config.rope_parameters or {})
    return {"rope_type": "default", "rope_theta": 10_000.0} | found


def _rotary_factors(config: PreTrainedConfig) -> np.ndarray[Any, Any] | None:
    """Return the divisor of each frequency in llama.cpp for Llama 3.1's scaling; None without such scaling."""
    rotary = _rotary(config)
    if rotary["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = 2 * scaled.shape[0]
    plain = rotary["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return (plain / scaled.double()).float().numpy()


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens


class NotInGguf(Exception):
    """Raised for what this writer does not support; the text completes a sentence."""


@dataclass(frozen=True)
class GgufVocabulary:
    """A vocabulary as GGUF stores it.

    model: "gpt2" for byte-level BPE, "llama" for scores.
    pre: name of the pre-tokenizer, "" for none.
    tokens, kinds: one per row of the embedding.
    merges: of "gpt2".
    scores: of "llama".
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]


def gguf_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> GgufVocabulary:
    """Read the vocabulary. rows: of the embedding; those without a token get generated names. Raises NotInGguf."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise NotInGguf("the tokenizer has no tokenizer.json")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise NotInGguf(f"the tokenizer is {model['type']}, and only BPE is supported")
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
    raise NotInGguf("the tokenizer's pre-tokenizer is not supported")


def _tokens(
    tokenizer: PreTrainedTokenizerBase, model: dict[str, Any], rows: int, byte_level: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    added = tokenizer.added_tokens_decoder
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    if names and max(names) >= rows:
        raise NotInGguf(f"the tokenizer has id {max(names)}, but the embedding has {rows} rows")
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
    """Return scores; higher ones are merged earlier. Tokens that are not the result of a merge get the lowest."""
    first: dict[str, int] = {}
    for merge in merges:
        made = "".join(merge.split(" ") if isinstance(merge, str) else merge)
        first.setdefault(made, len(first))
    last = len(first)
    return tuple(
        float(-first.get(token, last + number)) if kind == NORMAL else 0.0
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    )
