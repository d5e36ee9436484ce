"""DoRA's two passes over the outputs of a layer on a GPU, each one kernel in Triton.

    scale_on_average_    z = f z, as `surefoot.kernels.dora.scale_on_average_`
    through_factor       dz = f dy and the sums over tokens of dy z, of which the magnitude's gradient is made

torch reads the pattern of the first, and f of the second, as a smaller operand of the same shape, for which its kernels
reach a third of the memory's rate on an H200; and it writes the products dy z before it sums them. Rows are summed in a
fixed order, so a gradient is the same each time.

torch brings Triton along where it computes on GPUs. Importing this module without it is an ImportError; torch's own
operators do the same then.

Shapes: T tokens, O outputs of a layer.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from surefoot.kernels import dora
from surefoot.kernels.dora import CYCLE, Factor, factors_of

ROWS, COLUMNS = 16, 256  # numbers that a program holds: 4,096
_BLOCKS = 4  # of rows, one after the other, whose sums a program keeps
_FEW = (3 * ROWS, 2 * COLUMNS)  # tokens and outputs of a trial
_PLACES = 2.0**-10  # of fp16: one in the last place, relative


def is_usable(device: torch.device) -> bool:
    """Whether the kernels run on a device, and compute of a few numbers what torch's operators do."""
    draws = torch.Generator().manual_seed(0)
    dy, z = (torch.randn(*_FEW, generator=draws).to(device, torch.float16) for _ in range(2))
    norm = 1 + torch.rand(_FEW[1], generator=draws).to(device)
    [factor] = factors_of([(norm * (1 + 1e-3 * torch.randn(_FEW[1], generator=draws).to(device)), norm, torch.float16)])
    try:
        outputs = scale_on_average_(z.clone(), factor)
        dz, sums = through_factor(dy, z, factor)
    except Exception:  # of Triton's own kinds: no driver, no compiler, an operator that this GPU lacks
        return False
    return (
        torch.allclose(outputs, dora.scale_on_average_(z.clone(), factor), rtol=_PLACES, atol=0)
        and torch.allclose(dz, dora.scaled(dy, factor), rtol=_PLACES, atol=0)
        and torch.allclose(sums, (dy.float() * z.float()).sum(dim=0), rtol=1e-4, atol=1e-4)
    )


def scale_on_average_(tensor: torch.Tensor, factor: Factor) -> torch.Tensor:
    """See `surefoot.kernels.dora.scale_on_average_`.

    tensor: contiguous, in 16 bits.
    factor: with `rare`.
    """
    rare, width = factor.rare, tensor.shape[-1]
    assert rare is not None
    tokens = tensor.numel() // width
    grid = triton.cdiv(tokens, ROWS), triton.cdiv(width, COLUMNS)
    _scale[grid](  # pyright: ignore[reportIndexIssue]
        tensor,
        rare.share,
        rare.then,
        rare.else_,
        tokens,
        width,
        CYCLE=CYCLE,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return tensor


def through_factor(dy: torch.Tensor, z: torch.Tensor, factor: Factor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dz = f dy, [T, O], and the sums over tokens of dy z, [O] in fp32.

    dy, z: [T, O], contiguous, in 16 bits.
    factor: with `fine`.
    """
    assert factor.fine is not None
    tokens, width = dy.shape
    groups = triton.cdiv(tokens, ROWS * _BLOCKS)
    dz, sums = torch.empty_like(dy), torch.empty(groups, width, dtype=torch.float32, device=dy.device)
    grid = groups, triton.cdiv(width, COLUMNS)
    _multiply_and_sum[grid](  # pyright: ignore[reportIndexIssue]
        dy, z, factor.fine, dz, sums, tokens, width, BLOCKS=_BLOCKS, ROWS=ROWS, COLUMNS=COLUMNS
    )
    return dz, sums.sum(dim=0)


@triton.jit
def _scale(z, share, then, otherwise, tokens, width, CYCLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = columns < width
    inside = (rows < tokens)[:, None] & own[None, :]
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    value = tl.load(z + places, mask=inside, other=0.0).to(tl.float32)
    # The fraction of n times the golden ratio, as `dora._turns` has it up to n 2^-33: its 32 bits wrap around by
    # themselves, and to load them instead would take as long as to load the outputs.
    turn = ((rows % CYCLE)[:, None] + columns[None, :]).to(tl.uint32) * 2654435769
    moved = (turn >> 8).to(tl.float32) * (1.0 / 16777216) < tl.load(share + columns, mask=own, other=0.0)[None, :]
    rare = tl.load(then + columns, mask=own, other=0.0).to(tl.float32)
    usual = tl.load(otherwise + columns, mask=own, other=0.0).to(tl.float32)
    change = tl.where(moved, rare[None, :], usual[None, :])
    tl.store(z + places, (value + value * change).to(z.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_and_sum(
    dy, z, fine, dz, sums, tokens, width, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = columns < width
    change = tl.load(fine + columns, mask=own, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # summed over rows once, at the end
    first = tl.program_id(0) * BLOCKS * ROWS
    for block in range(BLOCKS):
        rows = first + block * ROWS + tl.arange(0, ROWS)
        inside = (rows < tokens)[:, None] & own[None, :]
        places = rows.to(tl.int64)[:, None] * width + columns[None, :]
        gradient = tl.load(dy + places, mask=inside, other=0.0).to(tl.float32)
        total += gradient * tl.load(z + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(dz + places, (gradient + gradient * change).to(dz.dtype.element_ty), mask=inside)
    tl.store(sums + tl.program_id(0) * width + columns, tl.sum(total, axis=0), mask=own)
