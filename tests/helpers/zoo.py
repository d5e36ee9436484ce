"""A zoo: one tiny random model per family, with its tokenizer, as a folder that `from_pretrained` reads.

Each is built from the family's own config class. Only sizes are shrunk; whatever makes the family different is kept:
fused projections, biases, windows, soft-caps, tied heads, dropout, positions, spare rows, head_dim. Weights that
start as zeros or ones (biases, norms) are drawn at random too, so that leaving one out changes the result.

    folder = zoo.qwen2(tmp_path / "qwen2")                       # any of zoo.ZOO by name
    folder = zoo.opt(tmp_path / "opt", dropout=0.0)              # other keys of config.json
    folder = zoo.gemma2(tmp_path / "base", chat_template=False)  # tokenizer of the base model
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

from helpers import zoo_templates, zoo_tokenizers
from helpers.built_once import built_once

# What 0.02 is to the 2048 inputs of a real model, so that attention is as far from uniform as there.
_SPREAD = 0.16
_WINDOW = 16  # shorter than the texts of the tests: a window that is ignored shows


@built_once
def llama2(folder: Path, *, chat_template: bool = True, seed: int = 0, **keys: Any) -> Path:
    """As many key heads as query heads, as in the 7B."""
    zoo_tokenizers.llama2(folder, zoo_templates.LLAMA2 if chat_template else None)
    sizes = _sizes(num_key_value_heads=4, rms_norm_eps=1e-5)
    return _write(folder, transformers.LlamaConfig, sizes | keys, seed, bos="<s>", stops=["</s>"])


@built_once
def llama3(
    folder: Path, *, chat_template: bool = True, version: Literal["3.0", "3.1"] = "3.1", seed: int = 0, **keys: Any
) -> Path:
    """3.0: no reserved pad, plain chat format. 3.1: dates and tools in the format, scaled rotary positions."""
    new = version == "3.1"
    template = zoo_templates.LLAMA31 if new else zoo_templates.LLAMA3
    zoo_tokenizers.llama3(folder, template if chat_template else None, pad=new)
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_theta": 500_000.0} | (scaled | {"original_max_position_embeddings": 256} if new else {})
    sizes = _sizes(rms_norm_eps=1e-5, rope_parameters=rope | ({} if new else {"rope_type": "default"}))
    stops = (
        ["<|end_of_text|>", *(["<|eom_id|>"] if new else []), "<|eot_id|>"] if chat_template else ["<|end_of_text|>"]
    )
    return _write(folder, transformers.LlamaConfig, sizes | keys, seed, bos="<|begin_of_text|>", stops=stops)


@built_once
def mistral(
    folder: Path, *, chat_template: bool = True, version: Literal["0.1", "0.3"] = "0.1", seed: int = 0, **keys: Any
) -> Path:
    """0.1: sliding window, [INST] as text. 0.3: no window, control tokens, tools."""
    new = version == "0.3"
    template = zoo_templates.MISTRAL_V03 if new else zoo_templates.MISTRAL_V01
    zoo_tokenizers.mistral(folder, template if chat_template else None, control=new)
    sizes = _sizes(rms_norm_eps=1e-5, sliding_window=None if new else _WINDOW)
    return _write(folder, transformers.MistralConfig, sizes | keys, seed, bos="<s>", stops=["</s>"])


@built_once
def qwen2(folder: Path, *, chat_template: bool = True, seed: int = 0, **keys: Any) -> Path:
    """Biases only on q, k and v, tied head as in small ones, unused embedding rows, a window that is switched off."""
    zoo_tokenizers.qwen(folder, zoo_templates.QWEN25 if chat_template else None, thinks=False)
    sizes = _sizes(tie_word_embeddings=True, use_sliding_window=False, sliding_window=_WINDOW, max_window_layers=2)
    stops = ["<|im_end|>", "<|endoftext|>"] if chat_template else ["<|endoftext|>"]
    config = transformers.Qwen2Config
    return _write(folder, config, sizes | keys, seed, bos="<|endoftext|>", stops=stops, spare_rows=7)


@built_once
def qwen3(folder: Path, *, chat_template: bool = True, seed: int = 0, **keys: Any) -> Path:
    """Norms of queries and keys, no biases, a head_dim of its own."""
    zoo_tokenizers.qwen(folder, zoo_templates.QWEN3 if chat_template else None, thinks=True)
    sizes = _sizes(head_dim=12, tie_word_embeddings=True, use_sliding_window=False, max_window_layers=2)
    stops = ["<|im_end|>", "<|endoftext|>"] if chat_template else ["<|endoftext|>"]
    config = transformers.Qwen3Config
    return _write(folder, config, sizes | keys, seed, bos="<|endoftext|>", stops=stops, spare_rows=7)


@built_once
def phi3(folder: Path, *, chat_template: bool = True, seed: int = 0, **keys: Any) -> Path:
    """Fused q, k, v and fused gate, up; every layer has the window."""
    zoo_tokenizers.phi3(folder, zoo_templates.PHI3 if chat_template else None)
    sizes = _sizes(rms_norm_eps=1e-5, sliding_window=_WINDOW, original_max_position_embeddings=512)
    stops = ["<|endoftext|>", "<|assistant|>", "<|end|>"] if chat_template else ["<|endoftext|>"]
    config = transformers.Phi3Config
    return _write(folder, config, sizes | keys, seed, bos="<s>", stops=stops, pad="<|endoftext|>", spare_rows=5)


@built_once
def gemma2(folder: Path, *, chat_template: bool = True, seed: int = 0, **keys: Any) -> Path:
    """Soft-caps (low enough to matter for a random model), a window in every other layer, a head_dim of its own."""
    zoo_tokenizers.gemma(folder, zoo_templates.GEMMA2 if chat_template else None, image=False)
    caps = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0}
    sizes = _sizes(head_dim=12, query_pre_attn_scalar=12, sliding_window=_WINDOW, tie_word_embeddings=True, **caps)
    stops = ["<eos>", "<end_of_turn>"] if chat_template else ["<eos>"]
    return _write(folder, transformers.Gemma2Config, sizes | keys, seed, bos="<bos>", stops=stops, pad="<pad>")


@built_once
def gemma3(folder: Path, *, chat_template: bool = True, seed: int = 0, **keys: Any) -> Path:
    """Six layers, the last with full attention; two rotary bases; one token id beyond the last embedding row."""
    zoo_tokenizers.gemma(folder, zoo_templates.GEMMA3 if chat_template else None, image=True)
    sizes = _sizes(head_dim=12, query_pre_attn_scalar=12, sliding_window=_WINDOW, tie_word_embeddings=True)
    sizes |= {"num_hidden_layers": 6, "rms_norm_eps": 1e-6}
    stops = ["<eos>", "<end_of_turn>"] if chat_template else ["<eos>"]
    config = transformers.Gemma3TextConfig
    return _write(folder, config, sizes | keys, seed, bos="<bos>", stops=stops, pad="<pad>", spare_rows=-1)


@built_once
def opt(folder: Path, *, chat_template: bool = False, seed: int = 0, **keys: Any) -> Path:
    """LayerNorm, biases and ReLU; dropout 0.1; positions from row 2; BOS = EOS = </s>; tied head. No chat model."""
    _refuse_template("opt", chat_template)
    zoo_tokenizers.opt(folder, None)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "dropout": 0.1,
        "init_std": _SPREAD,
    }
    return _write(
        folder, transformers.OPTConfig, sizes | keys, seed, bos="</s>", stops=["</s>"], pad="<pad>", spare_rows=7
    )


@built_once
def gpt2(folder: Path, *, chat_template: bool = False, seed: int = 0, **keys: Any) -> Path:
    """Conv1D layers, learned positions, three dropouts of 0.1, tied head, one special token. No chat model."""
    _refuse_template("gpt2", chat_template)
    zoo_tokenizers.gpt2(folder, None)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": _SPREAD}
    token = "<|endoftext|>"
    return _write(folder, transformers.GPT2Config, sizes | keys, seed, bos=token, stops=[token])


ZOO: dict[str, Callable[..., Path]] = {
    "llama2": llama2,
    "llama3": llama3,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "phi3": phi3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "opt": opt,
    "gpt2": gpt2,
}


def _sizes(**keys: Any) -> dict[str, Any]:
    """The common shrunk sizes: grouped-query attention with two queries per key."""
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": _SPREAD,
    } | keys


def _write(
    folder: Path,
    config_class: type[PreTrainedConfig],
    keys: dict[str, Any],
    seed: int,
    *,
    bos: str,
    stops: Sequence[str],
    pad: str | None = None,
    spare_rows: int = 0,
) -> Path:
    """Draw the weights and save them with the tokenizer. stops: generation's end tokens, config.json's first."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.get_vocab()
    config = config_class(
        **{
            "vocab_size": len(tokenizer) + spare_rows,
            "bos_token_id": ids[bos],
            "eos_token_id": ids[stops[0]],
            "pad_token_id": None if pad is None else ids[pad],
        }
        | keys
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = GenerationConfig(bos_token_id=ids[bos], eos_token_id=[ids[stop] for stop in stops])
    model.save_pretrained(folder)
    return folder


def _refuse_template(family: str, chat_template: bool) -> None:
    if chat_template:
        raise ValueError(f"{family} was published without a chat template")
