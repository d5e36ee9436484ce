"""RMSNorm, rotary positions and gated activations for a GPU: each a pass forward and a pass backward, in Triton.

A chain of pointwise operators reads and writes the GPU's memory once per operator, these read their inputs once and
write their outputs once. Formulas, and what is kept for the backward pass, are those of `surefoot.kernels.pointwise`,
which this module serves as `surefoot.kernels.blocks` does on a CPU:

    gate  (SwiGLU, Shazeer 2020)    s = 1 / (1 + exp(-g))       y = (g s) u
          dg = dy u s (1 + g (1 - s))       du = dy g s

Sums and exponents are fp32 (fp64 for fp64). Outputs are rounded in the places where the plain path rounds. The order of
sums depends on shapes alone, not on the GPU. Offsets are 64 bits wide: a tensor may have more than 2^31 numbers.

Importing this needs Triton, so only `surefoot.kernels.forms` does, when it is asked for a GPU's arithmetic. With
TRITON_INTERPRET=1 in the environment before that, Triton runs these kernels by NumPy on tensors of a CPU: so they are
tested without a GPU.

Shapes: T rows of N numbers; heads x [B, H, T, D].
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from surefoot.kernels.blocks import NormForm
from surefoot.kernels.operands import wide_type

VERSION: str = triton.__version__
_TILE = 4096  # numbers that a program holds at once: 256 threads with 16 each. A wider row is one program's alone.
_FEWER = 1024  # where a program holds two to five tensors of them
_PARTS = 512  # sums of a weight's gradient that are made side by side, a few for every processor of a GPU
_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


def norm_forward(x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, N], weight [N] -> output [T, N], 1 / rms [T, 1] in the type of sums."""
    x, (rows, width) = _dense_rows(x), x.shape
    y = torch.empty((rows, width), dtype=form.output_type(x.dtype, weight.dtype), device=x.device)
    scales = torch.empty((rows, 1), dtype=wide_type(x.dtype), device=x.device)
    tall, wide, warps = _tile(width, _TILE)
    given = (x, weight.contiguous(), y, scales, rows, x.stride(0), form.eps, form.shift, form.narrow_first)
    _launch(_norm_forward, (_parts(rows, tall),), *given, width, tall, wide, _WIDE[scales.dtype], warps=warps)
    return y, scales


def norm_backward(
    dy: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, form: NormForm, *, trains: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dy, x [T, N], scales [T, 1] of the forward pass -> dx [T, N], and dw [N] in the type of sums where it trains."""
    dy, x, (rows, width) = _dense_rows(dy), _dense_rows(x), x.shape
    dx = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    tall, wide, warps = _tile(width, _TILE)
    tiles = _parts(rows, tall)
    steps = _parts(tiles, _PARTS) if trains else 1  # how many tiles one program adds up
    programs = _parts(tiles, steps)
    sums = torch.zeros((programs, width), dtype=scales.dtype, device=x.device) if trains else scales
    given = (dy, x, scales, weight.contiguous(), dx, sums, rows, dy.stride(0), x.stride(0), steps)
    _launch(
        _norm_backward, (programs,), *given, form.shift, trains, width, tall, wide, _WIDE[scales.dtype], warps=warps
    )
    return dx, sums.sum(dim=0) if trains else None


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, D] -> the same, its first R numbers turned. cos, sin [B or 1, 1, T, R], or [B or 1, T, 1, R] for x
    [B, T, H, D]."""
    return _turned(x, cos, sin, back=False)


def turn_back(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The gradient of `turn` in x, for dy [B, H, T, D]."""
    return _turned(dy, cos, sin, back=True)


def gate_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up [T, N] -> silu(gate) up [T, N]."""
    gate, up = _dense_rows(gate), _dense_rows(up)
    y = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    _launch_gate(_gate_forward, y, gate, up, y)
    return y


def gate_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dy, gate, up [T, N] -> the gradients of gate and up [T, N]."""
    dy, gate, up = _dense_rows(dy), _dense_rows(gate), _dense_rows(up)
    found = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (gate, up)]
    _launch_gate(_gate_backward, dy, dy, gate, up, *found)
    return found[0], found[1]


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool) -> torch.Tensor:
    x = _dense_rows(x)
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))  # laid out as x is
    # Heads that share a position come one after the other, so that cos and sin are still at hand.
    order = (0, 2, 1) if cos.shape[1] == 1 else (0, 1, 2)
    shape = (*x.shape[:3], cos.shape[-1])
    tables = [_dense_rows(one).expand(shape) for one in (cos, sin)]
    strides = [one.stride(axis) for one in (x, *tables, y) for axis in order]
    half, rest = cos.shape[-1] // 2, x.shape[-1] - cos.shape[-1]
    tall, wide, warps = _tile(half, _FEWER)
    rows = x.shape[:3].numel()
    given = (x, *tables, y, rows, x.shape[order[1]], x.shape[order[2]], *strides)
    widths = (half, rest, _power_of_two(rest), tall, wide, _WIDE[wide_type(y.dtype)])
    _launch(_turn, (_parts(rows, tall),), *given, back, *widths, warps=warps)
    return y


def _launch_gate(kernel: Any, like: torch.Tensor, *tensors: torch.Tensor) -> None:
    rows, width = like.shape
    tall, wide, warps = _tile(min(width, _FEWER), _FEWER)
    strides = [one.stride(0) for one in tensors]
    grid = (_parts(rows, tall), _parts(width, wide))
    _launch(kernel, grid, *tensors, rows, *strides, width, tall, wide, _WIDE[wide_type(like.dtype)], warps=warps)


def _launch(kernel: Any, grid: tuple[int, ...], *given: Any, warps: int) -> None:
    """What goes wrong as a kernel is compiled, as without a C compiler, comes as RuntimeError."""
    if 0 in grid:
        return
    device = given[0].device
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[grid](*given, num_warps=warps)
    except RuntimeError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise RuntimeError(f"Triton: {type(error).__name__} {first}".rstrip()) from error


def _tile(width: int, numbers: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, powers of two as Triton wants them, and the warps that work on it."""
    columns = _power_of_two(width)
    rows = max(1, numbers // columns)
    return rows, columns, min(16, max(4, rows * columns // 512))


def _power_of_two(number: int) -> int:
    """The smallest that is as large."""
    return 1 << max(number - 1, 0).bit_length()


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """With the numbers of a row side by side; rows may lie anywhere."""
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


def _parts(whole: int, size: int) -> int:
    return -(-whole // size)


@triton.jit(do_not_specialize=["rows"])
def _norm_forward(
    x, weight, y, scales, rows, stride,
    EPS: tl.constexpr, SHIFT: tl.constexpr, NARROW_FIRST: tl.constexpr,
    WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.arange(0, WIDE)
    there = (row < rows)[:, None] & (column < WIDTH)[None, :]
    block = tl.load(x + row[:, None] * stride + column[None, :], mask=there, other=0.0).to(TYPE)
    scale = tl.rsqrt(tl.sum(block * block, axis=1) / WIDTH + EPS)
    block = block * scale[:, None]
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(TYPE)
    if NARROW_FIRST:
        block = block.to(x.dtype.element_ty).to(TYPE) * factor[None, :]
    else:
        block = block * (factor + SHIFT)[None, :]
    tl.store(y + row[:, None] * WIDTH + column[None, :], block.to(y.dtype.element_ty), mask=there)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "steps"])
def _norm_backward(
    dy, x, scales, weight, dx, sums, rows, dy_stride, x_stride, steps,
    SHIFT: tl.constexpr, TRAINS: tl.constexpr,
    WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDE)
    within = column < WIDTH
    factor = tl.load(weight + column, mask=within, other=0.0).to(TYPE) + SHIFT
    total = tl.zeros((WIDE,), dtype=TYPE)
    for step in range(steps):
        row = (program * steps + step) * TALL + tl.arange(0, TALL)
        there = (row < rows)[:, None] & within[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + row[:, None] * x_stride + column[None, :], mask=there, other=0.0).to(TYPE) * scale
        gradient = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=there, other=0.0).to(TYPE)
        if TRAINS:
            total += tl.sum(gradient * normed, axis=0)
        gradient = gradient * factor[None, :]
        inner = tl.sum(gradient * normed, axis=1) / WIDTH
        found = (gradient - normed * inner[:, None]) * scale
        tl.store(dx + row[:, None] * WIDTH + column[None, :], found.to(dx.dtype.element_ty), mask=there)
    if TRAINS:
        tl.store(sums + program * WIDTH + column, total, mask=within)


@triton.jit(do_not_specialize=["rows"])
def _turn(
    x, cos, sin, y, rows, second, third,
    x1, x2, x3, cos1, cos2, cos3, sin1, sin2, sin3, y1, y2, y3,
    BACK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, REST_WIDE: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Rows are counted along three axes, the third fastest; of each tensor so many numbers lie between two of an
    axis."""
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    i, j, k = row // third // second, row // third % second, row % third
    column = tl.arange(0, WIDE)
    there = (row < rows)[:, None] & (column < HALF)[None, :]
    x_at = x + (i * x1 + j * x2 + k * x3)[:, None] + column[None, :]
    y_at = y + (i * y1 + j * y2 + k * y3)[:, None] + column[None, :]
    cos_at = cos + (i * cos1 + j * cos2 + k * cos3)[:, None] + column[None, :]
    sin_at = sin + (i * sin1 + j * sin2 + k * sin3)[:, None] + column[None, :]
    a = tl.load(x_at, mask=there, other=0.0).to(TYPE)
    b = tl.load(x_at + HALF, mask=there, other=0.0).to(TYPE)
    a_sin = tl.load(sin_at + HALF, mask=there, other=0.0).to(TYPE)  # what of a goes to the second half
    b_sin = -tl.load(sin_at, mask=there, other=0.0).to(TYPE)
    if BACK:
        a_sin, b_sin = b_sin, a_sin
    narrow: tl.constexpr = y.dtype.element_ty  # the plain path rounds each product
    a_cos = (a * tl.load(cos_at, mask=there, other=0.0).to(TYPE)).to(narrow).to(TYPE)
    b_cos = (b * tl.load(cos_at + HALF, mask=there, other=0.0).to(TYPE)).to(narrow).to(TYPE)
    tl.store(y_at, (a_cos + (b * b_sin).to(narrow).to(TYPE)).to(narrow), mask=there)
    tl.store(y_at + HALF, (b_cos + (a * a_sin).to(narrow).to(TYPE)).to(narrow), mask=there)
    if REST > 0:
        behind = tl.arange(0, REST_WIDE)
        passes = (row < rows)[:, None] & (behind < REST)[None, :]
        x_at = x + (i * x1 + j * x2 + k * x3)[:, None] + 2 * HALF + behind[None, :]
        y_at = y + (i * y1 + j * y2 + k * y3)[:, None] + 2 * HALF + behind[None, :]
        tl.store(y_at, tl.load(x_at, mask=passes, other=0.0).to(narrow), mask=passes)


@triton.jit(do_not_specialize=["rows"])
def _gate_forward(
    gate, up, y, rows, gate_stride, up_stride, y_stride,
    WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    there = (row < rows)[:, None] & (column < WIDTH)[None, :]
    g = tl.load(gate + row[:, None] * gate_stride + column[None, :], mask=there, other=0.0).to(TYPE)
    u = tl.load(up + row[:, None] * up_stride + column[None, :], mask=there, other=0.0).to(TYPE)
    made = (g / (1.0 + tl.exp(-g))).to(gate.dtype.element_ty).to(TYPE) * u  # the plain path rounds silu
    tl.store(y + row[:, None] * y_stride + column[None, :], made.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _gate_backward(
    dy, gate, up, dgate, dup, rows, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    there = (row < rows)[:, None] & (column < WIDTH)[None, :]
    outer = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=there, other=0.0).to(TYPE)
    g = tl.load(gate + row[:, None] * gate_stride + column[None, :], mask=there, other=0.0).to(TYPE)
    u = tl.load(up + row[:, None] * up_stride + column[None, :], mask=there, other=0.0).to(TYPE)
    s = 1.0 / (1.0 + tl.exp(-g))
    of_gate = outer * u * s * (1.0 + g * (1.0 - s))
    silu = (g * s).to(gate.dtype.element_ty).to(TYPE)
    tl.store(dgate + row[:, None] * dgate_stride + column[None, :], of_gate.to(dgate.dtype.element_ty), mask=there)
    tl.store(dup + row[:, None] * dup_stride + column[None, :], (outer * silu).to(dup.dtype.element_ty), mask=there)
