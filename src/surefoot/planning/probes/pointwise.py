"""Check fused norm and rotary kernels for correctness on this machine, and time them against the plain code.

Each runs forward and backward at the model's width. Output and gradients are first compared with float64, for ordinary
rows, rows so small that eps matters, and large ones; then it is timed against the plain code, with too many rows for a
cache.

Shapes: T rows of width N; H heads of size D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from surefoot.planning.measurements import PointwiseSizes, PointwiseTrial
from surefoot.planning.plan import DType
from surefoot.planning.probes.attention import GATE
from surefoot.planning.probes.matmul import TORCH_DTYPE
from surefoot.planning.probes.timing import LIMITS, attempt, draws, one_thread, seconds_or_failures

Function = Callable[..., torch.Tensor]
_CHECKED = 37  # rows; an odd number
_SIZES = (1.0, 1e-3, 30.0)  # scales of inputs: usual, near the norm's epsilon, and coarse in 16 bits
_ROUNDS = 12


@dataclass(frozen=True)
class Ways:
    """Pairs of plain and fused functions.

    norms: x [T, N], weight [N] -> [T, N]; the first pair is timed.
    turn: x [1, H, T, D], cos and sin [1, T, D] -> [1, H, T, D].
    """

    norms: Sequence[tuple[Function, Function]]
    turn: tuple[Function, Function]


@dataclass(frozen=True)
class PointwiseRequest:
    """Request of the probe.

    parts: norm | rotary.
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
    """Check and time a norm and the rotary embedding of all heads, plain and fused.

    budget: seconds for the timing of both.
    begin: called with each part's name before it runs.
    """
    sizes = request.sizes
    make = partial(_inputs, dtype=TORCH_DTYPE[request.dtype], device=torch.device(request.device))
    limits = LIMITS[request.device]
    fewest, most = limits.pointwise_rows

    def rows(width: int) -> int:
        return min(most, max(fewest, limits.pointwise_numbers // width))

    parts = [
        ("norm", partial(_norm_ways, ways), (sizes.width, rows(sizes.width))),
        ("rotary", partial(_turn_ways, ways), (sizes.heads * sizes.head_dim, rows(sizes.width), sizes.head_dim)),
    ]
    found = []
    with one_thread():
        for part, way, shape in parts:
            if part in request.parts:
                begin(part)
                found.append(_trial(part, way, make, shape, request, budget / len(parts)))
    return tuple(found)


def _trial(
    part: str,
    ways: Callable[..., list[tuple[Function, Function, tuple[torch.Tensor, ...]]]],
    make: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    request: PointwiseRequest,
    budget: float,
) -> PointwiseTrial:
    """ways: shape -> (plain, fused, their inputs; the last input is the gradient of the output)."""
    errors: dict[str, float] = {}
    for size in _SIZES:
        for plain, fused, inputs in ways(make, (shape[0], _CHECKED, *shape[2:]), size):
            failure = _checked(plain, fused, inputs, request.dtype, errors)
            if failure:
                return PointwiseTrial(part, 0.0, 0.0, f"{failure} for numbers about {size:g}", errors)

    @cache
    def timed() -> tuple[Function, Function, tuple[torch.Tensor, ...]]:
        return ways(make, shape, 1.0)[0]

    makers = {
        "plain": lambda: partial(_pass, timed()[0], timed()[2]),
        "fused": lambda: partial(_pass, timed()[1], timed()[2]),
    }
    wait = torch.cuda.synchronize if request.device == "cuda" else lambda: None
    seconds, failures = seconds_or_failures(makers, budget=budget, rounds=_ROUNDS, wait=wait)
    if failures:
        return PointwiseTrial(part, 0.0, 0.0, next(iter(failures.values())), errors)
    return PointwiseTrial(part, seconds["plain"], seconds["fused"], "", errors)


def _checked(
    plain: Function, fused: Function, inputs: Sequence[torch.Tensor], dtype: DType, errors: dict[str, float]
) -> str:
    """Return what is wrong, empty if nothing is. Adds the largest error by tensor to `errors`."""
    exact = _pass(plain, [one.detach().double().requires_grad_(one.requires_grad) for one in inputs])
    found, why = attempt(partial(_pass, fused, inputs))
    if found is None:
        return f"cannot run: {why}"
    for number, (one, wanted) in enumerate(zip(found, exact, strict=True)):
        name = f"gradient {number}" if number else "output"
        if not torch.isfinite(one).all():
            return f"the {name} is not finite"
        error = float((one.double() - wanted).norm() / wanted.norm())
        errors[name] = max(error, errors.get(name, 0.0))
        if error > GATE[dtype]:
            return f"the {name} is off by {error:.2g}, more than {GATE[dtype]:.2g},"
    return ""


def _pass(function: Function, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output, and the gradients of the inputs that require one."""
    *given, gradient = inputs
    output = function(*given)
    found = torch.autograd.grad(output, [one for one in given if one.requires_grad], gradient.to(output.dtype))
    return [output.detach(), *found]


def _norm_ways(
    given: Ways, make: Callable[..., torch.Tensor], shape: tuple[int, ...], size: float
) -> list[tuple[Function, Function, tuple[torch.Tensor, ...]]]:
    width, rows = shape
    inputs = (make(rows, width, size=size, learns=True), make(width, learns=True), make(rows, width))
    return [(plain, fused, inputs) for plain, fused in given.norms]


def _turn_ways(
    given: Ways, make: Callable[..., torch.Tensor], shape: tuple[int, ...], size: float
) -> list[tuple[Function, Function, tuple[torch.Tensor, ...]]]:
    width, tokens, head_dim = shape

    def heads_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(1, tokens, width // head_dim, head_dim).transpose(1, 2)

    def of_heads(function: Function) -> Function:
        return lambda x, cos, sin: function(heads_of(x), cos, sin)

    x, outer = make(tokens, width, size=size, learns=True), heads_of(make(tokens, width))
    plain, fused = given.turn
    return [(of_heads(plain), of_heads(fused), (x, make(1, tokens, head_dim), make(1, tokens, head_dim), outer))]


def _inputs(
    *shape: int, dtype: torch.dtype, device: torch.device, size: float = 1.0, learns: bool = False
) -> torch.Tensor:
    """Random numbers of scale `size`, the same in every call."""
    return (draws(device, len(shape))(*shape) * size).to(dtype).requires_grad_(learns)
