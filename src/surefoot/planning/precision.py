"""Choose the dtypes of matrix products, frozen base and trainable parameters, and whether a gradient scaler is needed.

The rules prevent three ways to lose a run: fp16 trainable parameters with a gradient scaler ("Attempting to unscale
FP16 gradients"), bf16 on a machine that emulates it, and small updates lost in 16-bit weights. What cannot be stored in
4 or 8 bits is refused before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from surefoot.config.schema import PrecisionConfig, RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.measurements import Measurements
from surefoot.planning.notes import Notes
from surefoot.planning.plan import (
    OFF,
    PACKED_BITS,
    QAT_BLOCKS,
    AdapterPlan,
    BaseType,
    Choice,
    DType,
    PackedType,
    PrecisionPlan,
)
from surefoot.system.hardware import Hardware
from surefoot.system.messages import counted

_ROWS = 16  # torchao stores a weight in nvfp4 only with a multiple of so many outputs
_BASE = "keep the base in 16 bits (precision.base: bf16)"


def check_packed_base(packed: PackedType, model: ModelFacts, adapter: AdapterPlan | None, notes: Notes) -> None:
    """Refuse a quantized base for layers that cannot be quantized, and for modules that should be trained in full."""
    bits = PACKED_BITS[packed]
    if model.structure and any(linear.transposed for linear in model.structure.linears):
        what = f"{packed}: {model.model_type}'s linear layers hold weights transposed, which has no {bits}-bit form"
        notes.refuse("precision.base", what, _BASE)
    for name in adapter.modules_to_save if adapter else ():
        if any(module.in_layer and module.linear and module.name.endswith(name) for module in model.modules):
            what = f"{name} would train in full, and precision.base: {packed} holds it in {bits} bits, which cannot"
            notes.refuse("adapter.modules_to_save", what, f"leave it out, or {_BASE}")


def plan_qat(
    request: PrecisionConfig, model: ModelFacts, adapter: AdapterPlan | None, engine: str, notes: Notes
) -> tuple[Choice[str], int | None]:
    """Choose quantization-aware training, and its group size.

    request: the config's.
    model: facts of the model.
    adapter: the planned adapter; None for full fine-tuning.
    engine: single, ddp, fsdp2 or deepspeed.
    notes: refusals are added here.
    """
    if request.qat == OFF:
        return Choice(OFF, "nothing would be quantized", "default"), None
    block = QAT_BLOCKS.get(request.qat)
    group = None if request.qat == "int8" else block or request.qat_group_size
    linears = [module for module in model.modules if module.in_layer and module.linear]
    leave = "leave precision.qat out"
    if any(linear.transposed for linear in model.structure.linears) if model.structure else False:
        notes.refuse("precision.qat", f"{model.model_type}'s linear layers hold weights transposed", leave)
    elif model.active or not linears:
        what = f"the experts of {model.model_type} are one tensor, for which torchao has no layer"
        notes.refuse("precision.qat", what, leave)
    elif group and (odd := [one for one in linears if one.linear and one.linear[0] % group]):
        inputs = odd[0].linear[0] if odd[0].linear else 0
        what = f"{odd[0].name} has {inputs} inputs, which is not a multiple of {group}"
        fix = leave if block else f"use one that divides {inputs}"
        notes.refuse("precision.qat" if block else "precision.qat_group_size", what, fix)
    elif request.qat == "nvfp4" and (odd := [one for one in linears if one.linear and one.linear[1] % _ROWS]):
        outputs = odd[0].linear[1] if odd[0].linear else 0
        notes.refuse("precision.qat", f"{odd[0].name} has {outputs} outputs, not a multiple of {_ROWS}", leave)
    if engine == "deepspeed":
        notes.refuse("precision.qat", "it was not tested with deepspeed", "use fsdp2, ddp or one process")
    if adapter and adapter.kind.value != "lora":
        what = f"{adapter.kind.value} uses norms of the unrounded weights"
        notes.refuse("precision.qat", what, "use adapter.kind: lora, or all weights")
    if adapter and (whole := [name for name in adapter.modules_to_save if name != model.head]):
        notes.refuse("adapter.modules_to_save", f"{whole[0]} would be trained next to a rounded copy", leave)
    weights = sum(one.linear[0] * one.linear[1] for one in linears if one.linear)
    scales = f"a scale for {group} weights" if group else "a scale for each row"
    seen = " and activations in int8, a scale for each token" if request.qat == "int8-int4" else ""
    seen = " of a row, and activations alike" if block else seen
    bits = request.qat if block or request.qat == "int8" else "int4"
    what = "the frozen base" if adapter else "what trains"
    reason = f"asked for: {weights:,} weights of {len(linears)} layers, {what}, in {bits} with {scales}{seen}"
    if request.qat_after:
        reason += f", after {counted(request.qat_after, 'step')} without"
    return Choice(request.qat, reason, "user"), group


_SLOWER = 1.2  # two timings of the same matmul on a busy machine differ by less
# Matmuls that are 1.5 times as fast make a step 1.2 times as fast if they take half of its time.
_PRODUCT_GAIN = 1.5
# The fp32 rest of a step with 16-bit products is at most 5 % of its FLOPs (doctor's GEMM-FP32-SHARE). If fp32 is 16
# times slower, that is nearly half of the time of all products, so the same threshold applies.
_TF32_GAIN = _PRODUCT_GAIN
# Below this width a CPU step is dominated by small operations: with bf16 products several times as fast, LoRA steps
# gained 14, 16, 25 % at widths 64, 128, 192 and 43, 83 % at 256, 512 (4 layers, 1 536 tokens, AMX). Skipping the
# measurement there also keeps the choice for small models stable on a busy machine.
NARROW = 256


def plan_precision(
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    measurements: Measurements,
    environment: Mapping[str, str],
    notes: Notes,
) -> PrecisionPlan:
    """Choose the dtypes of a run; attention is measured in the compute dtype chosen here.

    config: the run's config.
    model: facts of the model.
    hardware: the machine to plan for.
    measurements: rates of products and of TF32, if measured.
    environment: variables that are set, by name.
    notes: conflicts and cautions are added here.
    """
    request, full, products, tf32 = config.precision, config.adapter is None, measurements.products, measurements.tf32
    gain = tf32 / products["fp32"] if tf32 and products.get("fp32") else None
    compute = _compute(request, full, model.hidden, hardware, products, notes)
    base = _base(request, full, compute.value, notes)
    if form := model.stored_form:
        base = replace(base, reason=f"{base.reason}; the files' {form} is decoded while they are loaded")
    return PrecisionPlan(
        compute=compute,
        base=base,
        trainable=Choice(
            "fp32", "16 bits would lose small updates, and a scaler cannot unscale fp16 gradients", "default"
        ),
        scaler=_scaler(compute.value),
        tf32=_tf32(request, compute.value, hardware, gain, environment, notes),
    )


def _compute(
    request: PrecisionConfig,
    full: bool,
    width: int,
    hardware: Hardware,
    products: Mapping[DType, float],
    notes: Notes,
) -> Choice[DType]:
    if request.compute != "auto":
        _check_compute(request.compute, hardware, products, notes)
        return Choice(request.compute, "asked for", "user")
    if not full and request.base in ("bf16", "fp16"):
        _check_compute(request.base, hardware, products, notes)
        return Choice(request.base, "the dtype of the requested base", "user")
    if hardware.kind == "cpu" and width < NARROW:
        return Choice("fp32", f"layers of width {width} gain little from 16 bits on a CPU", "default")
    if "fp32" in products and "bf16" in products:
        gain = products["bf16"] / products["fp32"]
        where = "one thread, this model's shapes" if hardware.kind == "cpu" else "this model's shapes"
        speeds = f"bf16 {_teraflops(products['bf16'])}, fp32 {_teraflops(products['fp32'])} ({where})"
        if gain >= _PRODUCT_GAIN:
            return Choice("bf16", f"{gain:.1f} times as fast: {speeds}", "measured")
        return Choice("fp32", f"bf16 gains less than {_PRODUCT_GAIN - 1:.0%}: {speeds}", "measured")
    if hardware.bf16:
        return Choice(
            "bf16", f"{hardware.name} computes bf16 in hardware; same range as fp32, needs no scaler", "hardware"
        )
    if hardware.fp16:
        reason = f"{hardware.name} has no bf16; fp16 (faster, with a gradient scaler) only on request"
        return Choice("fp32", reason, "hardware")
    return Choice("fp32", f"{hardware.name} has no fast 16-bit products", "hardware")


def _check_compute(dtype: DType, hardware: Hardware, products: Mapping[DType, float], notes: Notes) -> None:
    """Refuse a dtype that the device does not support, and caution about a slow one."""
    if dtype == "bf16" and hardware.kind == "cuda" and not hardware.bf16:
        major, minor = hardware.capability or (0, 0)
        what = f"bf16 needs compute capability 8.0; {hardware.name} has {major}.{minor}"
        notes.refuse("precision.compute", what, "use fp16 or fp32")
    elif dtype in products and dtype != "fp32" and _SLOWER * products[dtype] < products.get("fp32", 0.0):
        slower = products["fp32"] / products[dtype]
        notes.caution(
            f"precision {dtype} was asked for, but its matrix products are {slower:.1f} times slower than fp32 here "
            f"({_teraflops(products[dtype])} against {_teraflops(products['fp32'])}); precision: auto takes fp32"
        )
    elif (
        dtype not in products
        and hardware.kind == "cpu"
        and not {"fp32": True, "bf16": hardware.bf16, "fp16": hardware.fp16}[dtype]
    ):
        notes.caution(
            f"precision {dtype} was asked for, but {hardware.name} has no instructions for it: slower than fp32"
        )


def _base(request: PrecisionConfig, full: bool, compute: DType, notes: Notes) -> Choice[BaseType]:
    if full:  # a 16-bit base is then refused as contradictory
        return Choice("fp32", "all parameters train, and trainable parameters are fp32", "default")
    if request.base == "auto":
        if compute == "fp32":
            return Choice(
                "fp32", "the dtype of the products; a narrower copy would need a cast at every use", "default"
            )
        return Choice(compute, "frozen: in the dtype of the products, half the memory and no cast per step", "default")
    if bits := PACKED_BITS.get(request.base):
        layers = "the decoder's linear layers; embeddings, head and norms"
        return Choice(request.base, f"asked for: {bits} bits per weight of {layers} in {compute}", "user")
    if request.base not in ("fp32", compute):
        what = f"products of {request.base} weights are {request.base} products, not {compute}"
        notes.refuse("precision.base", what, f"use precision: {{compute: {request.base}}} or {{base: fp32}}")
    return Choice(request.base, "asked for", "user")


def _scaler(compute: DType) -> Choice[bool]:
    if compute == "fp16":
        return Choice(True, "fp16 gradients underflow without one; it scales over fp32 trainable parameters", "default")
    return Choice(False, "only fp16 needs it", "default")


def tf32_is_open(request: PrecisionConfig, hardware: Hardware, environment: Mapping[str, str]) -> bool:
    """Whether a measurement of TF32 may decide, or is worth reporting."""
    return hardware.tf32 and request.tf32 == "auto" and _forced_tf32(environment) is None


def _forced_tf32(environment: Mapping[str, str]) -> bool | None:
    return {"0": False, "1": True}.get(environment.get("NVIDIA_TF32_OVERRIDE", ""))


def _tf32(
    request: PrecisionConfig,
    compute: DType,
    hardware: Hardware,
    gain: float | None,
    environment: Mapping[str, str],
    notes: Notes,
) -> Choice[bool]:
    """gain: speed relative to fp32 products; None if not measured."""
    if not hardware.tf32:
        if request.tf32 == "on":
            notes.refuse(
                "precision.tf32", f"{hardware.name} has no TF32", "leave it out; it needs an NVIDIA GPU from Ampere on"
            )
        return Choice(False, f"{hardware.name} has no TF32", "hardware")
    if (forced := _forced_tf32(environment)) is not None:
        requested = {"on": True, "off": False}.get(request.tf32, forced)
        if requested != forced:
            what = f"is {request.tf32}, but NVIDIA_TF32_OVERRIDE={int(forced)} overrides torch's setting"
            notes.refuse("precision.tf32", what, "unset NVIDIA_TF32_OVERRIDE")
        return Choice(forced, "NVIDIA_TF32_OVERRIDE decides below torch", "hardware")
    if request.tf32 != "auto":
        return Choice(request.tf32 == "on", "asked for", "user")
    speed = "" if gain is None else f"{gain:.1f} times as fast here"
    if compute == "fp32":
        reason = "TF32 would round fp32 products from 23 to 10 bits"
        return Choice(False, f"{reason}, {speed} (precision.tf32: on)" if speed else reason, "default")
    reason = f"remaining fp32 products keep 10 bits, at least as many as {compute}"
    if gain is None:
        return Choice(True, reason, "default")
    if gain < _TF32_GAIN:
        return Choice(False, f"TF32 gains less than {_TF32_GAIN - 1:.0%}: {speed}", "measured")
    return Choice(True, f"{speed}; {reason}", "measured")


def _teraflops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s"
