"""Are the moments of the optimizer finite? Looked at before the optimizer moves, for no loss or gradient tells of it.

The look is the 2-norm of every moment, in one pass over them: NaN and infinity go through a sum. So does an overflow of
finite numbers, so what the look finds is confirmed number by number before anybody acts on it.

A pass over the moments of all weights runs at the speed of the memory, and takes as long as it takes to learn from some
dozens of tokens (22 on a CPU, see docs/evidence/reliability.md; by arithmetic up to 180 on a GPU, whose products are
faster against its memory). So where all weights train and steps are short, not every step has one. The optimizer's own
pass could not tell in time: a moment that is infinite in the denominator leaves its weight as it is, unseen, and any
other has moved the weights by then.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

# Tokens that are learned from in the time of one look, where all parameters train. On a CPU 22 by plain steps, more by
# faster ones; on a GPU at the upper end.
_TOKENS = {"cpu": 30}
_TOKENS_ELSEWHERE = 150
_SHARE = 0.01  # of a step's time that looks may take
SMALL = 1 << 20  # parameters that train, whose moments are looked at in no time


def tokens_per_look(trained: int, parameters: int, device: str) -> float:
    """Tokens that have to be learned from for one look to cost next to nothing. trained: of `parameters`. device: its
    type."""
    tokens = _TOKENS.get(device, _TOKENS_ELSEWHERE)
    return 0.0 if trained <= SMALL else tokens / _SHARE * trained / parameters


def is_due(step: int, tokens: int, per_look: float) -> bool:
    """Whether step `step`, which has so many tokens, looks; a function of its arguments, the same on all ranks."""
    return step % max(1, math.ceil(per_look / max(tokens, 1))) == 0


def look(moments: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A scalar on `device` that is finite where all moments are, and hardly otherwise."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in moments:
        if tensor.is_floating_point() and tensor.numel() > 1:
            alike[tensor.device, tensor.dtype].append(tensor)
    total = torch.zeros((), device=device)
    for tensors in alike.values():
        norms = torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]
        total = total + torch.stack(norms).float().sum().to(device)
    return total


def first_bad(moments: Mapping[str, torch.Tensor]) -> str:
    """The name of the first one with a number that is not finite; empty where there is none."""
    return next((name for name, one in moments.items() if not bool(torch.isfinite(one).all())), "")
