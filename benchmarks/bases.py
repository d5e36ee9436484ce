"""Random Llamas and mixtures of experts of any size, with a tokenizer of their own: what the benchmarks train. Nothing
is downloaded.

    build_base(folder, texts, Shape(layers=6, hidden=384))
    build_base(folder, texts, SIZES["8b"], device="cuda")     the shape of Llama-3.1-8B, in bf16, written in seconds

A shape says what is not as in a plain Llama: heads of 64 numbers, each with keys of its own, and a gate of 8/3 of the
width. A large one is drawn and written in bf16, as such models are published, where `device` is; a draw depends on the
kind of device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WORDS = 8000  # of the tokenizer; what a vocabulary has beyond them is never asked for, but its rows are multiplied


@dataclass(frozen=True)
class Shape:
    """vocabulary: rows of the embedding. own: fields of config.json that are not as the module says, such as another
    model_type. large: held in bf16."""

    layers: int
    hidden: int
    vocabulary: int = _WORDS
    own: Mapping[str, Any] = field(default_factory=dict)
    large: bool = False

    def fields(self) -> dict[str, Any]:
        """config.json's, without those of the tokenizer."""
        heads = self.hidden // 64
        return {
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 8 // 3,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 2048,
            **self.own,
        }


def _rope(factor: float) -> dict[str, Any]:
    """Of Llama 3.1 and 3.2, from their config.json."""
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA3 = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
SIZES = {
    "experts": Shape(6, 512, 8_192, {**_EXPERTS, "moe_intermediate_size": 384}),
    "tiny": Shape(4, 256),
    "small": Shape(12, 768, 32_000),
    "vocabulary": Shape(12, 768, 128_000),
    # Llama-3.2-1B and Llama-3.1-8B.
    "1b": Shape(
        16,
        2048,
        128_256,
        {**_LLAMA3, "intermediate_size": 8192, "rope_parameters": _rope(32.0), "tie_word_embeddings": True},
        large=True,
    ),
    "8b": Shape(32, 4096, 128_256, {**_LLAMA3, "intermediate_size": 14_336, "rope_parameters": _rope(8.0)}, large=True),
    # Llama-3.1-70B
    "70b": Shape(
        80,
        8192,
        128_256,
        {**_LLAMA3, "num_attention_heads": 64, "intermediate_size": 28_672, "rope_parameters": _rope(8.0)},
        large=True,
    ),
}


def moved_bytes(shape: Shape) -> int:
    """For a token of a training step, by operators that are no matrix products: 3 · layers · 2 · (6 h + 2 (q + kv) +
    3 i), which is 16-bit tensors in and out of every fused operator, backward twice as much."""
    fields = shape.fields()
    hidden, queries = fields["hidden_size"], fields["num_attention_heads"]
    keys = hidden // queries * fields["num_key_value_heads"]
    return 3 * shape.layers * 2 * (6 * hidden + 2 * (hidden + keys) + 3 * fields["intermediate_size"])


def build_base(folder: Path, texts: list[str], shape: Shape, device: str = "cpu") -> None:
    """texts: what the tokenizer is trained on. device: where a large one is drawn."""
    import torch
    from transformers import AutoModelForCausalLM

    config = write_config(folder, texts, shape)
    torch.manual_seed(0)
    if not shape.large:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return
    with torch.device(device), _sixteen_bits():
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="4GB")


def write_config(folder: Path, texts: list[str], shape: Shape) -> Any:
    """Tokenizer and config.json, which is all that a plan asks for. Returns the config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=_WORDS, initial_alphabet=alphabet, show_progress=False)
    )
    bpe.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    fields = shape.fields()
    config = AutoConfig.for_model(
        **{**fields, "vocab_size": max(fields["vocab_size"], len(tokenizer))},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(folder)
    return config


@contextmanager
def _sixteen_bits() -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
