"""Pairs whose prompt is computed once against pairs as whole rows: forward and backward of one micro-batch.

    python benchmarks/shared_prompts.py [--threads 1] [--turns 3]

A random Llama, all weights trained; turns are interleaved and the process's own CPU time is taken, so that others on
the machine disturb little. Prints what docs/evidence/shared-prompts.md has.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.data.batching.batch import Example, PairBatch, collate
from surefoot.methods.losses.reward import reward_objective
from surefoot.models.value_head import ScoredModel, ValueHead, freeze_output_head

SHAPES = [(4, 64, 64), (4, 256, 64), (4, 256, 128), (2, 512, 96)]  # pairs, tokens of a prompt, of an answer


def batch(pairs: int, prompt: int, answer: int) -> PairBatch:
    draw = np.random.default_rng(0)
    sides: list[list[Example]] = [[], []]
    for number in range(pairs):
        asked = draw.integers(3, 8000, prompt)
        for side in (0, 1):
            ids = np.concatenate([asked, [side], draw.integers(3, 8000, answer - 1)])
            sides[side].append(Example(ids, np.ones(len(ids), bool), number))
    return PairBatch(collate([*sides[0], *sides[1]], 0), (prompt,) * pairs, pairs)


def seconds(model: ScoredModel, data: PairBatch, shared: bool, bf16: bool) -> float:
    started = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = reward_objective("last", shared=shared)(model, data).loss
    loss.backward()
    model.zero_grad()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8
    )
    backbone = LlamaForCausalLM(config).train()
    freeze_output_head(backbone)
    model = ScoredModel(backbone, ValueHead(512))
    torch.nn.init.normal_(model.v_head.summary.weight)
    for bf16 in (False, True):
        for shape in SHAPES:
            data = batch(*shape)
            turns = [[seconds(model, data, shared, bf16) for shared in (False, True)] for _ in range(asked.turns + 1)][
                1:
            ]
            whole, once = (statistics.median(column) for column in zip(*turns, strict=True))
            print(
                f"| {'bf16' if bf16 else 'fp32'} | {shape[0]} | {shape[1]} | {shape[2]} | {1e3 * whole:.0f} | "
                f"{1e3 * once:.0f} | **{statistics.median(a / b for a, b in turns):.2f}** |",
                flush=True,
            )


if __name__ == "__main__":
    main()
