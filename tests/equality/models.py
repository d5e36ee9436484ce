"""The tiny models that the tools and surefoot are run on side by side: one per family of the zoo."""

import sys
from pathlib import Path

from helpers import zoo

FAMILIES = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "phi3", "gemma2")


def build(name: str, folder: Path) -> Path:
    """Without dropout and, for Llama 3, with the reserved pad of 3.1."""
    return getattr(zoo, name)(folder / name)


if __name__ == "__main__":
    for family in FAMILIES:
        build(family, Path(sys.argv[1]))
