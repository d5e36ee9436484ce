"""A base that has seen a calculator being used, and not used, learns to use it. Offline, minutes on two cores:

    python examples/calculator.py runs/calculator          # pre-trains the base, then GRPO with a tool
    python examples/calculator.py runs/calculator control  # the same with random numbers in place of the reward

The base is the model of arithmetic.py, pre-trained by surefoot on conversations about products such as 37*6. In most of
them the answer is guessed at once, nearly always wrong. In a quarter the first turn asks the calculator, ?37*6,
sometimes for another product; then comes its reply, and a last turn that sometimes misreads it. GRPO shows it no
conversation: the environment says whether the last turn was right. Held out are products that no prompt asks for and no
conversation of the base is about.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import arithmetic

ASKS, ASKS_RIGHT, READS_RIGHT, GUESSES_RIGHT = 0.25, 0.7, 0.7, 0.05  # shares in the base's conversations
LONGEST = 48  # tokens of a conversation
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


def grpo_config(folder: Path, arm: str, epochs: int) -> dict[str, Any]:
    """arm: reward or control."""
    own = {"environment": {"name": f"{__file__}:Calculator", "turns": 2}, "max_new_tokens": 24}
    return {
        **arithmetic.grpo_config(folder, arm, epochs, LONGEST, **own),
        "optim": {"lr": 3e-4, "schedule": "constant"},
        "eval_every": "1 epochs",
    }


def main(folder: Path, arm: str = "reward", *, base_epochs: int = 5, epochs: int = 6) -> dict[str, float]:
    """What the run measured at its end, by the names of all_results.json."""
    arithmetic.make_base(folder / "random", "*?[]", TEMPLATE)
    write_data(folder)
    return arithmetic.train(arithmetic.base_config(folder, base_epochs, LONGEST), grpo_config(folder, arm, epochs))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["control"]):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *sys.argv[2:])
