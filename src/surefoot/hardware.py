"""Facts about the machine, as plain values. The only reader of device facts and environment variables."""

from __future__ import annotations

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
