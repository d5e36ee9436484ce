"""Facts about the machine, as plain values. The only reader of device facts and environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Hardware:
    """One accelerator (or the CPU) as the plan sees it. memory: bytes that one process can use."""

    name: str
    kind: Literal["cpu", "cuda", "mps"]
    memory: int
    capability: tuple[int, int] | None  # CUDA compute capability
    bf16: bool  # computed in hardware (not merely accepted)
    fp16: bool
    tf32: bool
    cores: int  # CPU threads of this process
    preset: bool  # True: described, not present; nothing can be measured


@dataclass(frozen=True)
class TerminalWishes:
    """What the environment asks of programs that print. dumb: the terminal understands no escape codes."""

    no_color: bool
    force_color: bool
    dumb: bool


def terminal_wishes() -> TerminalWishes:
    """NO_COLOR and FORCE_COLOR count when they are set and not empty (no-color.org, force-color.org)."""
    return TerminalWishes(
        no_color=bool(os.environ.get("NO_COLOR")),
        force_color=bool(os.environ.get("FORCE_COLOR")),
        dumb=os.environ.get("TERM", "").lower() in {"dumb", "unknown"},
    )
