"""Short instructions in padded rows as they come, in padded rows of like lengths, and packed: forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/packing.py DATA.json [--steps 2] [--turns 3] [--products bf16]

DATA.json: records with instruction, input and output, such as LLaMA-Factory's alpaca_en_demo.json. A random Llama (4
layers, 512 wide, 8 heads), all weights trained, steps of 32 examples; a micro-batch has at most 2,048 tokens, or 8
examples where rows are as they come. Every arm computes the same examples, and its losses are compared before any time
counts. Arms are interleaved and the process's own CPU time is taken, so that others on the machine disturb little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.data.batching.batch import Batch, Example, Weighted, collate, pack
from surefoot.data.batching.loader import packed_rows, padded_rows
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.fast.packing import packed_attention
from surefoot.training.objective import Objective

SIZE, MICRO, TOKENS, WORDS = 32, 8, 2048, 8000
ALIKE = {"fp32": 1e-4, "bf16": 2e-2}  # of the losses of two layouts, relative


def examples(path: Path) -> list[Example]:
    """Prompt and answer by a tokenizer of the data's own, the answer supervised."""
    records = json.loads(path.read_text(encoding="utf-8"))
    prompts = [f"### Instruction:\n{one['instruction']}\n{one.get('input', '')}\n\n### Response:\n" for one in records]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=WORDS, show_progress=False)
    tokenizer.train_from_iterator([*prompts, *(one["output"] for one in records)], trainer)
    found = []
    for number, (prompt, one) in enumerate(zip(prompts, records, strict=True)):
        asked, answered = (tokenizer.encode(text).ids for text in (prompt, one["output"]))
        ids = np.array([*asked, *answered][:TOKENS])
        found.append(Example(ids, np.arange(len(ids)) >= len(asked), number))
    return found


def layouts(step: Sequence[Example]) -> dict[str, list[Batch]]:
    lengths = [len(one.ids) for one in step]
    return {
        "as they come": [collate(step[first : first + MICRO], 0) for first in range(0, len(step), MICRO)],
        "of like lengths": [collate([step[place] for place in row], 0) for row in padded_rows(lengths, TOKENS)],
        "packed": [pack([step[place] for place in row]) for row in packed_rows(lengths, TOKENS)],
    }


def run(model: nn.Module, objective: Objective, batches: Sequence[Weighted]) -> float:
    """The summed loss, with gradients."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = objective(model, batch).loss
        loss.backward()
        total += float(loss.detach())
    return total


def asked(described: str | None) -> argparse.Namespace:
    """What the command line says: data, steps, turns and products."""
    parser = argparse.ArgumentParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--products", choices=["fp32", "bf16"], default="bf16")
    return parser.parse_args()


def main() -> None:
    given = asked(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).train()
    if given.products == "bf16":
        model.bfloat16()
    data = examples(given.data)
    order = np.random.default_rng(0).permutation(len(data))
    steps = [layouts([data[place] for place in order[SIZE * step : SIZE * (step + 1)]]) for step in range(given.steps)]
    arms = [("padded, as they come", "as they come", ""), ("padded, of like lengths", "of like lengths", "")]
    arms += [(f"packed, {form}", "packed", form) for form in ("sdpa", "matmul")]
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in arms}
    losses: dict[str, float] = {}
    for turn in range(given.turns + 1):  # the first warms up
        for name, layout, form in arms:
            undo = packed_attention(form).install(model) if form else lambda: None
            begin = time.process_time()
            losses[name] = sum(run(model, sft_loss, step[layout]) for step in steps)
            if turn:
                seconds[name].append(time.process_time() - begin)
            undo()
    first = losses[arms[0][0]]
    assert all(abs(loss - first) < ALIKE[given.products] * first for loss in losses.values()), losses
    print(f"{given.products}: {sum(batch.tokens for step in steps for batch in step['packed'])} real tokens")
    print("| rows | micro-batches | tokens with padding | CPU ms per 1,000 real tokens | times as fast |")
    print("|---|---:|---:|---:|---:|")
    usual = statistics.median(seconds[arms[1][0]])
    for name, layout, _ in arms:
        batches = [batch for step in steps for batch in step[layout]]
        real, all_tokens = sum(one.tokens for one in batches), sum(one.input_ids.numel() for one in batches)
        middle = statistics.median(seconds[name])
        cells = f"{len(batches)} | {all_tokens} | {1e6 * middle / real:.0f} | {usual / middle:.2f}"
        print(f"| {name} | {cells} |")


if __name__ == "__main__":
    main()
