"""Ways to make a run fit that does not: other settings, each with its whole plan and the tokens per second to expect.

What is tried is a list, and no search: each change alone, and those that people make together (8-bit moments in host
memory, LoRA on a base in 4 bits), each as asked and, where that does not fit, with micro-batches and checkpointing left
to the plan. On a GPU without bf16, where a plan computes in fp32, each is also tried with fp16. Of several GPUs it is
the smallest number that fits. A way is resolved as any config is, so that its figures are its plan's own; what cannot
run is refused there and left out. So is a way that changes all that another one changes, and more, and is neither
faster nor takes less host memory.

Tokens per second are estimates: the arithmetic of a step (`limits`) at a fraction of the datasheet's rate, plus what is
copied, as if nothing overlapped. Not counted: answers that ppo and grpo draw (these have no estimate), the decoding of
a base in 4 or 8 bits, and reading the data. Where there is no estimate, the order is that of the updates alone, on an
A40 if the GPU is unknown, with fp32 as an eighth of the rate in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.config.schema import AdapterConfig, RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.batch import examples_of_step
from surefoot.planning.limits import step_flops, work_of
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.memory import fits, fits_host, usable
from surefoot.planning.parallel import RanksFacts, holds_narrow
from surefoot.planning.plan import PLAIN, RunPlan
from surefoot.planning.reference import ADAPTER_OFF, MODEL
from surefoot.planning.scale import EFFICIENCY, FABRICS, Fabric, fabric_of, sent_bytes
from surefoot.system.errors import NO_MEMORY, InputError
from surefoot.system.hardware import Hardware
from surefoot.system.messages import size_text

Keys = Mapping[str, Any]  # dotted key of the config -> value
Resolve = Callable[[RunConfig, RanksFacts], RunPlan]
_LORA = {"adapter.kind": "lora", "adapter.rank": 16, "adapter.alpha": 32.0}
_FP16 = {"precision.compute": "fp16"}
_OFFLOAD, _BITS, _NF4 = {"parallel.offload": "optimizer"}, {"optim.name": "adamw_8bit"}, {"precision.base": "nf4"}
# Activations computed twice leave room for larger micro-batches, each of which sends all gradients to the host.
_LARGER = {"gradient_checkpointing": "on", "batch.micro": "auto"}
_FREE = {"batch.micro": "auto", "gradient_checkpointing": "auto"}  # what the plan may decide
_GPUS = (2, 4, 8)
# Bytes that a CPU moves per trained weight: AdamW reads weight, gradient and two moments and writes three of them; the
# weight is read and rounded; per micro-batch a gradient is read and added to its sum.
_STEP_BYTES, _SEND_BYTES, _SUM_BYTES = 28, 6, 10
_HOST = 100e9  # bytes per second of host memory: half of eight channels of DDR4-3200
_FP32 = 1 / 8  # rate of fp32 products: on a T4 8.1 of 65, on a V100 15.7 of 125 TFLOP/s (datasheets)
_LINK = 0.8  # fraction of the datasheet's rate to and from the host


@dataclass(frozen=True)
class Way:
    """Settings with which the run fits.

    keys: what to set besides the config; empty for the config itself.
    plan: the resolved plan of one GPU's process.
    gpus: number of GPUs.
    rate: expected tokens per second over all GPUs; None if it cannot be estimated.
    """

    keys: Keys
    plan: RunPlan
    gpus: int
    rate: float | None

    @property
    def host(self) -> int:
        """Bytes of host memory, of all ranks: what the optimizer has there, or whole weights in fp32 until they are
        sharded. Those of a frozen base stay in the files."""
        whole = 4 * self.plan.trainable * self.gpus if self.gpus > 1 and self.plan.adapter is None else 0
        return max(self.plan.memory.host, whole)


def is_too_large(error: InputError) -> bool:
    """Whether a config was refused for its memory alone."""
    return all(fault.code == NO_MEMORY for fault in error.faults)


def ways_to_fit(
    config: RunConfig, resolve: Resolve, model: ModelFacts, hardware: Hardware, lengths: LengthFacts | None = None
) -> list[Way]:
    """Return the ways that fit, the one with the least GPU time per token first.

    resolve: makes the plan of a config on these ranks; raises InputError for what cannot run.
    """
    fabric = fabric_of(hardware)
    found: list[tuple[float, Way]] = []  # with seconds of GPUs per token
    for keys, plan, gpus in _fitting(config, resolve, hardware):
        rate = _rate(config, plan, model, fabric or FABRICS["a40"], lengths)
        known = fabric is not None and not config.method.rollouts and plan.precision.compute.value != "fp32"
        way = Way(keys, plan, gpus, rate if known else None)
        if gpus == 1 or hardware.host is None or way.host <= usable(hardware.host):
            found.append((gpus / rate, way))
    found = [one for one in found if not any(_is_better(other, one) for other in found)]
    return [way for _, way in sorted(found, key=lambda one: one[0])]


def _is_better(one: tuple[float, Way], other: tuple[float, Way]) -> bool:
    """Whether `one` changes a part of what the other changes, and is worse in nothing but memory of the GPU. LoRA in
    place of DoRA is another method: it is for where DoRA does not fit, and not for its speed."""
    (cost, way), (other_cost, than) = one, other
    fewer = way.keys.items() < than.keys.items()
    another = than.keys.keys() - way.keys.keys() == {"adapter.kind"}
    return fewer and way.gpus <= than.gpus and way.host <= than.host and (cost <= other_cost or another)


def with_keys(config: RunConfig, keys: Keys) -> RunConfig:
    """Return the config with these values, as if they were written in it."""
    for key, value in keys.items():
        section, _, rest = key.partition(".")
        own = getattr(config, section)
        if rest and own is None:
            value = AdapterConfig(**{rest: value})
        elif rest:
            value = own.model_copy(update={rest: value})
        config = config.model_copy(update={section: value})
    return config


def _fitting(config: RunConfig, resolve: Resolve, hardware: Hardware) -> Iterator[tuple[Keys, RunPlan, int]]:
    free = _news(config, _FREE)
    old = hardware.kind == "cuda" and hardware.fp16 and not hardware.bf16
    half = _FP16 if old and config.precision.compute == "auto" else {}
    changes = [*_changes(config)]
    for keys in [*changes, *({**one, **half} for one in changes if half)]:
        for more in ({}, free) if free else ({},):
            asked = {**more, **keys}
            if asked and (plan := _fits(with_keys(config, asked), resolve, 1)):
                yield asked, plan, 1
                break
    if hardware.kind == "cpu":
        return
    for gpus in _GPUS:
        keys = {"parallel.engine": "fsdp2", "parallel.nproc": gpus}
        for more in (half, {}, {**half, **free}, free):
            if plan := _fits(with_keys(config, {**more, **keys}), resolve, gpus):
                yield {**more, **keys}, plan, gpus
                return


def _changes(config: RunConfig) -> Iterator[Keys]:
    """Yield what to try on one GPU, beginning with nothing."""
    yield {}
    if config.adapter is None:
        larger = {**_OFFLOAD, **_news(config, _LARGER)}
        yield _OFFLOAD
        yield larger
        if config.optim.name == "adamw":
            yield _BITS
            yield {**_BITS, **larger}
        yield _LORA
        yield {**_LORA, **_NF4}
        return
    lighter = {"adapter.kind": "lora"} if config.adapter.kind == "dora" else {}
    if lighter:
        yield lighter
    if config.precision.base != "nf4":
        yield _NF4
        if lighter:
            yield {**lighter, **_NF4}


def _news(config: RunConfig, keys: Keys) -> Keys:
    """Return those keys that the config has otherwise."""
    own = {"batch.micro": config.batch.micro, "gradient_checkpointing": config.gradient_checkpointing}
    return {key: value for key, value in keys.items() if own[key] != value}


def _fits(config: RunConfig, resolve: Resolve, gpus: int) -> RunPlan | None:
    try:
        plan = resolve(config, RanksFacts(gpus, gpus, requested=gpus > 1))
    except InputError:
        return None
    return plan if fits(plan.memory) and fits_host(plan.memory) else None


def _rate(config: RunConfig, plan: RunPlan, model: ModelFacts, fabric: Fabric, lengths: LengthFacts | None) -> float:
    """Tokens per second over all GPUs."""
    gpus, passes = plan.parallel.ranks.value, plan.batch.accumulation
    length = int(lengths.mean) if lengths else plan.tokenizer.max_length.value
    examples = examples_of_step(config.batch, length) * config.method.rows
    supervised = int(examples * length * (lengths.supervised if lengths else 1.0))
    flops = step_flops(
        model,
        work_of([length] * examples, supervised),
        plan.adapter,
        head=not config.method.scores,
        checkpointed=plan.memory.layers_again(model.layers) / model.layers,
        pruned=plan.kernels.last_block.value != PLAIN,
    )
    operations = flops.needed + flops.recomputed
    if plan.reference is not None and plan.reference.value in (ADAPTER_OFF, MODEL):
        operations += flops.forward
    peak = fabric.peak * (_FP32 if plan.precision.compute.value == "fp32" else 1)
    seconds = operations / (peak * EFFICIENCY) / gpus
    if gpus > 1:
        seconds += sent_bytes(plan, "fsdp2", gpus, passes) / fabric.inside
    if plan.parallel.offload != "none":
        seconds += _host_seconds(plan, model, fabric, passes)
    return examples * length / seconds


def _host_seconds(plan: RunPlan, model: ModelFacts, fabric: Fabric, passes: int) -> float:
    """Seconds of a step in which an optimizer in host memory is fed and works.

    passes: micro-batches.
    """
    linear = sum(one.linear[0] * one.linear[1] for one in model.modules if one.in_layer and one.linear)
    narrow = linear if holds_narrow(plan.parallel, plan.precision, plan.adapter) else 0
    sent = 4 * plan.trainable - 2 * narrow  # bytes of all gradients, and of all weights
    moved = plan.trainable * (_STEP_BYTES + _SEND_BYTES + passes * _SUM_BYTES)
    return (passes + 1) * sent / (fabric.host * _LINK) + moved / _HOST


COLUMNS = ("GiB per GPU", "host", "tokens/s", "set")
_NOTHING = "nothing that was tried fits: a shorter data.max_length, a smaller model, or more GPUs may"


def way_cells(way: Way) -> tuple[str, ...]:
    """One text per column."""
    rate = f"~{float(f'{way.rate:.2g}'):,.0f}" if way.rate else "?"
    values = {key: f"{value:g}" if isinstance(value, float) else value for key, value in way.keys.items()}
    keys = " ".join(f"{key}={value}" for key, value in values.items())
    return f"{way.plan.memory.total / 2**30:.1f}", size_text(way.host) if way.host else "", rate, keys


def way_lines(ways: Sequence[Way]) -> list[str]:
    """A heading and a line for each way; a sentence if there is none."""
    if not ways:
        return [_NOTHING]
    rows = [COLUMNS, *map(way_cells, ways)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    fits = "fits instead, cheapest first (GPU time per token; tokens/s are estimates, host is host memory):"
    return [
        fits,
        *(
            "  " + "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ),
    ]
