"""How fast this machine moves memory: what every operator that is not a matrix product waits for."""

from __future__ import annotations

import torch

from surefoot.planning.probes.limits import LIMITS
from surefoot.planning.probes.timing import best_seconds, one_thread


def copy_rate(device: torch.device, *, budget: float = 0.1) -> float:
    """Bytes read and written per second in copying one large block to another; on a CPU by one thread."""
    size = LIMITS[device.type].copy_bytes
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with one_thread():
        seconds = best_seconds({"copy": lambda: target.copy_(source)}, budget=budget, rounds=20, wait=wait)
    return 2 * size / seconds["copy"]
