"""The command blocks of the documents that surefoot grew from, and what stands in for names that a test cannot use.

The documents lie beside the checkout on some machines only, so nothing of them is copied here.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEEDS = Path(__file__).parents[3].parent / "shared" / "seeds"
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """number: its place among the fenced blocks of the document, from 0. language: as after the fence."""

    seed: str
    number: int
    language: str
    text: str

    @property
    def kind(self) -> str:
        """command: whole, for a shell. flags: to be added to one. code: Python. shown: output, files, settings."""
        if self.language == "python":
            return "code"
        if self.language != "bash":
            return "shown"
        words = [line for line in self.text.splitlines() if not line.startswith("#")]
        return "flags" if all(line.startswith("--") for line in words) else "command"


def blocks(seed: str) -> list[Block]:
    (path,) = SEEDS.glob(f"{seed}_*.txt")
    found = enumerate(_BLOCK.finditer(path.read_text()))
    return [Block(seed, number, one[2], textwrap.dedent(one[3])) for number, one in found]


def of_kind(kind: str, *seeds: str) -> Iterator[Block]:
    """Nothing where the documents are absent."""
    if SEEDS.is_dir():
        for seed in seeds:
            yield from (block for block in blocks(seed) if block.kind == kind)


# What the tests put in place of names, here and in docs/dialects.md; {…} are folders and files of the test.
SUBSTITUTIONS = {
    "meta-llama/Llama-3.1-8B": "{llama3}",
    "microsoft/Phi-3-mini-4k-instruct": "{phi3}",
    "./commonsense_170k.json": "{commonsense}",
    "tail -f": "tail -n 3",
}
# Flags that are added: the documents' own defaults need the hub, 2,000 records to hold out, or hours.
FINETUNE = {"--data_path": "{commonsense}", "--val_set_size": "4", "--eval_step": "2", "--save_step": "2"}
LLAMAFACTORY = {"--max_samples": "12", "--cutoff_len": "256"}


def substituted(text: str, names: dict[str, str]) -> str:
    for written, used in SUBSTITUTIONS.items():
        text = text.replace(written, used.format(**names))
    return text


def added(command: str, flags: dict[str, str], names: dict[str, str]) -> str:
    """The command with these flags, but for those that it has."""
    more = [f"{flag}={value.format(**names)}" for flag, value in flags.items() if flag not in command]
    return " ".join([command.rstrip().removesuffix("\\").rstrip(), *more])
