"""A base that has seen a calculator being used, and not used, learns to use it. Offline, minutes on two cores:

    python examples/calculator.py runs/calculator          # pre-trains the base, then GRPO with a tool
    python examples/calculator.py runs/calculator control  # the same with random numbers in place of the reward

The base is a model of 0.4 M parameters over single characters, pre-trained by surefoot on conversations about products
such as 37*6. In most of them the answer is guessed at once, nearly always wrong. In a quarter the first turn asks the
calculator, ?37*6, sometimes for another product; then comes its reply, and a last turn that sometimes misreads it. GRPO
shows it no conversation: the environment says whether the last turn was right. Held out are products that no prompt
asks for and no conversation of the base is about.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import surefoot

ASKS, ASKS_RIGHT, READS_RIGHT, GUESSES_RIGHT = 0.25, 0.7, 0.7, 0.05  # shares in the base's conversations
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}[{{ message.content }}]{% else %}"
    "{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


class Calculator:
    """The environment: a turn ?A*B is replied to, any other turn is the answer."""

    def reset(self, record: dict[str, Any]) -> None:
        self.right = record["answer"]

    def step(self, answer: str) -> str | dict[str, Any]:
        if call := re.fullmatch(r"\?(\d+)\*(\d+)", answer):
            return str(int(call[1]) * int(call[2]))
        return {"reward": float(answer == self.right), "done": True}


def make_base(folder: Path) -> None:
    """A Llama with random weights, and a tokenizer of digits and signs."""
    letters = {letter: number for number, letter in enumerate([*"0123456789*?[] ", "<end>", "<pad>", "<unknown>"])}
    backend = Tokenizer(models.WordLevel(letters, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unknown>",
        chat_template=TEMPLATE,
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


def other(number: int, draw: random.Random) -> int:
    """The number with another digit somewhere."""
    digits = list(str(number))
    place = draw.randrange(len(digits))
    digits[place] = draw.choice([digit for digit in "123456789" if digit != digits[place]])
    return int("".join(digits))


def conversation(a: int, b: int, draw: random.Random) -> dict[str, Any]:
    """One of the base's conversations, as OpenAI messages."""
    turns = [("user", f"{a}*{b}")]
    if draw.random() < ASKS:
        asked = a if draw.random() < ASKS_RIGHT else other(a, draw)
        turns += [("assistant", f"?{asked}*{b}"), ("user", str(asked * b))]
        right, share = asked * b, READS_RIGHT
    else:
        right, share = a * b, GUESSES_RIGHT
    turns.append(("assistant", str(right if draw.random() < share else other(right, draw))))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write_data(folder: Path) -> None:
    """texts.jsonl for the base, prompts.jsonl and held-out.jsonl for GRPO."""
    draw = random.Random("products")
    pairs = [(a, b) for a in range(10, 100) for b in range(2, 10)]
    draw.shuffle(pairs)
    texts = [conversation(a, b, draw) for a, b in pairs[60:] * 12]
    products = [{"prompt": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs]
    for name, records in (("texts", texts), ("held-out", products[:60]), ("prompts", products[60:380])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def base_config(folder: Path, epochs: int) -> dict[str, Any]:
    return {
        "stage": "sft",
        "model": str(folder / "random"),
        "data": {"train": str(folder / "texts.jsonl"), "eval": 0.05, "max_length": 48},
        "precision": "fp32",
        "batch": {"size": 128},
        "optim": {"lr": 2e-3},
        "duration": f"{epochs} epochs",
        "eval_every": "1 epoch",
        "checkpoint": {"every": "20 epochs", "keep": 1, "best": "none"},
        "output": str(folder / "base"),
    }


def grpo_config(folder: Path, arm: str, epochs: int) -> dict[str, Any]:
    """arm: reward or control."""
    return {
        "stage": "grpo",
        "model": str(folder / "base"),
        "data": {"train": str(folder / "prompts.jsonl"), "eval": str(folder / "held-out.jsonl"), "max_length": 48},
        "grpo": {
            "environment": {"name": f"{__file__}:Calculator", "turns": 2},
            "control": "random" if arm == "control" else "none",
            "group": 16,
            "max_new_tokens": 24,
            "eval_answers": 8,
        },
        "precision": "fp32",
        "batch": {"size": 128},
        "optim": {"lr": 3e-4, "schedule": "constant"},
        "duration": f"{epochs} epochs",
        "eval_every": "1 epochs",
        "eval_at_start": True,
        "log_every": 4,
        "checkpoint": {"every": "20 epochs", "keep": 1, "best": "none"},
        "samples": {"count": 3},
        "output": str(folder / arm),
    }


def main(folder: Path, arm: str = "reward", *, base_epochs: int = 5, epochs: int = 6) -> dict[str, float]:
    """What the run measured at its end, by the names of all_results.json."""
    if not (folder / "base" / "MANIFEST.json").is_file():
        (folder / "random").mkdir(parents=True, exist_ok=True)
        make_base(folder / "random")
        write_data(folder)
        surefoot.train(base_config(folder, base_epochs), overwrite=True)
    surefoot.train(grpo_config(folder, arm, epochs))
    return json.loads((folder / arm / "all_results.json").read_text())


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["control"]):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *sys.argv[2:])
