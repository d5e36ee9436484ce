"""The tiny models that torchtune's recipes and surefoot train side by side."""

import sys
from pathlib import Path

from helpers import zoo


def build(folder: Path, *, base: bool = False) -> Path:
    """Llama 3.0: torchtune's Llama 3.1 scales rotary positions for a context of 8,192, the small one for 256. base:
    without turns, so that EOS is <|end_of_text|>, as always in torchtune."""
    return zoo.llama3(folder / ("base" if base else "llama3"), version="3.0", chat_template=not base)


def qwen2(folder: Path) -> Path:
    return zoo.qwen2(folder / "qwen2")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    qwen2(Path(sys.argv[1]))
