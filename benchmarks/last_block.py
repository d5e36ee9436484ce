"""The last decoder layer with all rows and with those alone that the loss reads: forward and backward of one
micro-batch.

    OMP_NUM_THREADS=1 python benchmarks/last_block.py [--turns 5] [--layers 12]

A random Llama (768 wide, 12 heads, 2,048 between, 32,000 words) in bf16 with LoRA of rank 32 on every linear layer and
the other fast paths in place; one packed row of 2,000 tokens, of which 12 % are learned. One model for all arms, which
are interleaved; the process's own CPU time is taken, so that others on the machine disturb little. The arm "first
block's input" lets the embeddings ask for a gradient, as PEFT and transformers do under gradient checkpointing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.data.batching.batch import Batch, Example, pack
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.adapters import add_adapter
from surefoot.models.fast.adapters import adapter_path
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.last_block import last_block_path
from surefoot.models.fast.packing import packed_attention
from surefoot.models.forward import causal_model
from surefoot.models.product_flops import ProductFlops
from surefoot.planning.plan import AdapterPlan, Choice

LENGTHS, LEARNED, WORDS = (250, 225, 200, 175, 150, 150, 150, 125, 125, 125, 100, 100, 75, 50), 0.12, 32_000
ALIKE = 1e-2  # of the losses, relative; bf16
Undo = Callable[[], None]


def batch() -> Batch:
    draw = np.random.default_rng(0)
    return pack(
        [Example(draw.integers(3, WORDS, n), np.arange(n) >= n - round(LEARNED * n), i) for i, n in enumerate(LENGTHS)]
    )


def adapted(layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=12
    )
    base = LlamaForCausalLM(config).bfloat16()  # pyright: ignore[reportCallIssue]
    targets = tuple(name for name, one in base.named_modules() if isinstance(one, nn.Linear) and name != "lm_head")
    plan = AdapterPlan(Choice("lora", "", "user"), 32, 64.0, 0.0, False, Choice(targets, "", "user"), (), 0)
    model = add_adapter(base, plan, seed=0, base="", autocast=True).train()
    for path in (packed_attention("matmul"), adapter_path(), loss_path(256)):
        path.install(model)
    return model


def asking(model: nn.Module) -> Undo:
    """The embeddings' output wants a gradient until it is undone."""
    base = causal_model(model)
    base.enable_input_require_grads()
    return base.disable_input_require_grads


def run(model: nn.Module, data: Batch) -> float:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = sft_loss(model, data).loss / data.weight
    loss.backward()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, data = adapted(given.layers), batch()
    arms: dict[str, Callable[[], Undo]] = {
        "first block's input": lambda: asking(model),
        "plain": lambda: lambda: None,
        "pruned": lambda: last_block_path().install(model),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    losses, flops = {}, {}
    for turn in range(given.turns + 1):  # the first warms up, and counts
        for name, install in arms.items():
            undo = install()
            if turn:
                begin = time.process_time()
                run(model, data)
                seconds[name].append(time.process_time() - begin)
            else:
                with ProductFlops() as seen:
                    losses[name] = run(model, data)
                flops[name] = seen.total
            undo()
    assert all(abs(loss - losses["plain"]) <= ALIKE * losses["plain"] for loss in losses.values()), losses
    print(f"{data.tokens} tokens, {data.weight} learned, {given.layers} layers, losses {losses}")
    print("| arm | GFLOP | CPU ms | times as fast |")
    print("|---|---:|---:|---:|")
    for name, own in seconds.items():
        gain = statistics.median(plain / one for plain, one in zip(seconds["plain"], own, strict=True))
        print(f"| {name} | {flops[name] / 1e9:.0f} | {1e3 * statistics.median(own):.0f} | {gain:.3f} |", flush=True)


if __name__ == "__main__":
    main()
