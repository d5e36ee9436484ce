"""Estimate, on paper, cost and speed of many GPUs: memory of each, bytes sent, time per step.

A model of memory and communication, not a measurement; its assumptions are listed here so that they can be questioned.
With n GPUs, W bytes of weights and T of gradients (fp32), each sends:

    ddp      2 (n-1)/n T per step: one all-reduce of the gradients. Each GPU stores everything.
    zero 2   2 (n-1)/n T per step: reduce-scatter of the gradients, all-gather of the updated weights. Gradients and
             moments are sharded.
    fsdp2    (n-1)/n (2 W + T) per micro-batch: all-gather of the weights before the forward and again before the
             backward pass, reduce-scatter of the gradients. Everything is sharded, except two layers at a time.

Ring algorithms are described in Thakur et al. 2005, the sharding in Rajbhandari et al. 2020 (ZeRO) and Zhao et al. 2023
(FSDP). Traffic is limited by the slowest link on its way: within a node of eight GPUs, or between nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from surefoot.families.model_facts import ModelFacts
from surefoot.planning.limits import step_flops, work_of
from surefoot.planning.memory import usable
from surefoot.planning.parallel import gathered_bytes, per_rank
from surefoot.planning.plan import Choice, MemoryPlan, ParallelPlan, RunPlan
from surefoot.planning.workload import BYTES
from surefoot.system.errors import Fault, InputError
from surefoot.system.hardware import Hardware, preset

Engine = Literal["ddp", "zero 2", "fsdp2"]
ENGINES: tuple[Engine, ...] = ("ddp", "zero 2", "fsdp2")
COUNTS = (1, 8, 64, 512)
NODE = 8  # GPUs connected by the fast links
EFFICIENCY = 0.4  # fraction of the datasheet's rate; 0.35 to 0.5 are reported for long runs


@dataclass(frozen=True)
class Fabric:
    """Compute rate and links of a kind of GPU.

    peak: FLOP/s of dense bf16 products.
    inside, between: bytes per second and GPU in one direction, within a node and between nodes (one adapter per GPU).
    host: bytes per second in one direction, from and to host memory.
    """

    peak: float
    inside: float
    between: float
    host: float


# From the makers' datasheets and whitepapers, of the year beside each: dense products in bf16 (Volta and Turing: fp16),
# summed in fp32; where only a rate with sparsity is given, half of it. inside: half of what NVLink or Infinity Fabric
# has in both directions, or PCIe, which also connects cards without them. between: nets of 400, 200 and 100 Gbit/s.
# host: PCIe with 16 lanes.
_PCIE5, _PCIE4, _PCIE3 = 63e9, 31.5e9, 15.75e9
FABRICS = {
    "b200": Fabric(2250e12, 900e9, 50e9, _PCIE5),  # DGX B200, 2024: 36 PFLOPS with sparsity for eight
    "h200": Fabric(989e12, 450e9, 50e9, _PCIE5),  # 2024: 1,979 with sparsity
    "h100": Fabric(989e12, 450e9, 50e9, _PCIE5),  # SXM, 2023: 1,979 with sparsity
    "a100": Fabric(312e12, 300e9, 25e9, _PCIE4),  # SXM, 2021
    "a100-40": Fabric(312e12, 300e9, 25e9, _PCIE4),  # SXM, 2020
    "mi300x": Fabric(1307e12, 448e9, 50e9, _PCIE5),  # 2023: 1,307.4; seven links of 128 GB/s
    "v100": Fabric(125e12, 150e9, 12.5e9, _PCIE3),  # SXM2, 2018
    "v100-32": Fabric(125e12, 150e9, 12.5e9, _PCIE3),  # SXM2, 2018
    "l40s": Fabric(362e12, _PCIE4, 12.5e9, _PCIE4),  # 2023
    "a6000": Fabric(154.8e12, _PCIE4, 12.5e9, _PCIE4),  # 2020: 309.7 with sparsity
    "a40": Fabric(149.7e12, _PCIE4, 12.5e9, _PCIE4),  # 2021
    "rtx5090": Fabric(209.5e12, _PCIE5, 12.5e9, _PCIE5),  # RTX Blackwell whitepaper, 2025; twice that where fp16 sums
    "rtx4090": Fabric(165.2e12, _PCIE4, 12.5e9, _PCIE4),  # Ada whitepaper, 2022; twice that where fp16 sums
    "rtx3090": Fabric(71e12, _PCIE4, 12.5e9, _PCIE4),  # GA102 whitepaper, 2020; twice that where fp16 sums
    "l4": Fabric(121e12, _PCIE4, 12.5e9, _PCIE4),  # 2023: 242 with sparsity
    "a10": Fabric(125e12, _PCIE4, 12.5e9, _PCIE4),  # 2021
    "t4": Fabric(65e12, _PCIE3, 12.5e9, _PCIE3),  # 2019
}


def fabric_of(hardware: Hardware) -> Fabric | None:
    """Return what is known of a machine's GPU, by its name; None for an unknown one."""
    return next((one for name, one in FABRICS.items() if preset(name).name == hardware.name), None)


@dataclass(frozen=True)
class Forecasts:
    """Memory of one GPU that stores everything: without gradient checkpointing and with it."""

    once: MemoryPlan
    again: MemoryPlan


@dataclass(frozen=True)
class ScaleRow:
    """One engine on a number of GPUs.

    memory: bytes per GPU.
    tokens: tokens per step over all GPUs.
    compute, traffic: seconds per step.
    slowest, fastest: tokens per second if no communication overlaps with compute, and if all of it does.
    """

    gpus: int
    engine: Engine
    memory: int
    fits: bool
    checkpointing: bool
    tokens: int
    compute: float
    traffic: float

    @property
    def slowest(self) -> float:
        return self.tokens / (self.compute + self.traffic)

    @property
    def fastest(self) -> float:
        return self.tokens / max(self.compute, self.traffic)


def scale_rows(
    model: ModelFacts,
    plan: RunPlan,
    forecasts: Mapping[Engine, Forecasts],
    *,
    length: int,
    accumulation: int,
    machine: Hardware,
) -> Iterator[ScaleRow]:
    """Yield every engine on every count of GPUs.

    plan: plan of one GPU with unlimited memory.
    forecasts: with the fast paths that each engine supports.
    length: tokens per example.
    accumulation: micro-batches per GPU and step.
    machine: one GPU.

    Raises InputError for a machine with unknown links, and for products in fp32, whose rates are not in the table.
    """
    fabric = fabric_of(machine)
    if fabric is None:
        what = f"the links of {machine.name} are unknown"
        raise InputError(Fault("--hardware", what, f"choose {', '.join(FABRICS)}", code="SF-USE-FLAG"))
    if plan.precision.compute.value == "fp32":
        fix = f"set precision={'bf16' if machine.bf16 else 'fp16'}"
        raise InputError(Fault("precision", "--scale knows the rates of 16-bit products only", fix, code="SF-USE-FLAG"))
    examples = plan.batch.micro.value * accumulation
    work = work_of([length] * examples, supervised=length * examples)
    for gpus in COUNTS:
        for engine in ENGINES:
            if gpus == 1 and engine != "ddp":
                continue
            found = forecasts[engine]
            needs = [held(one, plan, model, engine, gpus) for one in (found.once, found.again)]
            again = needs[0] > usable(machine.memory)
            flops = step_flops(model, work, plan.adapter, checkpointed=float(again), pruned=False)
            sent = sent_bytes(plan, engine, gpus, accumulation)
            rate = fabric.inside if gpus <= NODE else fabric.between
            yield ScaleRow(
                gpus=gpus,
                engine=engine,
                memory=needs[again],
                fits=needs[again] <= usable(machine.memory),
                checkpointing=again,
                tokens=work.tokens * gpus,
                compute=(flops.needed + flops.recomputed) / (fabric.peak * EFFICIENCY),
                traffic=sent / rate,
            )


def held(memory: MemoryPlan, plan: RunPlan, model: ModelFacts, engine: Engine, gpus: int) -> int:
    """Bytes per GPU. memory: forecast of a GPU that stores everything."""
    name, stage = ("deepspeed", 2) if engine == "zero 2" else (engine, None)
    parallel = ParallelPlan(Choice(name, "", "user"), Choice(gpus, "", "user"), stage)
    gathered = gathered_bytes(model, plan.precision, plan.adapter)
    return per_rank(memory, parallel, gathered, model.layers).total


def sent_bytes(plan: RunPlan, engine: Engine, gpus: int, accumulation: int) -> float:
    """Bytes that one GPU sends per step."""
    trained = 4 * plan.trainable
    part = (gpus - 1) / gpus
    if engine != "fsdp2":
        return 2 * part * trained
    frozen = 0 if plan.adapter is None else plan.parameters * BYTES[plan.precision.unpacked]
    return part * (2 * (frozen + trained) + trained) * accumulation
