"""What the probes say of this machine, from the cache where it was asked before.

Not more than `BUDGET` seconds pass in all, besides imports and a GPU's start: every probe has a budget of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from surefoot.families.model_facts import ModelFacts
from surefoot.planning.measurements import AttentionTrial, LengthFacts, PointwiseSizes, PointwiseTrial
from surefoot.planning.plan import DType
from surefoot.probe.kept import Kept

if TYPE_CHECKING:  # the plan of another machine comes by here and needs no torch
    import torch

    from surefoot.kernels.forms import Arithmetic
    from surefoot.probe.attention import Form
    from surefoot.probe.child import AttentionRequest
    from surefoot.probe.documents import OfDocuments
    from surefoot.probe.pointwise import Ways

Shape = tuple[int, int]  # inputs, outputs
BUDGET = {"cpu": 3.0, "cuda": 10.0}  # seconds; measured in docs/evidence/probes.md
_NOT_LOADED = "Triton does not load"
_PASSING = ("ended its process", "did not end", "out of memory")  # what may be otherwise tomorrow


def measured_products(
    shapes: Iterable[Shape], device: torch.device, dtypes: Sequence[DType], kept: Kept
) -> dict[DType, float]:
    """See `probe.matmul.product_rates`."""
    from surefoot.probe import matmul

    largest = largest_of(shapes)
    question = {"shape": largest, "device": device.type, "dtypes": list(dtypes)}
    return kept.get(
        "products", question, dict[DType, float], lambda: matmul.product_rates([largest], device, dtypes=dtypes)
    )


def measured_tf32(shapes: Iterable[Shape], device: torch.device, kept: Kept) -> float | None:
    """See `probe.matmul.tf32_rate`."""
    from surefoot.probe import matmul

    if device.type != "cuda":
        return None
    largest = largest_of(shapes)
    return kept.get("tf32", {"shape": largest}, float | None, lambda: matmul.tf32_rate([largest], device))


def measured_threads(shapes: Iterable[Shape], cores: int, kept: Kept) -> dict[int, float]:
    """See `probe.threads.thread_rates`. cores: the largest number of threads to try."""
    from surefoot.probe import threads

    largest = largest_of(shapes)
    counts = threads.thread_counts(cores)
    return kept.get(
        "threads",
        {"shape": largest, "counts": counts},
        dict[int, float],
        lambda: threads.thread_rates(largest, counts),
        cores=max(counts),
    )


def measured_copy(device: torch.device, kept: Kept) -> float:
    """See `probe.copy.copy_rate`."""
    from surefoot.probe import copy

    return kept.get("copy", {"device": device.type}, float, lambda: copy.copy_rate(device))


def measured_attention(request: AttentionRequest, kept: Kept) -> tuple[AttentionTrial, ...]:
    """In a child process on a GPU, in this one on a CPU, where nothing of torch's has ever crashed."""
    from dataclasses import asdict

    from surefoot.probe import child

    run = child.run_in_child if request.device == "cuda" else child.run_request
    return kept.get(
        "attention",
        asdict(request),
        tuple[AttentionTrial, ...],
        lambda: run(request),
        lasting=lambda trials: not any(said in trial.failure for trial in trials for said in _PASSING),
    )


def measured_documents(
    forms: Sequence[str], model: ModelFacts, lengths: LengthFacts, dtype: DType, device: torch.device, kept: Kept
) -> tuple[AttentionTrial, ...]:
    """See `probe.documents.document_trials`: of the model's heads, at lengths of the data."""
    question = {
        "forms": list(forms),
        "mix": list(lengths.mix),
        "heads": [model.heads, model.kv_heads, model.head_dim],
        "dtype": dtype,
        "device": device.type,
    }
    return kept.get(
        "documents",
        question,
        tuple[AttentionTrial, ...],
        lambda: _document_trials(forms, model, lengths, dtype, device),
    )


def _document_trials(
    forms: Sequence[str], model: ModelFacts, lengths: LengthFacts, dtype: DType, device: torch.device
) -> tuple[AttentionTrial, ...]:
    from surefoot.kernels.documents import FORMS, Attend, documents_of
    from surefoot.probe.documents import document_trials

    def of_documents(attend: Attend) -> OfDocuments:
        def form(documents: Sequence[int]) -> Form:
            found = documents_of(documents, device)
            return lambda q, k, v: attend(q, k, v, found, model.head_dim**-0.5)

        return form

    return document_trials(
        {name: of_documents(FORMS[name]) for name in forms},
        mix=lengths.mix,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        device=device,
    )


def measured_pointwise(
    sizes: PointwiseSizes, dtype: DType, device: torch.device, kept: Kept
) -> tuple[PointwiseTrial, ...]:
    """See `probe.pointwise.pointwise_trials`. A Triton that does not load is a trial that failed."""
    from dataclasses import asdict

    from surefoot.kernels.forms import arithmetic_for
    from surefoot.probe.pointwise import pointwise_trials

    def trials() -> tuple[PointwiseTrial, ...]:
        try:
            ways = pointwise_ways(arithmetic_for(device.type))
        except ImportError as error:
            return (PointwiseTrial("all", 0.0, 0.0, f"{_NOT_LOADED}: {error}"),)
        return pointwise_trials(ways, sizes, dtype, device)

    return kept.get(
        "pointwise",
        {"sizes": asdict(sizes), "dtype": dtype, "device": device.type},
        tuple[PointwiseTrial, ...],
        trials,
        lasting=lambda found: not any(trial.failure.startswith(_NOT_LOADED) for trial in found),
    )


def pointwise_ways(by: Arithmetic) -> Ways:
    """Norms as Llama and as Gemma write them, the turn of heads, and gates: plain and by surefoot's kernels."""
    from functools import partial

    from surefoot.kernels.blocks import NormForm
    from surefoot.kernels.pointwise import gated, plain_gate, plain_norm, plain_turn, rms_norm, turned_alone
    from surefoot.probe.pointwise import Ways

    forms = (NormForm(1e-5, 0.0, narrow_first=True), NormForm(1e-6, 1.0, narrow_first=False))
    return Ways(
        [(partial(plain_norm, form=form), partial(rms_norm, form=form, by=by)) for form in forms],
        (lambda x, cos, sin: plain_turn(x, cos.unsqueeze(1), sin.unsqueeze(1)), partial(turned_alone, by=by)),
        (plain_gate, partial(gated, by=by.gates)) if by.gates else None,
    )


def largest_of(shapes: Iterable[Shape]) -> Shape:
    """By numbers in the weight."""
    return max(shapes, key=lambda shape: shape[0] * shape[1])
