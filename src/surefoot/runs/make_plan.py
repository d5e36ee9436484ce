"""A config becomes a plan: read the model's facts, look at the machine, measure what is not decided yet, resolve.

`surefoot plan` and every training stage come through here. The model's weights are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.models.facts import facts_of
from surefoot.models.folder import resolve_folder
from surefoot.planning.attention import ORDER, mask_reason, obstacle
from surefoot.planning.fast_paths import pointwise_obstacle
from surefoot.planning.measurements import (
    LengthFacts,
    Measurements,
    PointwiseSizes,
    longest_document,
    longest_example,
    measurements_from_json,
)
from surefoot.planning.notes import Notes, as_trained
from surefoot.planning.packing import open_forms
from surefoot.planning.plan import PLAIN, BatchPlan, DType, RunPlan
from surefoot.planning.ppo import Roles
from surefoot.planning.precision import NARROW, plan_precision, tf32_is_open
from surefoot.planning.probes.kept import Kept, open_kept
from surefoot.planning.resolve import resolve
from surefoot.planning.threads import is_open as threads_are_open
from surefoot.planning.tokenizer import plan_max_length
from surefoot.report.trackers.adapters import require_trackers
from surefoot.runs.measured import (
    measured_attention,
    measured_documents,
    measured_pointwise,
    measured_products,
    measured_tf32,
    measured_threads,
)
from surefoot.runs.requirements import ranks_facts, require_libraries
from surefoot.system import hardware as machine
from surefoot.system import process
from surefoot.system.hardware import Hardware

if TYPE_CHECKING:
    from surefoot.planning.probes.documents import DocumentsRequest
    from surefoot.planning.probes.pointwise import PointwiseRequest
    from surefoot.planning.probes.sizes import AttentionRequest


def make_plan(
    config: RunConfig,
    *,
    hardware: Hardware | None = None,
    measure: bool = True,
    measurements: Mapping[str, object] | None = None,
    lengths: LengthFacts | None = None,
) -> RunPlan:
    """The plan of a run.

    config: the run's.
    hardware: a preset to plan for; None looks at this machine and, with `measure`, times products and attention on it.
    measure: whether this machine may be measured. A draft of the plan, which settles the tokenizer and raises all
        conflicts of the config, does without.
    measurements: those of an earlier plan; then nothing is measured.
    lengths: of the examples, where they are known. They come from data that were tokenised by an earlier plan without
        them, so that the conflicts of the config are known to be none: the plan is resolved once.

    Raises InputError with all conflicts, EnvironmentFault where a hub model cannot be reached or a library that is
    asked for does not work here.
    """
    ranks = ranks_facts(config)
    folder = resolve_folder(config.model.path, config.model.revision, weights=False)
    model = as_trained(facts_of(folder), config)
    tokenizer = read_tokenizer_facts(folder)
    environment = {} if hardware else process.read_environment()  # this machine's says nothing of another
    found = hardware or machine.detect()
    if hardware is None:
        require_libraries(config, found.kind)
        require_trackers(config.report_to)
    roles = _roles(config, folder)
    resolved = partial(
        resolve, config, model, tokenizer, found, environment=environment, lengths=lengths, ranks=ranks, roles=roles
    )
    seen = None if measurements is None else measurements_from_json(measurements)
    if seen is None and measure and not found.preset:
        if lengths is None:
            resolved(measurements=None)  # conflicts come before anything that takes time
        process.bound_product_caches(found.kind)  # the probes compute this process's first products
        seen = _measure(config, model, found, environment, lengths, cache(lambda: resolved(measurements=None).batch))
        machine.forget_peak(found.kind)  # of the probes
    return resolved(measurements=seen)


def _roles(config: RunConfig, base: Path) -> Roles:
    """Who plays what in PPO; other stages need no look at other models."""
    if not config.method.critic:
        return Roles()
    from surefoot.methods.ppo.models import find_roles

    return find_roles(config, base)


def _measure(
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    environment: Mapping[str, str],
    lengths: LengthFacts | None,
    batch: Callable[[], BatchPlan],
) -> Measurements | None:
    """What the request leaves open. A narrow model on a CPU is planned without, as there the defaults always stand; but
    how slow a type is that somebody asked for can be seen nowhere else. batch: as it would be without measurements, for
    a GPU's probes."""
    narrow = hardware.kind == "cpu" and model.hidden < NARROW
    if narrow and config.precision.compute in ("auto", "fp32"):
        return None
    import torch

    device, kept = torch.device(hardware.kind), open_kept()
    shapes = linear_shapes(model)
    if narrow:
        return Measurements(products=_products(config, shapes, hardware, kept))
    products = _products(config, shapes, hardware, kept)
    tf32 = measured_tf32(shapes, device, kept) if tf32_is_open(config.precision, hardware, environment) else None
    threads = measured_threads(shapes, hardware.cores, kept) if threads_are_open(model, hardware, environment) else {}
    so_far = Measurements(products=products, threads=threads, tf32=tf32)
    dtype = plan_precision(config, model, hardware, so_far, environment, Notes()).compute.value
    limit = plan_max_length(config.data.max_length, model, Notes()).value
    both_ways = bool(lengths and lengths.pictures and model.both_ways)
    masked = mask_reason(model.window, longest_example(limit, lengths), both_ways)
    forms = _open_forms(config, model, hardware, dtype, masked)
    if forms:
        length = lengths.typical if lengths else limit
        window = model.window if masked else None
        rows = batch().micro.value if hardware.kind == "cuda" else 1
        request = attention_request(model, forms, length, dtype, hardware.kind, rows, window)
        trials = measured_attention(request, kept)
        so_far = replace(so_far, attention=trials, attention_dtype=dtype, attention_length=length)
    if config.kernels.pointwise != PLAIN and not pointwise_obstacle(config, model, hardware):
        sizes = PointwiseSizes(model.hidden, model.heads, model.head_dim)
        seen = measured_pointwise(pointwise_request(sizes, dtype, hardware.kind), kept)
        so_far = replace(so_far, pointwise=seen)
    if lengths is None or not lengths.mix or config.data.packing == "off":
        return so_far
    packed = open_forms(config, model, hardware, dtype, longest_document(limit, lengths), pictures=lengths.pictures)
    if isinstance(packed, str):
        return so_far
    rows = batch().micro.value if hardware.kind == "cuda" else 1
    request = documents_request(model, packed, lengths, dtype, hardware.kind, rows)
    return replace(so_far, documents=measured_documents(request, kept))


def linear_shapes(model: ModelFacts) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers."""
    return [module.linear for module in model.layer_linears if module.linear]


def attention_request(
    model: ModelFacts, forms: Sequence[str], length: int, dtype: DType, kind: str, rows: int, window: int | None = None
) -> AttentionRequest:
    """The model's heads at `length` tokens, for the probe.

    kind: cpu | cuda.
    rows: of a micro-batch; a CPU's probe takes one.
    window: of the model, where an example reaches beyond it and every form gets a mask.
    """
    from surefoot.planning.probes.sizes import AttentionRequest

    heads = (model.heads, model.kv_heads, model.head_dim)
    return AttentionRequest(tuple(forms), *heads, length, dtype, kind, window, rows if kind == "cuda" else 1)


def documents_request(
    model: ModelFacts, forms: Sequence[str], lengths: LengthFacts, dtype: DType, kind: str, rows: int
) -> DocumentsRequest:
    """The model's heads and documents of the data's lengths, for the probe.

    rows: of a micro-batch of padded rows, whose tokens a GPU's probe packs; a CPU's takes few.
    """
    from surefoot.planning.measurements import PADDED
    from surefoot.planning.probes.documents import DocumentsRequest

    heads = (model.heads, model.kv_heads, model.head_dim)
    request = DocumentsRequest((*forms, PADDED), lengths.mix, *heads, dtype, kind)
    return replace(request, tokens=rows * lengths.typical) if kind == "cuda" else request


def pointwise_request(sizes: PointwiseSizes, dtype: DType, kind: str) -> PointwiseRequest:
    from surefoot.planning.probes.pointwise import PointwiseRequest

    return PointwiseRequest(("norm", "rotary"), sizes, dtype, kind)


def _products(
    config: RunConfig, shapes: Sequence[tuple[int, int]], hardware: Hardware, kept: Kept
) -> dict[DType, float]:
    """Rates of fp32 and of the type that is asked for, or bf16 where it is left open. fp32 alone is of use beside TF32
    and nowhere else."""
    import torch

    requested, device = config.precision.compute, torch.device(hardware.kind)
    if requested == "fp32":
        return measured_products(shapes, device, ("fp32",), kept) if hardware.tf32 else {}
    return measured_products(shapes, device, ("fp32", "bf16" if requested == "auto" else requested), kept)


def _open_forms(config: RunConfig, model: ModelFacts, hardware: Hardware, dtype: DType, masked: str) -> list[str]:
    """Forms of attention to try: those that can run here; of the kernels switched by hand, the ones that are on."""
    request = config.attention
    if request.implementation in ("eager", "flash_attention_2") or model.without_sdpa:
        return []
    switches = (request.flash, request.mem_efficient, request.cudnn, request.math)
    if any(switch != "auto" for switch in switches):
        return ["cudnn"] if request.cudnn == "on" and hardware.kind == "cuda" else []
    usable = [
        kernel
        for kernel in ORDER
        if not obstacle(kernel, hardware, dtype, model.head_dim, model.attention_dropout, masked, model.uneven_heads)
    ]
    return [*usable, *(["eager"] if request.implementation == "auto" else [])]
