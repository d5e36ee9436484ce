"""The plan of a run: every choice with its reason. Plain values, no torch; exact as JSON and back.

`resolve` (in `surefoot.planning.resolve`) makes a RunPlan; `models` and `training` carry it out; the run verifies it.
Type names are "fp32", "bf16", "fp16"; SDPA kernels are "flash", "mem_efficient", "math", "cudnn"; sizes are bytes.

A resumed run uses the plan that was saved, whatever this version would decide. Reading goes through pydantic, so a plan
that was edited into nonsense is refused with the place of the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from surefoot.system.errors import Fault, InputError

T = TypeVar("T")
Source = Literal["user", "family", "hardware", "measured", "default"]
DType = Literal["fp32", "bf16", "fp16"]
PackedType = Literal["nf4", "int8"]
BaseType = DType | PackedType
PACKED_BITS: dict[BaseType, int] = {"nf4": 4, "int8": 8}  # of a weight of the decoder's linear layers
SdpaKernel = Literal["flash", "mem_efficient", "cudnn", "math"]
_BEFORE = "the only one when this plan was made"
OFF = "off"
OWN_DROPOUT = "own"  # as the model's config.json says
Dropout = float | Literal["own"]


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value, why it was chosen, and who decided: user / family / hardware / measured / default."""

    value: T
    reason: str
    source: Source


@dataclass(frozen=True)
class PrecisionPlan:
    compute: Choice[DType]  # matrix products, by autocast where it differs from the weights
    base: Choice[BaseType]  # how frozen weights are held; fp32 when they train
    trainable: Choice[DType]  # always fp32
    scaler: Choice[bool]  # gradient scaler: only with fp16 compute
    tf32: Choice[bool]
    # off | int4 | int8-int4 | int8: what the decoder's linear layers are rounded to in training and converted to.
    qat: Choice[str] = Choice(OFF, _BEFORE, "default")
    qat_group: int | None = None  # weights of a row that share a scale; None: all of it

    @property
    def packed(self) -> PackedType | None:
        """In what the base's linear layers are quantised; None where they are not."""
        return self.base.value if self.base.value == "nf4" or self.base.value == "int8" else None

    @property
    def unpacked(self) -> DType:
        """Of frozen weights that are not quantised: embeddings, head, norms; of all where nothing is."""
        value = self.base.value
        return self.compute.value if value == "nf4" or value == "int8" else value


@dataclass(frozen=True)
class AttentionPlan:
    implementation: Choice[str]  # eager | sdpa | flash_attention_2
    kernels: Choice[tuple[SdpaKernel, ...]]  # what torch may dispatch to; empty for other implementations
    expected: Choice[
        str
    ]  # the kernel that the run must be seen to use; the implementation itself outside SDPA; none without attention


@dataclass(frozen=True)
class TokenizerPlan:
    pad_token: Choice[str]
    pad_id: int
    added_rows: int  # embedding rows appended (only with tokenizer.pad: add)
    bos: Choice[bool]  # prepend BOS exactly once
    bos_id: int | None
    stop: Choice[tuple[int, ...]]  # tokens that end an answer, EOS first
    template: Choice[str]  # a name of families.templates, or a .jinja file
    max_length: Choice[int]  # tokens of the longest example
    # Templates that `auto` takes instead, in this order, where records hold what the one above cannot write.
    fallbacks: tuple[str, ...] = ()
    dialogues: str = (
        ""  # where the training records are texts, and `template` is theirs: what was planned for dialogues
    )
    # By what the embedding of the first token of every sequence is multiplied.
    bos_scale: Choice[float] = Choice(1.0, "as the model has it", "default")


@dataclass(frozen=True)
class AdapterPlan:
    kind: Choice[str]  # lora | dora
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    targets: Choice[tuple[str, ...]]  # full module names within the model
    modules_to_save: tuple[str, ...]
    trainable: int  # parameters
    # Full names of parameters in no linear layer: all experts of a layer in one, routers. Older plans reach none.
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class KindCoverage:
    """How much of one kind of layers learns.

    kind: see `surefoot.planning.coverage`.
    weights: that exist; a head that is tied to the embedding has none of its own.
    reached: of these, what an adapter changes, or what trains itself.
    trained: parameters that train for it: an adapter's, or its own.
    """

    kind: str
    weights: int
    reached: int
    trained: int


@dataclass(frozen=True)
class MemoryPlan:
    """Forecast of the peak in bytes, by kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    available: int
    gradient_checkpointing: Choice[bool]
    beside: int = 0  # frozen models beside the one that trains
    # Of the decoder layers, from the first on, how many are computed again, where any are. None: all of them, as in
    # plans from before there was a choice.
    recomputed: int | None = None
    # Of all these, what is not there when the rest is: logits, gradients and activations have their most at different
    # moments.
    apart: int = 0
    holes: int = 0  # that the C library's allocator leaves between blocks and does not fill again

    def layers_again(self, layers: int) -> int:
        """layers: of the model at hand."""
        if not self.gradient_checkpointing.value:
            return 0
        return layers if self.recomputed is None else min(self.recomputed, layers)

    @property
    def total(self) -> int:
        states = self.weights + self.gradients + self.optimizer + self.beside
        return states + self.activations + self.logits + self.holes - self.apart


@dataclass(frozen=True)
class BatchPlan:
    size: Choice[int]  # examples per optimizer step, over all ranks
    micro: Choice[int]  # examples per forward pass of one rank
    accumulation: int  # forward passes of each rank per step
    tokens: int | None = None  # of a micro-batch at most, but for one longer example; None: `micro` alone counts


@dataclass(frozen=True)
class RewardPlan:
    """What a reward model adds to a plan.

    loss: a key of `surefoot.method_facts.losses.REWARD_LOSSES`, or a function of the user's own.
    surplus: positions behind the end of a pair that its divergence loss counts.
    center: coefficient.
    head: zeros, or whose value head it starts from.
    head_parameters: those of the value head that train; its bias does where the loss is centered, as a difference of
        scores does not have it.
    frozen: parameters of the output head, which is of no use, in full training.
    """

    loss: Choice[str]
    num_padding_at_beginning: Choice[int]
    surplus: int
    center: float
    head: Choice[str]
    head_parameters: int
    frozen: int
    shared_prompts: Choice[bool]  # what both answers begin with goes through the model once


@dataclass(frozen=True)
class ParallelPlan:
    """The engine and its processes.

    zero_stage: of deepspeed alone.
    offload: what is kept in host memory: none, optimizer, all.
    """

    engine: Choice[str] = Choice("single", "one process", "default")  # single | ddp | fsdp2 | deepspeed
    ranks: Choice[int] = Choice(1, "no launcher", "default")
    zero_stage: int | None = None
    offload: str = "none"


PLAIN = "plain"  # of each of `KernelsPlan`: the libraries' own arithmetic, and padded rows


@dataclass(frozen=True)
class KernelsPlan:
    """Arithmetic of surefoot's own in place of the libraries'. Plans from before there was a choice have the plain
    path."""

    adapter: Choice[str] = Choice(PLAIN, _BEFORE, "default")  # plain | fast
    loss: Choice[str] = Choice(PLAIN, _BEFORE, "default")  # plain | chunked
    last_block: Choice[str] = Choice(PLAIN, _BEFORE, "default")  # plain | pruned
    pointwise: Choice[str] = Choice(PLAIN, _BEFORE, "default")  # plain | fused
    # plain: padded rows. Or how the documents of a packed row are kept apart: matmul | sdpa | varlen.
    documents: Choice[str] = Choice(PLAIN, _BEFORE, "default")


@dataclass(frozen=True)
class PpoPlan:
    """Each part is an adapter on a trunk, such a trunk without its adapter (adapter-off), or a model of its own; scores
    may come from outside.

    critic_parameters: of the critic, that train besides its value head.
    critic_adapter: that is put in for it; None where it has one, as a copy of the policy's or one that was saved, or
        none.
    critic_head: of its value head; None where what trains was not counted before.
    """

    actor: Choice[str]
    critic: Choice[str]
    reference: Choice[str]
    reward: Choice[str]
    critic_parameters: int
    critic_adapter: AdapterPlan | None = None
    critic_head: int | None = None


@dataclass(frozen=True)
class EnvironmentFinding:
    """An environment variable that matters, or that people believe to matter."""

    name: str
    value: str
    effect: str  # what it does to this run, or "nothing reads this name"
    verdict: Literal["used", "overridden", "ignored"]


@dataclass(frozen=True)
class Origin:
    """said: keys that words of its user decide; all others are the tool's defaults."""

    tool: str
    said: tuple[str, ...]


@dataclass(frozen=True)
class RunPlan:
    device: Choice[str]  # cpu | cuda | mps
    precision: PrecisionPlan
    attention: AttentionPlan
    tokenizer: TokenizerPlan
    adapter: AdapterPlan | None  # None: full fine-tuning
    memory: MemoryPlan
    batch: BatchPlan
    compile: Choice[str]
    threads: Choice[int]
    trainable: int  # parameters that the optimizer moves
    parameters: int  # all parameters, tied ones once
    environment: tuple[EnvironmentFinding, ...]
    cautions: tuple[str, ...]  # sentences the user should read
    measurements: dict[str, object]  # what the probes saw; kept so that a resumed run never measures again
    # Plans that were saved before there was a choice have no such entry.
    optimizer: Choice[str] = Choice("adamw", _BEFORE, "default")
    report_to: Choice[tuple[str, ...]] = Choice((), "no tracker is asked for", "default")
    parallel: ParallelPlan = ParallelPlan()
    reward: RewardPlan | None = None  # of stage reward
    reference: Choice[str] | None = None  # of stages dpo and kto
    ppo: PpoPlan | None = None  # of stage ppo
    dropout: Choice[Dropout] | None = None  # of the model's own layers; None: made before there was the choice
    kernels: KernelsPlan = KernelsPlan()
    balance: Choice[float] | None = None  # coefficient of a mixture's load-balancing loss; None: it has no experts
    coverage: tuple[KindCoverage, ...] = ()  # of the language model, kind by kind; () in plans from before it was told
    vision: tuple[str, ...] = ()  # parts that train besides the language model: tower, projector
    origin: Origin | None = None  # of a config that was another tool's

    @property
    def with_adapter(self) -> int:
        """All parameters and what an adapter adds. As PEFT counts, a module that trains in full is a copy beside it."""
        return self.parameters + (self.trainable if self.adapter else 0)


_PLAN = TypeAdapter(RunPlan)


@dataclass(frozen=True)
class Difference:
    """One value that differs between two plans or records. path: dotted, such as "batch.micro.value"."""

    path: str
    old: Any
    new: Any


def plan_to_json(plan: RunPlan) -> dict[str, Any]:
    """Plain lists, dicts, strings and numbers, in the order of the fields."""
    return _PLAN.dump_python(plan, mode="json")


def plan_from_json(data: object) -> RunPlan:
    """The inverse of `plan_to_json`, for whatever JSON holds. Raises InputError for anything that is not a plan."""
    try:
        return _PLAN.validate_python(data)
    except ValidationError as error:
        fix = "it was written by another version or edited"
        raise InputError(
            [Fault(_where(item["loc"]), item["msg"], fix, code="SF-CONFIG-CONFLICT") for item in error.errors()]
        ) from None


def _where(location: tuple[int | str, ...]) -> str:
    return f"plan: {'.'.join(map(str, location))}" if location else "plan"


def diff_plans(old: RunPlan, new: RunPlan) -> list[Difference]:
    """Values that differ, in the order of the fields. Reasons, cautions, measurements, whose words it was and what
    follows from the rest (coverage) are not compared."""
    return diff_values(_decisions(old), _decisions(new))


def diff_values(old: Any, new: Any) -> list[Difference]:
    """Values that differ between two trees of dicts, in their order; None where a key is absent. Of a choice, its value
    alone counts: "reason" and "source" are not compared."""
    return list(_diff("", old, new))


def _decisions(plan: RunPlan) -> dict[str, Any]:
    values = asdict(plan)
    del values["measurements"], values["cautions"], values["origin"], values["coverage"]
    return values


def _diff(path: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key not in ("reason", "source"):
                yield from _diff(f"{path}.{key}".lstrip("."), old.get(key), new.get(key))
    elif old != new:
        yield Difference(path, old, new)
