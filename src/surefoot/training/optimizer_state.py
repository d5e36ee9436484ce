"""The state of an optimizer as named tensors, out and in again bit by bit; and whether its moments are finite.

torch keys optimizer state by position; positions shift when a model gains or loses a parameter. Names do not, so the
state is saved and loaded by name, as safetensors. An entry that an optimizer keeps as a Python integer travels as an
int64 scalar, which no optimizer keeps as a tensor.

Moments are checked before the optimizer moves, for no loss or gradient shows them: by the 2-norm of every moment, in
one pass over them, as NaN and infinity go through a sum. So does an overflow of finite numbers, so what the pass finds
is confirmed number by number before the step is refused.

A pass over the moments of all weights runs at the speed of the memory, and takes as long as it takes to learn from some
dozens of tokens (22 on a CPU, see docs/evidence/reliability.md; by arithmetic up to 180 on a GPU, whose products are
faster against its memory). So where all weights train and steps are short, not every step has one. The optimizer's own
pass could not tell in time: a moment that is infinite in the denominator leaves its weight as it is, unseen, and any
other has moved the weights by then.
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
_BLOCK = 256  # numbers that share one scale in bitsandbytes' 8-bit moments
_CODES = 256  # values that 8 bits can stand for

# What an optimizer keeps of a parameter, and of which shape.
_SHAPES: dict[str, Callable[[torch.Size], tuple[int, ...]]] = {
    **dict.fromkeys(("step", "RMS"), lambda shape: ()),
    **dict.fromkeys(("exp_avg", "exp_avg_sq", "momentum_buffer"), tuple),
    "exp_avg_sq_row": lambda shape: tuple(shape[:-1]),  # adafactor
    "exp_avg_sq_col": lambda shape: (*shape[:-2], shape[-1]),
    **dict.fromkeys(("state1", "state2"), tuple),  # adamw_8bit: codes, their scales by block, and what each code means
    **dict.fromkeys(("absmax1", "absmax2"), lambda shape: (math.ceil(shape.numel() / _BLOCK),)),
    **dict.fromkeys(("qmap1", "qmap2"), lambda shape: (_CODES,)),
}


def state_entries(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """State as ("<parameter>/<entry>", tensor); none for parameters that never moved."""
    for name, parameter in parameters.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            yield (
                f"{name}/{entry}",
                value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.int64),
            )


def optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The same as a dict, of which no two share memory, as bitsandbytes' tables of codes do."""
    return without_sharing(state_entries(optimizer, parameters))


def load_optimizer_tensors(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    *,
    held: Callable[[torch.Tensor, nn.Parameter], torch.Tensor] = lambda entry, parameter: entry.to(parameter.device),
) -> None:
    """The inverse of `optimizer_tensors`.

    held: what the optimizer is to hold of an entry of a parameter.

    Raises IntegrityError when names or shapes do not belong to this model.
    """
    check_state(parameters, tensors)
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        # An int64 scalar is what an optimizer keeps as a Python integer.
        own = int(value) if value.dtype == torch.int64 else held(value, parameters[name])
        optimizer.state[parameters[name]][entry] = own


def check_state(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises IntegrityError where names or shapes of a state are not those of these parameters."""
    unknown = sorted({key.rpartition("/")[0] for key in tensors} - parameters.keys())
    if unknown:
        raise IntegrityError(damaged(FILE, f"state of parameters that do not train: {unknown[:3]}"))
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        if entry not in _SHAPES:
            raise IntegrityError(damaged(FILE, f"{key}: no optimizer keeps such an entry"))
        expected = _SHAPES[entry](parameter.shape)
        if value.shape != expected:
            raise IntegrityError(damaged(FILE, f"{key} is {list(value.shape)}, not {list(expected)}"))


# Tokens that are learned from in the time of one look, where all parameters train. On a CPU 22 by plain steps, more by
# faster ones; on a GPU at the upper end.
_TOKENS = {"cpu": 30}
_TOKENS_ELSEWHERE = 150
_SHARE = 0.01  # of a step's time that looks may take
SMALL = 1 << 20  # parameters that train, whose moments are looked at in no time


def tokens_per_look(trained: int, parameters: int, device: str) -> float:
    """Tokens that have to be learned from for one look to cost next to nothing.

    trained: of `parameters`.
    device: its type.
    """
    tokens = _TOKENS.get(device, _TOKENS_ELSEWHERE)
    return 0.0 if trained <= SMALL else tokens / _SHARE * trained / parameters


def look_is_due(step: int, tokens: int, per_look: float) -> bool:
    """Whether step `step`, which has so many tokens, looks; a function of its arguments, the same on all ranks."""
    return step % max(1, math.ceil(per_look / max(tokens, 1))) == 0


def look_at_moments(moments: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
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


def first_bad_moment(moments: Mapping[str, torch.Tensor]) -> str:
    """The name of the first one with a number that is not finite; empty where there is none."""
    return next((name for name, one in moments.items() if not bool(torch.isfinite(one).all())), "")
