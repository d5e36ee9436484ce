"""Tiny models and tokenizers with the layout of real ones, built in milliseconds.

`llama3_tokenizer` is like Llama 3's: byte-level BPE with id 0 = "!", special tokens under their real names after the
ordinary ones, a BOS that the post-processor adds, EOS = <|end_of_text|>, no PAD.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from helpers.built_once import built_once

LLAMA3_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_TEXT = [
    "Give three tips for staying healthy. Below is an instruction that describes a task.",
    "### Instruction: ### Input: ### Response: The answer to the question is written here.",
    "A heron is a bird and a trout is a fish; what is the colour of the sky?",
]


def llama3_tokenizer(folder: Path, *, chat_template: bool = True, pad: bool = False, vocab_size: int = 320) -> Path:
    """Write tokenizer files into `folder`. pad=False: also without the reserved pad, as in Llama 3.0."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # "!" sorts first, as in the real file
    bpe.train_from_iterator(
        _TEXT, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    specials = [token for token in LLAMA3_SPECIALS if pad or token != "<|finetune_right_pad_id|>"]
    bpe.add_special_tokens(specials)
    bos = "<|begin_of_text|>"
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bpe.token_to_id(bos))]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token="<|end_of_text|>")
    if chat_template:
        tokenizer.chat_template = LLAMA3_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@built_once
def tiny_llama(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    spare_rows: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    chat_template: bool = True,
    pad: bool = False,
    attention_dropout: float = 0.0,
) -> Path:
    """Save a random Llama and its tokenizer for `from_pretrained`. spare_rows: embedding rows beyond the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    llama3_tokenizer(folder, chat_template=chat_template, pad=pad)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + spare_rows,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        attention_dropout=attention_dropout,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype=dtype,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def tiny_judge(folder: Path, *, weight: torch.Tensor | None = None, bias: float = 0.0, **keys: Any) -> Path:
    """Save a reward model: `tiny_llama(folder, **keys)` with a value head. weight: [1, hidden]; None: from -1 to 1."""
    tiny_llama(folder, **keys)
    weight = torch.linspace(-1, 1, keys.get("hidden", 32))[None] if weight is None else weight
    head = {"v_head.summary.weight": weight, "v_head.summary.bias": torch.tensor([bias])}
    save_file(head, folder / "value_head.safetensors")
    return folder


@built_once
def curt(folder: Path, *, every: int = 6) -> Path:
    """Save a `tiny_llama` with short answers: about one token in `every` is <|eot_id|>, regardless of the context."""
    tiny_llama(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    stop = PreTrainedTokenizerFast.from_pretrained(folder).convert_tokens_to_ids("<|eot_id|>")
    width, words = model.config.hidden_size, model.config.vocab_size
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.3  # the rest is about 0.02, so it is most of every norm
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[stop, 0] = math.log((words - 1) / (every - 1)) / math.sqrt(width)
    model.save_pretrained(folder)
    return folder
