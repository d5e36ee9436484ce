"""Save and load optimizer state bit-exactly as named tensors, and check that its moments are finite.

torch keys optimizer state by position, which shifts when a model gains or loses a parameter. Names do not shift, so the
state is saved and loaded by name, as safetensors. An entry that an optimizer keeps as a Python int is saved as an int64
scalar; no optimizer keeps such a tensor.

Moments are checked before the optimizer steps, because neither loss nor gradient would show that one is not finite. The
check computes the 2-norm of every moment, through which NaN and infinity propagate. Finite values may overflow there as
well, so a hit is confirmed elementwise before the step is rejected.

A pass over the moments of all weights is limited by memory bandwidth and takes as long as training on some dozens of
tokens (22 on a CPU, see docs/evidence/reliability.md; by arithmetic up to 180 on a GPU, with its higher ratio of
compute to bandwidth). So in full fine-tuning with short steps not every step has a check. A check inside the optimizer
would come too late: an infinite second moment leaves its weight unchanged, so nothing shows, and any other bad moment
has already corrupted the weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from surefoot.models.save import without_sharing
from surefoot.system.errors import IntegrityError
from surefoot.training.manifest import damaged
from surefoot.training.optimizer import Optimizer

FILE = "optimizer.safetensors"
_BLOCK = 256  # elements that share one scale in bitsandbytes' 8-bit moments
_CODES = 256  # values of an 8-bit code

# Optimizer state entry -> its shape as a function of the parameter's shape.
_SHAPES: dict[str, Callable[[torch.Size], tuple[int, ...]]] = {
    **dict.fromkeys(("step", "RMS"), lambda shape: ()),
    **dict.fromkeys(("exp_avg", "exp_avg_sq", "square_avg", "momentum_buffer"), tuple),
    "exp_avg_sq_row": lambda shape: tuple(shape[:-1]),  # adafactor
    "exp_avg_sq_col": lambda shape: (*shape[:-2], shape[-1]),
    **dict.fromkeys(("state1", "state2"), tuple),  # adamw_8bit: codes, scale per block, code table
    **dict.fromkeys(("absmax1", "absmax2"), lambda shape: (math.ceil(shape.numel() / _BLOCK),)),
    **dict.fromkeys(("qmap1", "qmap2"), lambda shape: (_CODES,)),
}


def state_entries(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state as ("<parameter>/<entry>", tensor); nothing for parameters that were never updated."""
    for name, parameter in parameters.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            yield (
                f"{name}/{entry}",
                value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.int64),
            )


def optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the state as a dict of tensors that share no memory (bitsandbytes' code tables do)."""
    return without_sharing(state_entries(optimizer, parameters))


def load_optimizer_tensors(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    *,
    place: Callable[[torch.Tensor, nn.Parameter], torch.Tensor] = lambda entry, parameter: entry.to(parameter.device),
) -> None:
    """Load state into the optimizer; the inverse of `optimizer_tensors`.

    place: (entry, parameter) -> this rank's part of the entry, on the right device.

    Raises IntegrityError if names or shapes do not match this model.
    """
    check_state(parameters, tensors)
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        # An int64 scalar stands for a Python int.
        own = int(value) if value.dtype == torch.int64 else place(value, parameters[name])
        optimizer.state[parameters[name]][entry] = own


def check_state(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises IntegrityError if names or shapes of a saved state do not match these parameters."""
    unknown = sorted({key.rpartition("/")[0] for key in tensors} - parameters.keys())
    if unknown:
        raise IntegrityError(damaged(FILE, f"has state of parameters that are not trainable: {unknown[:3]}"))
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        if entry not in _SHAPES:
            raise IntegrityError(damaged(FILE, f"{key}: no supported optimizer has such an entry"))
        expected = _SHAPES[entry](parameter.shape)
        if value.shape != expected:
            raise IntegrityError(damaged(FILE, f"{key} is {list(value.shape)}, not {list(expected)}"))


# Tokens that full fine-tuning processes in the time of one moment check. On a CPU 22 without fast paths, more with
# them; on a GPU near the upper end of the estimate.
_TOKENS = {"cpu": 30}
_TOKENS_ELSEWHERE = 150
_SHARE = 0.01  # fraction of the step time that moment checks may take
SMALL = 1 << 20  # with at most this many trainable parameters the check's cost is negligible


def tokens_per_moment_check(trained: int, parameters: int, device: str) -> float:
    """Return the number of tokens per moment check at which checks take `_SHARE` of the time.

    trained: number of trainable elements.
    parameters: number of all elements.
    device: device type.
    """
    tokens = _TOKENS.get(device, _TOKENS_ELSEWHERE)
    return 0.0 if trained <= SMALL else tokens / _SHARE * trained / parameters


def moment_check_is_due(step: int, tokens: int, per_check: float) -> bool:
    """Whether step `step`, with `tokens` tokens, checks the moments; a pure function, so all ranks agree."""
    return step % max(1, math.ceil(per_check / max(tokens, 1))) == 0


def moment_norm_sum(moments: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a scalar on `device` that is not finite if a moment is not; finite moments may overflow, but rarely."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in moments:
        # Grouped, because one kernel reads many tensors only if they have one device and dtype. Step counters are no
        # moments.
        if tensor.is_floating_point() and tensor.numel() > 1:
            alike[tensor.device, tensor.dtype].append(tensor)
    total = torch.zeros((), device=device)
    for tensors in alike.values():
        norms = torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]
        total = total + torch.stack(norms).float().sum().to(device)
    return total


def first_bad_moment(moments: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the first moment that is not finite; "" if all are finite."""
    return next((name for name, one in moments.items() if not bool(torch.isfinite(one).all())), "")
