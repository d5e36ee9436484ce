"""What the probes say of this machine, from the cache where it was asked before.

Not more than `LIMITS[…].seconds` pass in all, besides imports and a GPU's start: every probe has a budget of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.planning.measurements import MEMORY_TAKEN, AttentionTrial, PointwiseTrial
from surefoot.planning.plan import DType
from surefoot.planning.probes.kept import Kept

if TYPE_CHECKING:  # the plan of another machine comes by here and needs no torch
    import torch

    from surefoot.planning.probes.child import Probe
    from surefoot.planning.probes.documents import DocumentsRequest
    from surefoot.planning.probes.pointwise import PointwiseRequest
    from surefoot.planning.probes.sizes import AttentionRequest

Shape = tuple[int, int]  # inputs, outputs
# What may be otherwise tomorrow, or as soon as another program gives back its memory.
_PASSING = (
    "ended its process",
    "did not end",
    "out of memory",
    "allocate memory",
    "ALLOC_FAILED",
    MEMORY_TAKEN,
)


def measured_products(
    shapes: Iterable[Shape], device: torch.device, dtypes: Sequence[DType], kept: Kept
) -> dict[DType, float]:
    """See `probe.matmul.product_rates`."""
    from surefoot.planning.probes import matmul

    largest = largest_of(shapes)
    question = {"shape": largest, "device": device.type, "dtypes": list(dtypes)}
    return kept.get(
        "products", question, dict[DType, float], lambda: matmul.product_rates([largest], device, dtypes=dtypes)
    )


def measured_tf32(shapes: Iterable[Shape], device: torch.device, kept: Kept) -> float | None:
    """See `probe.matmul.tf32_rate`."""
    from surefoot.planning.probes import matmul

    if device.type != "cuda":
        return None
    largest = largest_of(shapes)
    return kept.get("tf32", {"shape": largest}, float | None, lambda: matmul.tf32_rate([largest], device))


def measured_threads(shapes: Iterable[Shape], cores: int, kept: Kept) -> dict[int, float]:
    """See `probes.matmul.thread_rates`. cores: the largest number of threads to try."""
    from surefoot.planning.probes import matmul

    largest = largest_of(shapes)
    counts = matmul.thread_counts(cores)
    return kept.get(
        "threads",
        {"shape": largest, "counts": counts},
        dict[int, float],
        lambda: matmul.thread_rates(largest, counts),
        cores=max(counts),
    )


def measured_copy(device: torch.device, kept: Kept) -> float:
    """See `probes.timing.copy_rate`."""
    from surefoot.planning.probes import timing

    return kept.get("copy", {"device": device.type}, float, lambda: timing.copy_rate(device))


def measured_attention(request: AttentionRequest, kept: Kept) -> tuple[AttentionTrial, ...]:
    from surefoot.planning.probes.child import ATTENTION

    return _trials("attention", request, ATTENTION, kept)


def measured_documents(request: DocumentsRequest, kept: Kept) -> tuple[AttentionTrial, ...]:
    from surefoot.runs.kernel_probes import DOCUMENTS

    return _trials("documents", request, DOCUMENTS, kept)


def measured_pointwise(request: PointwiseRequest, kept: Kept) -> tuple[PointwiseTrial, ...]:
    from surefoot.runs.kernel_probes import POINTWISE

    return _trials("pointwise", request, POINTWISE, kept)


def _trials(name: str, request: Any, probe: Probe, kept: Kept) -> tuple[Any, ...]:
    """In a child process on a GPU, in this one on a CPU, where nothing of torch's has ever crashed."""
    from dataclasses import asdict

    from surefoot.planning.probes import child

    run = child.run_in_child if request.device == "cuda" else child.run_request
    return kept.get(
        name,
        asdict(request),
        tuple[probe.trial, ...],
        lambda: run(request, probe),
        lasting=lambda trials: not any(passing in trial.said for trial in trials for passing in _PASSING),
    )


def largest_of(shapes: Iterable[Shape]) -> Shape:
    """By numbers in the weight."""
    return max(shapes, key=lambda shape: shape[0] * shape[1])
