"""LoRA and DoRA by PEFT's own forward against surefoot's: forward and backward of one micro-batch.

    python benchmarks/adapters.py [--threads 1] [--turns 5] [--products bf16] [--operators]

A random Llama (6 layers, 768 wide, 12 heads, 2,048 between) with an adapter of rank 32 on every linear layer, 8 answers
to short instructions; the loss is taken at answers alone. Arms are interleaved and the process's own CPU time is taken,
so that others on the machine disturb little. One optimizer step lies between two passes, as in a run without
accumulation, so that what is computed once per step is computed every time. Prints what docs/evidence/adapters.md has.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.data.batching.batch import Batch, Example, collate
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.adapters import add_adapter
from surefoot.models.fast.adapters import install
from surefoot.planning.plan import AdapterPlan, Choice

LENGTHS = (212, 205, 198, 190, 186, 181, 177, 170)  # about what is packed together of short instructions
ANSWER = 48
ARMS = [(kind, fast) for kind in ("none", "lora", "dora") for fast in (False, True) if kind != "none" or not fast]


def batch() -> Batch:
    draw = np.random.default_rng(0)
    return collate(
        [Example(draw.integers(3, 8000, n), np.arange(n) >= n - ANSWER, row) for row, n in enumerate(LENGTHS)], 0
    )


def base(bf16: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12
    )
    return LlamaForCausalLM(config).to(torch.bfloat16 if bf16 else torch.float32)  # pyright: ignore[reportArgumentType, reportCallIssue]


def model(kind: str, fast: bool, bf16: bool) -> nn.Module:
    """kind: none gives every layer's input a gradient and trains the first norm alone: the step without an adapter."""
    found = base(bf16)
    if kind == "none":
        found.requires_grad_(False)
        found.model.layers[0].input_layernorm.weight.requires_grad_(True)
        return found.train()
    targets = tuple(n for n, m in found.named_modules() if isinstance(m, nn.Linear) and n != "lm_head")
    plan = AdapterPlan(Choice(kind, "", "user"), 32, 64.0, 0.0, False, Choice(targets, "", "user"), (), 0)
    adapted = add_adapter(found, plan, seed=0, base="", autocast=bf16).train()
    if fast:
        install(adapted)
    return adapted


def stepper(kind: str, fast: bool, bf16: bool) -> Callable[[], float]:
    """One pass and one optimizer step; returns the CPU seconds of the pass."""
    trained, data = model(kind, fast, bf16), batch()
    optimizer = torch.optim.SGD([one for one in trained.parameters() if one.requires_grad], lr=1e-3)

    def once() -> float:
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = sft_loss(trained, data).loss / data.weight
        loss.backward()
        seconds = time.process_time() - started
        optimizer.step()
        optimizer.zero_grad()
        return seconds

    return once


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--products", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--operators", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    arms = {arm: stepper(*arm, asked.products == "bf16") for arm in ARMS}
    if asked.operators:
        for arm, once in arms.items():
            once()
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                once()
            print(arm, seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=40))
        return
    turns = [{arm: once() for arm, once in arms.items()} for _ in range(asked.turns + 1)][1:]
    for arm in ARMS:
        plain = (arm[0], False)
        median = statistics.median(turn[arm] for turn in turns)
        gain = statistics.median(turn[plain] / turn[arm] for turn in turns)
        beside = statistics.median(turn[arm] / turn["lora", True] for turn in turns)
        name = f"{arm[0]} {'fast' if arm[1] else 'plain'}"
        print(f"| {asked.products} | {name} | {1e3 * median:.0f} | {gain:.2f} | {beside:.2f} |", flush=True)


if __name__ == "__main__":
    main()
