"""Check fused norms, rotary embeddings and gated activations for correctness on this machine, and time them against
the plain code.

Each runs forward and backward at the model's width. Output and gradients are first compared with float64, for ordinary
rows, rows so small that eps matters, and large ones; then it is timed against the plain code, with too many rows for a
cache.

Shapes: T rows of width N; H heads of queries and K of keys, of size D; I the width of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from surefoot.planning.measurements import PointwiseSizes, PointwiseTrial
from surefoot.planning.plan import DType
from surefoot.planning.probes.attention import GATE
from surefoot.planning.probes.matmul import TORCH_DTYPE
from surefoot.planning.probes.timing import LIMITS, attempt, draws, one_thread, seconds_or_failures

Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
_CHECKED = 37  # rows; an odd number
_SIZES = (1.0, 1e-3, 30.0)  # scales of inputs: usual, near the norm's epsilon, and coarse in 16 bits
_ROUNDS = 12


@dataclass(frozen=True)
class Ways:
    """Pairs of plain and fused functions.

    norms: x [T, N], weight [N] -> [T, N]; the first pair is timed.
    turn: q [1, H, T, D], k [1, K, T, D], cos and sin [1, T, D] -> q and k.
    gated: activation -> gate, up [T, I] -> [T, I].
    """

    norms: Sequence[tuple[Function, Function]]
    turn: tuple[Function, Function]
    gated: Mapping[str, tuple[Function, Function]]


@dataclass(frozen=True)
class _Given:
    """inputs: of the functions; outer: gradients of their outputs."""

    inputs: tuple[torch.Tensor, ...]
    outer: tuple[torch.Tensor, ...]


_Way = tuple[Function, Function, _Given]  # plain, fused
_WaysOf = Callable[[int, float], list[_Way]]  # rows, scale of the inputs -> the first one is timed


@dataclass(frozen=True)
class PointwiseRequest:
    """Request of the probe.

    parts: norm | rotary | gated.
    device: cpu | cuda.
    """

    parts: tuple[str, ...]
    sizes: PointwiseSizes
    dtype: DType
    device: str


def pointwise_trials(
    request: PointwiseRequest,
    ways: Ways,
    *,
    budget: float = 0.3,
    begin: Callable[[str], object] = lambda name: None,
) -> tuple[PointwiseTrial, ...]:
    """Check and time a norm, the rotary embedding of all heads, and the activation of an MLP, plain and fused.

    budget: seconds for the timing of all.
    begin: called with each part's name before it runs.
    """
    sizes = request.sizes
    make = partial(_inputs, dtype=TORCH_DTYPE[request.dtype], device=torch.device(request.device))
    limits = LIMITS[request.device]
    fewest, most = limits.pointwise_rows

    def rows(width: int) -> int:
        return min(most, max(fewest, limits.pointwise_numbers // width))

    parts: dict[str, tuple[_WaysOf, int]] = {
        "norm": (partial(_norm_ways, ways, make, sizes), sizes.width),
        "rotary": (partial(_turn_ways, ways, make, sizes), sizes.width),
        "gated": (partial(_gated_ways, ways, make, sizes), sizes.intermediate),
    }
    found = []
    with one_thread():
        for part, (ways_of, width) in parts.items():
            if part in request.parts:
                begin(part)
                found.append(_trial(part, ways_of, rows(width), request, budget / len(request.parts)))
    return tuple(found)


def _trial(part: str, ways_of: _WaysOf, rows: int, request: PointwiseRequest, budget: float) -> PointwiseTrial:
    errors: dict[str, float] = {}
    for size in _SIZES:
        for plain, fused, given in ways_of(_CHECKED, size):
            failure = _checked(plain, fused, given, request.dtype, errors)
            if failure:
                return PointwiseTrial(part, 0.0, 0.0, f"{failure} for numbers about {size:g}", errors)

    @cache
    def timed() -> _Way:
        return ways_of(rows, 1.0)[0]

    makers = {
        "plain": lambda: partial(_pass, timed()[0], timed()[2]),
        "fused": lambda: partial(_pass, timed()[1], timed()[2]),
    }
    seconds, failures = seconds_or_failures(makers, torch.device(request.device), budget=budget, rounds=_ROUNDS)
    if failures:
        return PointwiseTrial(part, 0.0, 0.0, next(iter(failures.values())), errors)
    return PointwiseTrial(part, seconds["plain"], seconds["fused"], "", errors)


def _checked(plain: Function, fused: Function, given: _Given, dtype: DType, errors: dict[str, float]) -> str:
    """Return what is wrong, empty if nothing is. Adds the largest error by tensor to `errors`."""
    wide = [one.detach().double().requires_grad_(one.requires_grad) for one in given.inputs]
    exact = _pass(plain, _Given(tuple(wide), given.outer))
    found, why = attempt(partial(_pass, fused, given))
    if found is None:
        return f"cannot run: {why}"
    for name, wanted in exact.items():
        one = found[name]
        if not torch.isfinite(one).all():
            return f"the {name} is not finite"
        error = float((one.double() - wanted).norm() / wanted.norm())
        errors[name] = max(error, errors.get(name, 0.0))
        if error > GATE[dtype]:
            return f"the {name} is off by {error:.2g}, more than {GATE[dtype]:.2g},"
    return ""


def _pass(function: Function, given: _Given) -> dict[str, torch.Tensor]:
    """Return the outputs, and the gradients of the inputs that require one, by name."""
    made = function(*given.inputs)
    outputs = made if isinstance(made, tuple) else (made,)
    outer = [gradient.to(one.dtype) for one, gradient in zip(outputs, given.outer, strict=True)]
    found = torch.autograd.grad(outputs, [one for one in given.inputs if one.requires_grad], outer)
    names = ["output", *(f"output {number}" for number in range(2, len(outputs) + 1))]
    gradients = {f"gradient {number}": one for number, one in enumerate(found, start=1)}
    return {name: one.detach() for name, one in zip(names, outputs, strict=True)} | gradients


def _norm_ways(
    ways: Ways, make: Callable[..., torch.Tensor], sizes: PointwiseSizes, rows: int, size: float
) -> list[_Way]:
    width = sizes.width
    given = _Given((make(rows, width, size=size, learns=True), make(width, learns=True)), (make(rows, width),))
    return [(plain, fused, given) for plain, fused in ways.norms]


def _turn_ways(
    ways: Ways, make: Callable[..., torch.Tensor], sizes: PointwiseSizes, rows: int, size: float
) -> list[_Way]:
    heads = sizes.heads, sizes.kv_heads or sizes.heads

    def heads_of(count: int, **named: Any) -> torch.Tensor:
        """[1, H, T, D] in the memory of a projection's output, [1, T, H, D]."""
        made = make(1, rows, count, sizes.head_dim, **named)
        return made.detach().transpose(1, 2).requires_grad_(made.requires_grad)

    # The halves are equal, as in models: positions times frequencies, twice.
    cos, sin = (
        torch.cat((half, half), dim=-1) for half in (make(1, rows, sizes.head_dim // 2, seed=n) for n in (1, 2))
    )
    turned = tuple(heads_of(count, size=size, learns=True) for count in heads)
    given = _Given((*turned, cos, sin), tuple(heads_of(count, seed=3) for count in heads))
    return [(*ways.turn, given)]


def _gated_ways(
    ways: Ways, make: Callable[..., torch.Tensor], sizes: PointwiseSizes, rows: int, size: float
) -> list[_Way]:
    shape = rows, sizes.intermediate
    given = _Given((make(*shape, size=size, learns=True), make(*shape, learns=True, seed=1)), (make(*shape, seed=2),))
    return [(*ways.gated[sizes.activation], given)]


def _inputs(
    *shape: int, dtype: torch.dtype, device: torch.device, size: float = 1.0, learns: bool = False, seed: int = 0
) -> torch.Tensor:
    """Random numbers of scale `size`, the same in every call. seed: others for tensors of one shape."""
    return (draws(device, 10 * seed + len(shape))(*shape) * size).to(dtype).requires_grad_(learns)
