"""Which operators of a training step belong together, for `benchmarks/operators.py`.

    tracer = Tracer({"rank": 32, "vocabulary": 32000})
    tracer.start(); step(); tracer.stop()
    tracer.groups()      # {group: {"seconds": …, "calls": …, "flops": …}}

An operator is known by its name, the shapes that it reads, and the operators that called it. Nothing outside of torch
is imported: the peers' environments run this too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

BASE, ADAPTER, ATTENTION = "products with weights", "adapter products", "attention"
HEAD, OPTIMIZER, COPIES = "head and loss", "optimizer", "copies and casts"
ELEMENTS = "norms, activation, rotary, sums"
GROUPS = (BASE, ADAPTER, ATTENTION, HEAD, ELEMENTS, COPIES, OPTIMIZER)

_PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_"}
_OF_ATTENTION = ("scaled_dot_product", "flash_attention", "_Matmul")
_OF_OPTIMIZER = ("Optimizer.", "clip_grad", "_foreach_", "_fused_adam", "optimizer")
_OF_LOSS = ("cross_entropy", "nll_loss", "_Chunked", "log_softmax")
_MOVES = {
    "aten::copy_",
    "aten::_to_copy",
    "aten::clone",
    "aten::cat",
    "aten::index_select",
    "aten::index",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::index_add_",
    "aten::gather",
    "aten::fill_",
    "aten::zero_",
    "aten::embedding",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
}

Shapes = Sequence[Sequence[int]]


def group_of(name: str, shapes: Shapes, callers: Sequence[str], dimensions: dict[str, int]) -> str:
    """shapes: of the operands. callers: from the nearest outward. dimensions: "vocabulary", and "rank" with an
    adapter."""
    around = [name, *callers]
    if _any(around, _OF_OPTIMIZER):
        return OPTIMIZER
    if _any(around, _OF_LOSS) or (name != "aten::embedding" and _has(shapes, dimensions["vocabulary"])):
        return HEAD
    if _any(around, _OF_ATTENTION) or any(_is_square_of_many(shape) for shape in shapes):
        return ATTENTION
    if name in _PRODUCTS:
        if any(len(shape) == 3 for shape in shapes):
            return ATTENTION
        return ADAPTER if "rank" in dimensions and _has(shapes, dimensions["rank"]) else BASE
    return COPIES if name in _MOVES else ELEMENTS


def product_flops(name: str, shapes: Shapes) -> int:
    """Of a matrix product; 0 for any other operator."""
    operands = [shape for shape in shapes if len(shape) >= 2]
    if name not in _PRODUCTS or len(operands) < 2:
        return 0
    left, right = operands[-2], operands[-1]
    batch = left[0] if len(left) == 3 else 1
    return 2 * batch * left[-2] * left[-1] * right[-1]


def _any(names: Sequence[str], parts: Sequence[str]) -> bool:
    return any(part in name for name in names for part in parts)


def _has(shapes: Shapes, size: int) -> bool:
    return any(size in shape for shape in shapes)


def _is_square_of_many(shape: Sequence[int]) -> bool:
    """Whether it is a matrix of tokens by tokens for every head."""
    return len(shape) >= 3 and shape[-1] == shape[-2] > 1


class Tracer:
    """dimensions: as in `group_of`."""

    def __init__(self, dimensions: dict[str, int]):
        self._dimensions = dimensions
        self._profile: Any = None

    def start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        self._profile.__enter__()

    def stop(self) -> None:
        self._profile.__exit__(None, None, None)

    def groups(self) -> dict[str, dict[str, float]]:
        """Seconds: of operators themselves, without those that they call. "names" has the longest of each group."""
        found = {name: {"seconds": 0.0, "calls": 0, "flops": 0} for name in GROUPS}
        by_name: dict[tuple[str, str], float] = {}
        for event in self._profile.events():
            shapes = [shape for shape in event.input_shapes or () if shape and all(isinstance(n, int) for n in shape)]
            group = group_of(event.name, shapes, list(_callers(event)), self._dimensions)
            own = found[group]
            own["seconds"] += event.self_cpu_time_total / 1e6
            own["calls"] += 1
            own["flops"] += product_flops(event.name, shapes)
            by_name[group, event.name] = by_name.get((group, event.name), 0.0) + event.self_cpu_time_total / 1e6
        longest = sorted(by_name.items(), key=lambda item: -item[1])
        for name, own in found.items():
            own["names"] = [(one, seconds) for (group, one), seconds in longest if group == name][:5]  # type: ignore
        return found


def _callers(event: Any) -> Iterator[str]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event.name
