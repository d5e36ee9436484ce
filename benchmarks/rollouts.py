"""Rollouts of the embedded engine beside `transformers.generate`: response tokens per second, measured in turns.

    python benchmarks/rollouts.py [--layers 6] [--hidden 256] [--prompts 16] [--new 64] [--rounds 5] [--threads 2]

Both sample from the same distribution (temperature 1, no cut) with the same model object, the same prompts of 8 to 40
tokens in one batch, and the same stop tokens: a sixty-fourth of the vocabulary, so that answers of a random model end
at ragged lengths, as a trained one's do. The embedded engine also returns the log-probability of every token;
transformers is not asked for them, which favours it. Counted are response tokens up to the stop token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.models.adapters import add_adapter
from surefoot.models.generate import Decoding, left_padded
from surefoot.models.rollout import EmbeddedRollouts
from surefoot.planning.plan import AdapterPlan, Choice

VOCABULARY, PAD = 32_000, 0
STOPS = tuple(range(1, VOCABULARY, 64))
Run = Callable[[int], int]  # seed -> response tokens


def build(layers: int, hidden: int, kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
        pad_token_id=PAD,
        eos_token_id=list(STOPS),
    )
    model = LlamaForCausalLM(config)
    if kind == "full":
        return model.eval()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    plan = AdapterPlan(_choice(kind), 16, 32.0, 0.0, False, _choice(tuple(names)), (), trainable=0)
    return add_adapter(model, plan, seed=1, base="base").eval()


def _choice(value: str | tuple[str, ...]) -> Choice:
    return Choice(value, "benchmark", "user")


def embedded(model: nn.Module, prompts: list[list[int]], new: int) -> Run:
    engine = EmbeddedRollouts(model, len(prompts))

    def run(seed: int) -> int:
        found = engine.answer(prompts, Decoding(new, frozenset(STOPS), PAD, temperature=1.0, seed=seed))
        return sum(len(one.response) for one in found)

    return run


def by_transformers(model: nn.Module, prompts: list[list[int]], new: int) -> Run:
    ids, mask = left_padded(prompts, PAD, torch.device("cpu"))
    stops = torch.tensor(STOPS)

    def run(seed: int) -> int:
        torch.manual_seed(seed)
        settings = {"max_new_tokens": new, "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        out = model.generate(input_ids=ids, attention_mask=mask, **settings)[:, ids.shape[1] :]
        ended = torch.isin(out, stops).cumsum(dim=1)
        return int(((ended == 0) | ((ended == 1) & torch.isin(out, stops))).sum())

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"layers": 6, "hidden": 256, "prompts": 16, "new": 64, "rounds": 5, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 41, (asked.prompts,), generator=draw).tolist()
    prompts = [torch.randint(1, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {asked.threads} threads")
    print("| weights | embedded tokens/s | transformers tokens/s | times as fast | rounds |")
    print("| --- | --- | --- | --- | --- |")
    for kind in ("full", "lora", "dora"):
        model = build(asked.layers, asked.hidden, kind)
        runs = {"ours": embedded(model, prompts, asked.new), "theirs": by_transformers(model, prompts, asked.new)}
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run(0)
        for seed in range(1, asked.rounds + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                tokens = run(seed)
                speeds[name].append(tokens / (time.perf_counter() - start))
        ours, theirs = (statistics.median(speeds[name]) for name in ("ours", "theirs"))
        pairs = [a / b for a, b in zip(speeds["ours"], speeds["theirs"], strict=True)]
        print(
            f"| {kind} | {ours:.0f} | {theirs:.0f} | {statistics.median(pairs):.2f} "
            f"({min(pairs):.2f} to {max(pairs):.2f}) | {asked.rounds} |"
        )


if __name__ == "__main__":
    with torch.no_grad():
        main()
