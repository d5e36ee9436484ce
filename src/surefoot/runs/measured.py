"""Measure this machine, or take earlier results from the cache, as far as a plan needs it.

All probes together take at most `LIMITS[…].seconds`, besides imports and GPU start-up; each has its own time budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.attention import ORDER, mask_reason, obstacle
from surefoot.planning.deterministic import with_deterministic
from surefoot.planning.environment import is_open as threads_are_open
from surefoot.planning.fast_paths import GATES, open_parts
from surefoot.planning.measurements import (
    MEMORY_TAKEN,
    PADDED,
    AttentionTrial,
    LengthFacts,
    Measurements,
    PointwiseSizes,
    PointwiseTrial,
    longest_document,
    longest_example,
)
from surefoot.planning.notes import Notes
from surefoot.planning.packing import open_forms
from surefoot.planning.plan import BatchPlan, DType
from surefoot.planning.precision import NARROW, plan_precision, tf32_is_open
from surefoot.planning.probes.kept import Kept, open_kept
from surefoot.planning.tokenizer import plan_max_length
from surefoot.system.hardware import Hardware

if TYPE_CHECKING:  # planning for another machine must not import torch
    import torch

    from surefoot.planning.probes.child import Probe
    from surefoot.planning.probes.documents import DocumentsRequest
    from surefoot.planning.probes.sizes import AttentionRequest


def measure_open_choices(
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    environment: Mapping[str, str],
    lengths: LengthFacts | None,
    batch: Callable[[], BatchPlan],
) -> Measurements | None:
    """Measure what the config leaves open; None if the result would not depend on measurements.

    lengths: lengths of the examples, if known.
    batch: makes the batch plan without measurements, for the probes of a GPU.
    """
    # Small models on a CPU are planned without: timings of small products vary from start to start, and so would plans.
    # But the speed of a dtype that the user requested is measured, because nothing else shows how slow it is.
    narrow = hardware.kind == "cpu" and model.hidden < NARROW
    if narrow and config.precision.compute in ("auto", "fp32"):
        return None
    import torch

    from surefoot.planning.probes.child import one_child

    kept, shapes = open_kept(), linear_shapes(model)
    if narrow:
        return Measurements(products=_products(config, shapes, hardware, kept))
    with one_child():
        device = torch.device(hardware.kind)
        products = _products(config, shapes, hardware, kept)
        tf32 = measured_tf32(shapes, device, kept) if tf32_is_open(config.precision, hardware, environment) else None
        threads = (
            measured_threads(shapes, hardware.cores, kept) if threads_are_open(model, hardware, environment) else {}
        )
        so_far = Measurements(products=products, threads=threads, tf32=tf32)
        dtype = plan_precision(config, model, hardware, so_far, environment, Notes()).compute.value
        limit = plan_max_length(config.data.max_length, model, Notes()).value
        both_ways = bool(lengths and lengths.pictures and model.both_ways)
        masked = mask_reason(model.window, longest_example(limit, lengths), both_ways)
        # On a GPU one short row would measure only kernel launches. On a CPU one row is enough work, and the probe must
        # end within seconds.
        rows = batch().micro.value if hardware.kind == "cuda" else 1
        if forms := _attention_forms(config, model, hardware, dtype, masked):
            length = lengths.typical if lengths else limit
            window = model.window if masked else None
            masks = bool(lengths and lengths.pictures)
            request = attention_request(model, forms, length, dtype, hardware.kind, rows, window, masks=masks)
            trials = measured_attention(request, kept)
            so_far = replace(so_far, attention=trials, attention_dtype=dtype, attention_length=length)
        if parts := open_parts(config, model, hardware):
            trials = measured_pointwise(parts, pointwise_sizes(model), dtype, hardware.kind, kept)
            so_far = replace(so_far, pointwise=trials)
        if lengths is None or not lengths.mix or config.data.packing == "off":
            return so_far
        packed = open_forms(config, model, hardware, dtype, longest_document(limit, lengths), pictures=lengths.pictures)
        if isinstance(packed, str):
            return so_far
        request = _documents_request(model, _tried(packed, config, hardware), lengths, dtype, hardware.kind, rows)
        return replace(so_far, documents=measured_documents(request, kept))


def linear_shapes(model: ModelFacts) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers."""
    return [module.linear for module in model.layer_linears if module.linear]


def pointwise_sizes(model: ModelFacts) -> PointwiseSizes:
    heads = (model.heads, model.head_dim, model.kv_heads)
    return PointwiseSizes(model.hidden, *heads, model.intermediate, GATES.get(model.activation, ""))


def attention_request(
    model: ModelFacts,
    forms: Sequence[str],
    length: int,
    dtype: DType,
    kind: str,
    rows: int,
    window: int | None = None,
    *,
    masks: bool = False,
) -> AttentionRequest:
    """Build the attention probe's request with the model's heads at `length` tokens.

    kind: cpu | cuda.
    rows: rows of a micro-batch; the probe of a CPU uses one.
    window: sliding window of the model, if an example is longer, so that every form gets a mask.
    masks: whether a vision tower may give the kernels masks.
    """
    from surefoot.planning.probes.sizes import AttentionRequest

    heads = (model.heads, model.kv_heads, model.head_dim)
    return AttentionRequest(tuple(forms), *heads, length, dtype, kind, window, rows if kind == "cuda" else 1, masks)


def _documents_request(
    model: ModelFacts, forms: Sequence[str], lengths: LengthFacts, dtype: DType, kind: str, rows: int
) -> DocumentsRequest:
    """Build the request of the packing probe, with the model's heads and documents of the data's lengths.

    rows: rows of a padded micro-batch, whose tokens a GPU's probe packs; a CPU's uses few.
    """
    from surefoot.planning.probes.documents import DocumentsRequest

    heads = (model.heads, model.kv_heads, model.head_dim)
    request = DocumentsRequest((*forms, PADDED), lengths.mix, *heads, dtype, kind)
    return replace(request, tokens=rows * lengths.typical) if kind == "cuda" else request


def _products(
    config: RunConfig, shapes: Sequence[tuple[int, int]], hardware: Hardware, kept: Kept
) -> dict[DType, float]:
    """Rates of fp32 and the requested dtype (bf16 if open). fp32 alone is only needed to compare with TF32."""
    import torch

    requested, device = config.precision.compute, torch.device(hardware.kind)
    if requested == "fp32":
        return measured_products(shapes, device, ("fp32",), kept) if hardware.tf32 else {}
    return measured_products(shapes, device, ("fp32", "bf16" if requested == "auto" else requested), kept)


def _attention_forms(
    config: RunConfig, model: ModelFacts, hardware: Hardware, dtype: DType, masked: str
) -> Sequence[str]:
    """Forms of attention to time: those that can run here; if kernels are switched by hand, on a GPU the first left."""
    request = config.attention
    if request.implementation in ("eager", "flash_attention_2") or model.without_sdpa:
        return []
    usable = [
        kernel
        for kernel in ORDER
        if not obstacle(kernel, hardware, dtype, model.head_dim, model.attention_dropout, masked, model.odd_heads)
    ]
    switches = {kernel: getattr(request, kernel) for kernel in ORDER}
    if any(switch != "auto" for switch in switches.values()):
        left = [one for one in usable if switches[one] == "on" or (switches[one] == "auto" and one != "cudnn")]
        forms = left[:1] if hardware.kind == "cuda" else []
    else:
        forms = [*usable, *(["eager"] if request.implementation == "auto" else [])]
    return _tried(forms, config, hardware)


def _tried(forms: Sequence[str], config: RunConfig, hardware: Hardware) -> Sequence[str]:
    """Return the forms with their deterministic ones, where these are open."""
    is_open = hardware.kind == "cuda" and config.attention.deterministic != "off"
    return with_deterministic(forms) if is_open else forms


Shape = tuple[int, int]  # inputs, outputs
# Errors that may be temporary, for example until another program frees memory; not cached.
_TEMPORARY = (
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
    """See `planning.probes.matmul.product_rates`."""
    from surefoot.planning.probes import matmul
    from surefoot.planning.probes.child import start_child

    largest = largest_of(shapes)
    question = {"shape": largest, "device": device.type, "dtypes": list(dtypes)}

    def measure() -> dict[DType, float]:
        if device.type == "cuda":
            start_child()  # what comes next was probably not measured before either
        return matmul.product_rates([largest], device, dtypes=dtypes)

    return kept.get("products", question, dict[DType, float], measure)


def measured_tf32(shapes: Iterable[Shape], device: torch.device, kept: Kept) -> float | None:
    """See `planning.probes.matmul.tf32_rate`."""
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


def measured_pointwise(
    parts: tuple[str, ...], sizes: PointwiseSizes, dtype: DType, kind: str, kept: Kept
) -> tuple[PointwiseTrial, ...]:
    from surefoot.planning.probes.pointwise import PointwiseRequest
    from surefoot.runs.kernel_probes import POINTWISE

    return _trials("pointwise", PointwiseRequest(parts, sizes, dtype, kind), POINTWISE, kept)


def _trials(name: str, request: Any, probe: Probe, kept: Kept) -> tuple[Any, ...]:
    """Run the trials: on a GPU in a child process, because kernels may crash; on a CPU in this one."""
    from surefoot.planning.probes import child

    run = child.run_in_child if request.device == "cuda" else child.run_request
    return kept.get(
        name,
        asdict(request),
        tuple[probe.trial, ...],
        lambda: run(request, probe),
        lasting=lambda trials: not any(temporary in trial.remarks for trial in trials for temporary in _TEMPORARY),
    )


def largest_of(shapes: Iterable[Shape]) -> Shape:
    """The shape with the most weights."""
    return max(shapes, key=lambda shape: shape[0] * shape[1])
