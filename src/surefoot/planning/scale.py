"""What many GPUs would cost and bring, on paper: memory of each, bytes that travel, time of a step.

A model of memory and communication and no measurement; its assumptions are named here, so that they can be doubted.
With n GPUs, W bytes of weights and T of gradients (fp32), each sends:

    ddp      2 (n-1)/n T a step: one all-reduce of the gradients. Everything is held by each.
    zero 2   2 (n-1)/n T a step: reduce-scatter of the gradients, all-gather of what they moved. Gradients and moments
             are held by n-ths.
    fsdp2    (n-1)/n (2 W + T) a micro-batch: all-gather of the weights before the forward and again before the backward
             pass, reduce-scatter of the gradients. Everything is held by n-ths, but for two layers at a time.

Rings of this kind are described in Thakur et al. 2005, the sharding in Rajbhandari et al. 2020 (ZeRO) and Zhao et al.
2023 (FSDP). Traffic runs at the slowest link on its way: within a node of eight GPUs, or between nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from surefoot.families.model_facts import ModelFacts
from surefoot.planning.limits import step_flops, work_of
from surefoot.planning.memory import usable
from surefoot.planning.plan import MemoryPlan, RunPlan
from surefoot.planning.workload import BYTES
from surefoot.system.errors import Fault, InputError

Engine = Literal["ddp", "zero 2", "fsdp2"]
ENGINES: tuple[Engine, ...] = ("ddp", "zero 2", "fsdp2")
COUNTS = (1, 8, 64, 512)
NODE = 8  # GPUs that share the fast links
_EFFICIENCY = 0.4  # of the datasheet's rate; long runs on such models are reported at 0.35 to 0.5
_GATHERED = 2  # layers that FSDP holds whole at a time: the one at work and the one that is fetched ahead


@dataclass(frozen=True)
class Fabric:
    """Arithmetic and links of a kind of GPU.

    peak: of dense bf16 products, operations per second.
    inside, between: bytes per second and GPU in one direction, within a node and between nodes (one adapter per GPU).
    """

    peak: float
    inside: float
    between: float


# From the makers' datasheets: NVLink 4 has 900 GB/s and NVLink 3 600 GB/s in both directions; nets of 400, 200 Gbit/s.
FABRICS = {
    "h100": Fabric(989e12, 450e9, 50e9),
    "h200": Fabric(989e12, 450e9, 50e9),
    "a100": Fabric(312e12, 300e9, 25e9),
}


@dataclass(frozen=True)
class Forecasts:
    """Of one GPU that holds everything: without gradient checkpointing and with it."""

    once: MemoryPlan
    again: MemoryPlan


@dataclass(frozen=True)
class ScaleRow:
    """One engine on so many GPUs.

    memory: bytes of each.
    tokens: of a step, over all.
    compute, traffic: seconds of a step. slowest, fastest: tokens per second if no traffic hides behind compute, and if
        all does that can.
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
    name: str,
    memory: int,
) -> Iterator[ScaleRow]:
    """Every engine on every count of GPUs.

    plan: of one GPU without a limit of memory.
    forecasts: with the paths that each engine can take.
    length: tokens of an example.
    accumulation: micro-batches of each GPU per step.
    name: of the GPU.
    memory: bytes of one.

    Raises InputError for a machine whose links are not known.
    """
    fabric = FABRICS.get(name)
    if fabric is None:
        raise InputError(
            Fault(
                "--hardware", f"the links of {name} are not known", f"choose {', '.join(FABRICS)}", code="SF-USE-FLAG"
            )
        )
    examples = plan.batch.micro.value * accumulation
    work = work_of([length] * examples, supervised=length * examples)
    for gpus in COUNTS:
        for engine in ENGINES:
            if gpus == 1 and engine != "ddp":
                continue
            found = forecasts[engine]
            needs = [held(one, plan, model, engine, gpus) for one in (found.once, found.again)]
            again = needs[0] > usable(memory)
            flops = step_flops(model, work, plan.adapter, checkpointed=float(again), pruned=False)
            sent = sent_bytes(plan, engine, gpus, accumulation)
            rate = fabric.inside if gpus <= NODE else fabric.between
            yield ScaleRow(
                gpus=gpus,
                engine=engine,
                memory=needs[again],
                fits=needs[again] <= usable(memory),
                checkpointing=again,
                tokens=work.tokens * gpus,
                compute=(flops.needed + flops.recomputed) / (fabric.peak * _EFFICIENCY),
                traffic=sent / rate,
            )


def held(memory: MemoryPlan, plan: RunPlan, model: ModelFacts, engine: Engine, gpus: int) -> int:
    """Bytes of one GPU. memory: of a GPU that holds everything."""
    passing = memory.activations + memory.logits
    if engine == "ddp":
        return memory.total
    states = (memory.gradients + memory.optimizer) // gpus
    if engine == "zero 2":
        return memory.weights + states + passing
    layers = sum(module.parameters for module in model.modules if module.in_layer)
    share = layers / model.layers / plan.parameters
    return memory.weights // gpus + states + passing + int(_GATHERED * share * memory.weights)


def sent_bytes(plan: RunPlan, engine: Engine, gpus: int, accumulation: int) -> float:
    """That one GPU sends per step."""
    trained = 4 * plan.trainable
    part = (gpus - 1) / gpus
    if engine != "fsdp2":
        return 2 * part * trained
    frozen = 0 if plan.adapter is None else plan.parameters * BYTES[plan.precision.unpacked]
    return part * (2 * (frozen + trained) + trained) * accumulation
