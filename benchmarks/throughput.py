"""surefoot against HF Trainer + PEFT: same model, same examples in the same order, same dtype, in one run, in turns.

Parity comes first: the losses of all steps must agree before a time is printed. Times are per step without the first
two of each turn; the ratio is taken turn by turn, so that a machine that drifts slows both.

    python benchmarks/throughput.py [--data FILE.json] [--steps 12] [--turns 3] [--precision bf16] [--adapter lora]

A random Llama (12 layers would take an hour here: 6 x 384) with a tokenizer trained on the data; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from surefoot.config.load import load_config
from surefoot.data.loader import micro_batches
from surefoot.data.order import step_examples
from surefoot.objectives.sft import sft_loss
from surefoot.stages.planned import make_plan
from surefoot.stages.setup import set_up
from surefoot.stages.sft import prepare_sft
from surefoot.training.step import train_step

WARM_UP = 2  # steps of each turn that are not counted
# The two sides add the same numbers in another order, in bf16 with other roundings in between, and drift apart as they
# train; a wrong mask or a wrong shift is off by tenths.
PARITY = {"fp32": 2e-4, "bf16": 2e-2}
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_base(folder: Path, texts: list[str], layers: int, hidden: int) -> None:
    """A random Llama with a byte-level tokenizer of 8,000 tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    )
    bpe.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
