"""Choose the shapes at which attention is timed: the run's, if limits and memory allow, else a part of them.

    room = room_on(device)
    size = timed_size(request, room)         # forms that store no scores
    size = with_scores(size, room)           # forms that do: as much as fits into memory, None if nothing does

Every row and head costs the same, so the time of a part gives the time of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.planning.measurements import MEMORY_TAKEN
from surefoot.planning.plan import DType
from surefoot.planning.probes.matmul import TORCH_DTYPE
from surefoot.planning.probes.timing import LIMITS, NO_ROOM, Limits
from surefoot.system import hardware
from surefoot.system.messages import size_text

STORING = ("eager", "math")  # forms that store every score
# Peak bytes per score: 12.8 to 14.0 bytes were measured on a CPU, in both dtypes.
_SCORE_BYTES = 16
_FEW = 8  # documents; with four per half, one is still as long as the longest eighth of the mix


@dataclass(frozen=True)
class AttentionRequest:
    """Request of the probe.

    forms: eager, flash, mem_efficient, cudnn, math.
    length: tokens of a typical row.
    device: cpu | cuda.
    window: size of the sliding window including the query itself, if it makes every form take a mask; None: all earlier
        tokens.
    rows: rows of a micro-batch; on a CPU so many short rows are timed that they have a minimum of tokens in total.
    masks: whether SDPA may also get masks, as a vision tower gives them; without a window.
    """

    forms: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    dtype: DType
    device: str
    window: int | None = None
    rows: int = 1
    masks: bool = False


@dataclass(frozen=True)
class Room:
    """Limits of the size of a timed pass.

    free: free bytes of memory; None if too little is timed for it to matter.
    memory: total bytes of memory; None if unknown.
    """

    limits: Limits
    free: int | None
    memory: int | None = None

    @property
    def alone(self) -> Room:
        """The room once other programs have freed their memory; a tenth stays taken, because a process on a GPU uses
        some before it does anything."""
        if self.free is None or self.memory is None:
            return self
        return replace(self, free=max(self.free, self.memory * 9 // 10))

    def operations(self, dtype: DType) -> int | None:
        most = self.limits.attention_operations
        return most if most is None or dtype != "fp32" else most // 4


def room_on(device: torch.device, limits: Limits | None = None, free: int | None = None) -> Room:
    """Return the room on a device. limits, free: replace the device's."""
    limits = limits or LIMITS[device.type]
    if limits.attention_operations is None or free is not None:
        return Room(limits, free)
    found = hardware.detect()
    return Room(limits, found.free, found.memory)


@dataclass(frozen=True)
class Size:
    """Size of a pass. kv_heads: heads of keys, each with `groups` query heads."""

    rows: int
    groups: int
    kv_heads: int
    tokens: int

    def share_of(self, whole: Size) -> float:
        return self.rows * self.kv_heads / (whole.rows * whole.kv_heads)

    def less_than(self, request: AttentionRequest) -> str:
        return smaller_than_requested(
            (self.tokens, request.length, "tokens"),
            (self.groups * self.kv_heads, request.heads, "heads"),
            (self.rows, request.rows, "rows"),
        )


def timed_at(*less: str, held: bool) -> str:
    """Describe what is timed. less: parts of the run's shapes that are timed, each empty if complete. held: whether
    more would be timed without other programs."""
    return ", ".join(filter(None, (*less, MEMORY_TAKEN if held else "")))


def smaller_than_requested(*taken: tuple[int, int, str]) -> str:
    """Describe reduced shapes. taken: (timed, requested, unit). Empty if nothing was reduced."""
    less = [f"{timed} of {requested} {what}" for timed, requested, what in taken if timed < requested]
    return f"at {' and '.join(less)}" if less else ""


def timed_size(request: AttentionRequest, room: Room) -> Size:
    """Return the size of the timed pass: the run's, with fewer rows, then heads, then tokens if limits do not allow
    it."""
    groups, width, most = request.heads // request.kv_heads, request.head_dim, room.limits.attention_tokens
    tokens = min([request.length, *_most_tokens(groups, width, request.dtype, room, request.window)])
    rows = request.rows if most is None else max(1, most // request.length)
    kv_heads = most_heads(groups, request.kv_heads, room.limits)
    units = heads_within(room, groups, width, request.dtype, squares=tokens**2, tokens=tokens)
    if units is not None:
        rows = max(1, min(rows, units // kv_heads))
        kv_heads = max(1, min(kv_heads, units // rows))
    return Size(rows, groups, kv_heads, tokens)


@dataclass(frozen=True)
class Documents:
    """The timed documents of a packed row.

    lengths: lengths, longest first.
    longest: the length to which they were cut.
    kv_heads: see Size.
    """

    lengths: tuple[int, ...]
    longest: int
    kv_heads: int


def timed_documents(
    mix: tuple[int, ...], groups: int, kv_heads: int, head_dim: int, dtype: DType, tokens: int, room: Room
) -> Documents:
    """Choose the documents of a packed row that are timed.

    mix: lengths in the order in which the run may combine them.
    tokens: tokens of a row in the run.

    If memory or operations do not allow all: fewer heads, then fewer documents, then shorter ones. Too few documents
    would not resemble the mix, and without the longest there would be no padding for packing to save.
    """
    if room.limits.attention_tokens is not None:
        tokens = room.limits.attention_tokens
    bounds, kv_heads = _most_tokens(groups, head_dim, dtype, room, None), most_heads(groups, kv_heads, room.limits)
    while True:
        longest = min([max(mix), *bounds])
        lengths = timed_lengths(mix, longest, tokens)
        padded = padded_halves(lengths)  # at least as large as the packed row
        squares, numbers = sum(rows * one**2 for rows, one in padded), sum(rows * one for rows, one in padded)
        units = heads_within(room, groups, head_dim, dtype, squares=squares, tokens=numbers)
        if units is None or units or lengths == (1,):
            return Documents(lengths, longest, kv_heads if units is None else max(1, min(kv_heads, units)))
        tokens = max(1, tokens // 2)
        if len(lengths) <= _FEW:
            mix = tuple(max(1, one // 2) for one in mix)


def padded_halves(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return (rows, tokens per row) of the longer and the shorter half, as in two padded micro-batches. lengths:
    longest first."""
    middle = (len(lengths) + 1) // 2
    return [(len(half), max(half)) for half in (lengths[:middle], lengths[middle:]) if half]


def timed_lengths(mix: tuple[int, ...], longest: int, tokens: int) -> tuple[int, ...]:
    """Return evenly spaced documents of the mix, each cut to `longest`, with about `tokens` tokens in total, longest
    first."""
    ordered = sorted((min(length, longest) for length in mix), reverse=True)
    count = max(1, round(tokens * len(ordered) / sum(ordered)))
    if count >= len(ordered):
        return tuple(sorted(ordered * max(1, count // len(ordered)), reverse=True))
    return tuple(ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count))


def with_scores(whole: Size, room: Room) -> Size | None:
    """Return the part of `whole` whose scores fit into half of the free memory; None if not even one row with one key
    head fits."""
    if room.free is None:
        return whole
    units = room.free // 2 // _least_scores(whole)
    if not units:
        return None
    rows = min(whole.rows, max(1, units // whole.kv_heads))
    return replace(whole, rows=rows, kv_heads=min(whole.kv_heads, units // rows))


def no_room(whole: Size, room: Room) -> str:
    heads = f"{whole.groups} head{'s' if whole.groups > 1 else ''}"
    least = f"{size_text(_least_scores(whole))} for {heads} at {whole.tokens} tokens"
    return f"{NO_ROOM}: {least}, with {size_text(room.free or 0)} free"


def most_heads(groups: int, kv_heads: int, limits: Limits) -> int:
    """Maximum number of key and value heads."""
    most = limits.attention_heads
    return kv_heads if most is None else min(kv_heads, max(1, most // groups))


def heads_within(room: Room, groups: int, head_dim: int, dtype: DType, *, squares: int, tokens: int) -> int | None:
    """Return how many key heads, each with `groups` query heads, fit into a pass; None for any number.

    tokens: tokens of all rows of one head.
    squares: sum of the squares of their lengths.
    """
    bounds = []
    if (operations := room.operations(dtype)) is not None:
        bounds.append(operations // _operations(squares, groups, head_dim))
    if room.free is not None:
        bounds.append(room.free // 4 // _bytes(tokens, groups, head_dim, dtype))
    return min(bounds, default=None)


def _most_tokens(groups: int, head_dim: int, dtype: DType, room: Room, window: int | None) -> list[int]:
    """Bounds on the tokens of a row with one key head."""
    bounds = [] if room.limits.attention_tokens is None else [room.limits.attention_tokens]
    if (operations := room.operations(dtype)) is not None:
        bounds.append(math.isqrt(operations // _operations(1, groups, head_dim)))
    if room.free is not None:
        bounds.append(max(1, room.free // 4 // _bytes(1, groups, head_dim, dtype)))
    if room.free is not None and window is not None:  # the mask, its temporaries, and the bias made of it
        bounds.append(max(1, math.isqrt(room.free // 4 // (3 + TORCH_DTYPE[dtype].itemsize))))
    return bounds


def _operations(squares: int, heads: int, head_dim: int) -> int:
    """FLOPs of a causal forward and backward pass: two products forward and five backward."""
    return 7 * squares * heads * head_dim


def _bytes(tokens: int, heads: int, head_dim: int, dtype: DType) -> int:
    """Bytes of a forward and backward pass that stores no scores: inputs, output, gradients, and fp32 sums. Besides
    inputs and the output's gradient, 12 bytes per element were measured in bf16 and 18 in fp32."""
    return tokens * heads * head_dim * (8 * TORCH_DTYPE[dtype].itemsize + 8)


def _least_scores(whole: Size) -> int:
    return _SCORE_BYTES * whole.groups * whole.tokens**2
