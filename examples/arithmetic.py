"""A base that has seen sums learns to get them right from a reward alone. Offline, minutes on two cores:

    python examples/arithmetic.py runs/arithmetic          # pre-trains the base, then GRPO with a verifiable reward
    python examples/arithmetic.py runs/arithmetic bug      # the same with a reward that has a bug
    python examples/arithmetic.py runs/arithmetic control  # the same with random numbers in place of the reward

The base is a model of 0.4 M parameters over single characters, pre-trained by surefoot on sums of which most have a
wrong answer, off by a little: it knows what a sum looks like, and is right about as often as its data. GRPO shows it
no answer; `numeric` only says whether one was right. Held out are sums that no prompt asks for.

The reward with a bug is `not_below`: 1 where the answer is at least the right one. The strict `numeric` stands beside
it with weight 0, so it is logged and not learned from. docs/grpo.md says what the report then shows.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import surefoot

HIGHEST = 10  # a + b with both below
RIGHT = 0.4  # share of the base's sums with the right answer
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% else %}"
    "{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def not_below(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """The bug: >= where == was meant."""
    return [float(said.isdigit() and int(said) >= int(one)) for said, one in zip(responses, answer, strict=True)]


def make_base(folder: Path, signs: str = "+=", template: str = TEMPLATE) -> None:
    """A Llama with random weights, and a tokenizer of digits, these signs and the blank."""
    folder.mkdir(parents=True, exist_ok=True)
    known = [*f"0123456789{signs} ", "<end>", "<pad>", "<unknown>"]
    letters = {letter: number for number, letter in enumerate(known)}
    backend = Tokenizer(models.WordLevel(letters, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unknown>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=letters["<end>"],
        pad_token_id=letters["<pad>"],
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_data(folder: Path) -> None:
    """texts.jsonl for the base, prompts.jsonl and held-out.jsonl for GRPO."""
    draw = random.Random("sums")
    pairs = [(a, b) for a in range(HIGHEST) for b in range(HIGHEST)]
    draw.shuffle(pairs)
    texts = []
    for a, b in pairs * 24:
        off = 0 if draw.random() < RIGHT else draw.choice([-3, -2, -1, 1, 2, 3, 4, 5])
        texts.append({"instruction": f"{a}+{b}=", "output": str(max(0, a + b + off))})
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    for name, records in (("texts", texts), ("held-out", sums[:20]), ("prompts", sums[20:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def base_config(folder: Path, epochs: int, max_length: int = 32) -> dict[str, Any]:
    return {
        "stage": "sft",
        "model": str(folder / "random"),
        "data": {"train": str(folder / "texts.jsonl"), "eval": 0.05, "max_length": max_length},
        "precision": "fp32",
        "batch": {"size": 128},
        "optim": {"lr": 2e-3},
        "duration": f"{epochs} epochs",
        "eval_every": "1 epoch",
        "checkpoint": {"every": "20 epochs", "keep": 1, "best": "none"},
        "output": str(folder / "base"),
    }


def grpo_config(folder: Path, arm: str, epochs: int, max_length: int = 32, **own: Any) -> dict[str, Any]:
    """arm: control, or another one. own: where the reward comes from, and other keys of `grpo`."""
    return {
        "stage": "grpo",
        "model": str(folder / "base"),
        "data": {
            "train": str(folder / "prompts.jsonl"),
            "eval": str(folder / "held-out.jsonl"),
            "max_length": max_length,
        },
        "grpo": {"control": "random" if arm == "control" else "none", "group": 16, "eval_answers": 8, **own},
        "precision": "fp32",
        "batch": {"size": 128},
        "optim": {"lr": 1e-4, "schedule": "constant"},
        "duration": f"{epochs} epochs",
        "eval_every": "6 epochs",
        "eval_at_start": True,
        "log_every": 4,
        "checkpoint": {"every": "20 epochs", "keep": 1, "best": "none"},
        "samples": {"count": 3},
        "output": str(folder / arm),
    }


def train(base: dict[str, Any], arm: dict[str, Any]) -> dict[str, float]:
    """Train the base, where that is not done yet, and the arm: configs. What the arm measured at its end, by the names
    of all_results.json."""
    if not (Path(base["output"]) / "MANIFEST.json").is_file():
        surefoot.train(base, overwrite=True)
    surefoot.train(arm)
    return json.loads((Path(arm["output"]) / "all_results.json").read_text())


def main(folder: Path, arm: str = "reward", *, base_epochs: int = 16, epochs: int = 48) -> dict[str, float]:
    """What the run measured at its end."""
    make_base(folder / "random")
    write_data(folder)
    rewards = [f"{__file__}:not_below", {"name": "numeric", "weight": 0}] if arm == "bug" else ["numeric"]
    own = {"rewards": rewards, "max_new_tokens": 12}
    return train(base_config(folder, base_epochs), grpo_config(folder, arm, epochs, **own))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["bug"], ["control"]):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *sys.argv[2:])
