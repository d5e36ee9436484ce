"""RMSNorm and rotary positions by torch's own operators, a few rows at a time.

A chain of pointwise operators over a whole micro-batch reads and writes main memory once per operator. Over as many
rows as fit into the cache of a core it does so once in all. Nothing is compiled, so nothing is needed but torch.

Shapes: T rows, N numbers in a row; the T rows of a norm are tokens, or heads of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from surefoot.kernels.operands import wide_type

# Numbers of a block: 384 KiB in fp32, so that a handful of them fit into a second-level cache of 2 MiB. Measured from
# 16 to 4,096 rows of 768; half or twice as many take about as long.
_NUMBERS = 98_304


@dataclass(frozen=True)
class NormForm:
    """How a family writes RMSNorm. eps: added to the mean square. shift: what the weight is added to, 0 or 1 (Gemma).
    narrow_first: the normalised row is rounded to the input's type and then multiplied, as in Llama; Gemma multiplies
    in fp32 and rounds the product to the input's type."""

    eps: float
    shift: float
    narrow_first: bool

    def output_type(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        return torch.promote_types(x, weight) if self.narrow_first else x


def norm_forward(x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, N], weight [N] -> output [T, N], 1 / rms [T, 1] in the type of sums."""
    wide = wide_type(x.dtype)
    output = torch.empty(x.shape, dtype=form.output_type(x.dtype, weight.dtype), device=x.device)
    scales = torch.empty((len(x), 1), dtype=wide, device=x.device)
    factor = weight if form.narrow_first else weight.to(wide) + form.shift
    room, squares = (x.new_empty(min(_rows(x), len(x)), x.shape[1], dtype=wide) for _ in range(2))
    for start in range(0, len(x), _rows(x)):
        part = slice(start, start + _rows(x))
        scale, block = scales[part], room[: len(scales[part])]
        block.copy_(x[part])
        torch.mean(torch.mul(block, block, out=squares[: len(block)]), dim=1, keepdim=True, out=scale)
        scale.add_(form.eps).rsqrt_()
        block.mul_(scale)
        if not form.narrow_first:
            output[part].copy_(block.mul_(factor))
        elif output.dtype == x.dtype:
            output[part].copy_(block).mul_(factor)
        else:
            torch.mul(block.to(x.dtype), factor, out=output[part])
    return output, scales


def norm_backward(
    dy: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, form: NormForm, *, trains: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dy, x [T, N], scales [T, 1] of the forward pass -> dx [T, N], and dw [N] in the type of sums where it trains."""
    width = x.shape[1]
    dx = torch.empty_like(x)
    total = torch.zeros(width, dtype=scales.dtype, device=x.device) if trains else None
    factor = weight.to(scales.dtype) + form.shift
    rooms = [x.new_empty(min(_rows(x), len(x)), width, dtype=scales.dtype) for _ in range(3 if trains else 2)]
    for start in range(0, len(x), _rows(x)):
        part = slice(start, start + _rows(x))
        scale = scales[part]
        normed, gradient, *spare = (room[: len(scale)] for room in rooms)
        normed.copy_(x[part]).mul_(scale)
        gradient.copy_(dy[part])
        if total is not None:
            total += torch.mul(gradient, normed, out=spare[0]).sum(dim=0)
        gradient.mul_(factor)
        inner = torch.linalg.vecdot(gradient, normed).unsqueeze(1).div_(-width)
        dx[part].copy_(gradient.addcmul_(normed, inner).mul_(scale))
    return dx, total


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x cos + (-x2, x1) sin, where x1, x2 are the halves of the first R numbers of x; the others pass. x [..., D]; cos,
    sin [..., R], broadcast."""
    return _on_first(_turn, x, cos, sin)


def turn_back(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The gradient of `turn` in x, for dy [..., D]."""
    return _on_first(_turn_back, dy, cos, sin)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    turned = wide * cos
    turned[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(wide[..., :half], sin[..., half:])
    return turned


def _turn_back(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = dy.shape[-1] // 2
    found = dy * cos
    found[..., :half].addcmul_(dy[..., half:], sin[..., half:])
    found[..., half:].addcmul_(dy[..., :half], sin[..., :half], value=-1)
    return found


def _on_first(
    change: Callable[..., torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """`change` on the first numbers of every head, as many as cos has."""
    wide = cos.shape[-1]
    if wide == x.shape[-1]:
        return change(x, cos, sin)
    return torch.cat((change(x[..., :wide], cos, sin), x[..., wide:]), dim=-1)


def _rows(x: torch.Tensor) -> int:
    """Of a block. A function of the width alone, so that sums have the same order on every machine."""
    return max(1, _NUMBERS // x.shape[1])
