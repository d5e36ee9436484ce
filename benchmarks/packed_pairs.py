"""Pairs of answers in padded rows, in padded rows whose prompts are computed once, and packed: forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/packed_pairs.py DATA.json [--steps 2] [--turns 3] [--products bf16]

DATA.json: records with prompt, chosen and rejected. A random Llama (4 layers, 256 wide, 8 heads), all weights trained,
steps of 16 pairs; a micro-batch has at most 4,096 tokens, padding counted, and an answer at most 512 with its prompt.
Counted are the tokens that go through the decoder. Every arm computes the same pairs, and its losses are compared
before any time counts. Arms are interleaved and the process's own CPU time is taken, so that others on the machine
disturb little.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from packing import asked, run
from surefoot.data.batching.batch import Example, PairBatch
from surefoot.data.batching.loader import Layout, common_beginning, to_batch
from surefoot.methods.losses.preference import Constants, preference_loss
from surefoot.methods.losses.reward import reward_objective
from surefoot.models.fast.packing import packed_attention
from surefoot.models.shared_prefix import tokens_with_shared
from surefoot.models.value_head import ScoredModel, ValueHead

SIZE, TOKENS, LONGEST, WORDS = 16, 4096, 512, 8000
ALIKE = {"fp32": 1e-4, "bf16": 2e-2}  # of the losses of two layouts, relative
Pair = tuple[Example, Example]
ARMS = (
    ("reward", "padded", ""),
    ("reward", "prompts computed once", ""),
    ("reward", "packed", "sdpa"),
    ("reward", "packed", "matmul"),
    ("dpo", "padded", ""),
    ("dpo", "packed", "sdpa"),
    ("dpo", "packed", "matmul"),
)


def read_pairs(path: Path) -> list[Pair]:
    """By a tokenizer of the data's own; pairs that are too long are left out."""
    records = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=WORDS, show_progress=False)
    tokenizer.train_from_iterator((one[key] for one in records for key in ("prompt", "chosen", "rejected")), trainer)
    found = []
    for number, one in enumerate(records):
        asked, *answers = (tokenizer.encode(one[key]).ids for key in ("prompt", "chosen", "rejected"))
        both = [np.array([*asked, *answer]) for answer in answers]
        if asked and all(len(asked) < len(ids) <= LONGEST for ids in both):
            better, worse = (Example(ids, np.arange(len(ids)) >= len(asked), number) for ids in both)
            found.append((better, worse))
    return found


def batches(step: Sequence[Pair], layout: Layout) -> list[PairBatch]:
    found = []
    for group in layout.groups([[len(one.ids) for one in pair] for pair in step]):
        sides = [[step[place][side] for place in group] for side in (0, 1)]
        rows = to_batch([*sides[0], *sides[1]], layout)
        common = tuple(common_beginning(*both) for both in zip(*sides, strict=True))
        found.append(PairBatch(rows, common, len(group), reference=torch.zeros(2 * len(group))))
    return found


def counted(way: str, batch: PairBatch) -> int:
    """Tokens that go through the decoder."""
    if way == "prompts computed once":
        return tokens_with_shared(batch.rows.lengths, batch.common)
    return batch.rows.input_ids.numel()


def main() -> None:
    given = asked(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8
    )
    policy = LlamaForCausalLM(config).train()
    if given.products == "bf16":
        policy.bfloat16()
    scored = ScoredModel(policy, ValueHead(256))
    torch.nn.init.normal_(scored.v_head.summary.weight, std=0.02)
    data = read_pairs(given.data)
    order = np.random.default_rng(0).permutation(len(data))
    steps = [[data[place] for place in order[SIZE * step : SIZE * (step + 1)]] for step in range(given.steps)]
    laid = {
        packed: [batches(step, Layout(0, tokens=TOKENS, packed=packed)) for step in steps] for packed in (False, True)
    }
    seconds: dict[tuple[str, str, str], list[float]] = {arm: [] for arm in ARMS}
    losses: dict[tuple[str, str, str], float] = {}
    for turn in range(given.turns + 1):  # the first warms up
        for arm in ARMS:
            stage, way, form = arm
            once = reward_objective("last", shared=way == "prompts computed once")
            objective = once if stage == "reward" else preference_loss("sigmoid", Constants(0.01))
            model = scored if stage == "reward" else policy
            undo = packed_attention(form).install(policy) if form else lambda: None
            begin = time.process_time()
            losses[arm] = sum(run(model, objective, step) for step in laid[way == "packed"])
            if turn:
                seconds[arm].append(time.process_time() - begin)
            undo()
    real = sum(batch.tokens for step in laid[True] for batch in step)
    print(f"{given.products}: {len(data)} pairs, {real:,} real tokens in {given.steps * SIZE} of them")
    print("| stage | rows | micro-batches | tokens computed | CPU ms per 1,000 real tokens | times as fast |")
    print("|---|---|---:|---:|---:|---:|")
    for arm in ARMS:
        stage, way, form = arm
        usual = next(one for one in ARMS if one[0] == stage)
        assert abs(losses[arm] - losses[usual]) < ALIKE[given.products] * losses[usual], losses
        own = [batch for step in laid[way == "packed"] for batch in step]
        middle = statistics.median(seconds[arm])
        faster = statistics.median(a / b for a, b in zip(seconds[usual], seconds[arm], strict=True))
        name = f"{way}, `{form}`" if form else way
        tokens = sum(counted(way, batch) for batch in own)
        print(f"| {stage} | {name} | {len(own)} | {tokens:,} | {1e6 * middle / real:.0f} | {faster:.2f} |")


if __name__ == "__main__":
    main()
