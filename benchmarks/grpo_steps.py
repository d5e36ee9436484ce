"""Stage grpo beside TRL's GRPOTrainer with its transformers backend: rollouts and whole steps, in turns.

    PYTHONPATH=src TRL/bin/python benchmarks/grpo_steps.py [--layers 6] [--hidden 256] [--prompts 8] [--group 8]
                                    [--new 48] [--steps 4] [--rounds 3] [--threads 1]

TRL/bin/python: an environment with TRL over surefoot's own packages. A random Llama with a LoRA adapter, plain fp32,
the same prompts, the same reward, loss dapo without KL, one update for a rollout. Parity comes first: both ask the
model with the same prompt ids, and their greedy answers to them are the same tokens. Each turn trains a fresh adapter;
its first step, which sets things up, is not counted. A step lasts from one call of the reward to the next. Rollouts are
timed around what generates; both return token ids, surefoot also the log-probability of each. Counted are response
tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

import surefoot
from surefoot.commands import quickstart
from surefoot.models.rollout import EmbeddedRollouts
from surefoot.system.errors import NothingLearned

BASE = Path(quickstart.__file__).parent / "base"
VOCABULARY, RANK, RATE = 16_384, 16, 1e-4
WORDS = ("owl", "heron", "trout", "sky", "elm", "rose", "tram", "oboe")


class Watch:
    """What one turn does: when the reward was asked, and how long it generated.

    asked: the prompts' ids of the last rollout, and its answers.
    """

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.tokens: list[int] = []
        self.generated: list[float] = []
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def reward(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        self.calls.append(time.perf_counter())
        return [(37 * place % 97) / 97 for place, _ in enumerate(responses)]  # also of equal answers

    def rollout(self, seconds: float, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        self.generated.append(seconds)
        self.asked = [(tuple(prompt), tuple(answer)) for prompt, answer in pairs]
        self.tokens.append(sum(len(answer) for _, answer in pairs))

    def rates(self) -> tuple[float, float]:
        """Response tokens/s of rollouts and of whole steps, without the first of either."""
        whole = [after - before for before, after in zip(self.calls[1:], self.calls[2:], strict=False)]
        tokens = self.tokens[1:]
        return sum(tokens) / sum(self.generated[1:]), sum(tokens[: len(whole)]) / sum(whole)


def make_world(folder: Path, asked: argparse.Namespace) -> list[str]:
    """The base, and the prompts' texts: WORDS in other orders, of 6 to 24 words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=asked.hidden,
        intermediate_size=4 * asked.hidden,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.hidden // 32,
        num_key_value_heads=asked.hidden // 64,
        max_position_embeddings=1024,
    )
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = None
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    lengths = [6 + (18 * place) // max(1, asked.prompts - 1) for place in range(asked.prompts)]
    return [
        " ".join(WORDS[(place + word * (place + 1)) % 8] for word in range(size)) for place, size in enumerate(lengths)
    ]


def ours(folder: Path, texts: Sequence[str], asked: argparse.Namespace, steps: int, temperature: float = 1.0) -> Watch:
    watch = Watch()
    data = folder / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    whole = EmbeddedRollouts.answer

    def timed(self: EmbeddedRollouts, prompts: Any, decoding: Any, places: Any = None) -> Any:
        started = time.perf_counter()
        found = whole(self, prompts, decoding, places)
        watch.rollout(time.perf_counter() - started, [(one.prompt, one.response) for one in found])
        return found

    EmbeddedRollouts.answer = timed
    config = {
        "stage": "grpo",
        "model": str(folder / "base"),
        "adapter": {"kind": "lora", "rank": RANK, "alpha": 2 * RANK},
        "data": {"train": str(data), "template": "plain", "max_length": 256},
        "grpo": {"group": asked.group, "max_new_tokens": asked.new, "temperature": temperature, "patience": 99},
        "batch": {"size": asked.prompts * asked.group, "micro": asked.micro},
        "optim": {"lr": RATE},
        "precision": "fp32",
        "gradient_checkpointing": False,
        "duration": f"{steps} steps",
        "output": str(folder / "ours"),
    }
    try:
        with contextlib.suppress(NothingLearned):  # at the temperature of the parity check no gradient is left
            surefoot.train(config, reward=watch.reward, overwrite=True, stream=io.StringIO())
    finally:
        EmbeddedRollouts.answer = whole
    return watch


def theirs(
    folder: Path, texts: Sequence[str], asked: argparse.Namespace, steps: int, temperature: float = 1.0
) -> Watch:
    watch = Watch()

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return watch.reward(prompts, completions)

    config = GRPOConfig(
        output_dir=str(folder / "theirs"),
        per_device_train_batch_size=asked.micro,
        gradient_accumulation_steps=asked.prompts * asked.group // asked.micro,
        num_generations=asked.group,
        max_completion_length=asked.new,
        temperature=temperature,
        learning_rate=RATE,
        max_steps=steps,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        beta=0.0,
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    trainer = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"{text}\n" for text in texts]}),
        processing_class=AutoTokenizer.from_pretrained(folder / "base"),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM"),
    )
    whole = trainer._generate_single_turn

    def timed(prompts: Any, *rest: Any, **more: Any) -> Any:
        started = time.perf_counter()
        found = whole(prompts, *rest, **more)
        watch.rollout(time.perf_counter() - started, list(zip(prompts, found[0], strict=True)))
        return found

    trainer._generate_single_turn = timed
    trainer.train()
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 6, "hidden": 256, "prompts": 8, "group": 8, "new": 48, "steps": 4, "rounds": 3, "threads": 1}
    for name, value in (sizes | {"micro": 16}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "trl")), flush=True)
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()) as said:
        folder = Path(name)
        texts = make_world(folder, asked)
        near = 1e-6  # a temperature at which the likeliest token is drawn
        answers = [dict(arm(folder, texts, asked, 1, near).asked) for arm in (ours, theirs)]
        assert answers[0].keys() == answers[1].keys(), (
            f"other prompts: {next(iter(answers[0]))}, {next(iter(answers[1]))}"
        )
        same = sum(answers[0][prompt] == answers[1][prompt] for prompt in answers[0])
        assert same == len(answers[0]), f"greedy answers differ: {same} of {len(answers[0])} are equal"
        rates: dict[str, list[tuple[float, float]]] = {"surefoot": [], "TRL": []}
        for _ in range(asked.rounds):
            for side, arm in (("surefoot", ours), ("TRL", theirs)):
                rates[side].append(arm(folder, texts, asked, asked.steps + 1).rates())
    del said
    print("| response tokens/s | surefoot | TRL | times as fast |\n|---|---:|---:|---:|")
    for place, what in enumerate(("rollouts", "whole steps")):
        own, other = ([one[place] for one in rates[side]] for side in ("surefoot", "TRL"))
        times = [a / b for a, b in zip(own, other, strict=True)]
        row = f"{statistics.median(own):.0f} | {statistics.median(other):.0f} | {statistics.median(times):.2f}"
        print(f"| {what} | {row} ({min(times):.2f} to {max(times):.2f}) |")


if __name__ == "__main__":
    main()
