"""The plan of a run: every choice with its reason. Plain values without torch; exact as JSON and back.

`resolve` (in `surefoot.planning.resolve`) makes a RunPlan; `models` and `training` carry it out; the run verifies it.
Dtypes are "fp32", "bf16", "fp16"; SDPA kernels are "flash", "mem_efficient", "math", "cudnn"; sizes are bytes.

A resumed run uses its saved plan, whatever this version would decide. Plans are read with pydantic, so an invalid edit
is refused with its location.
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
PACKED_BITS: dict[BaseType, int] = {"nf4": 4, "int8": 8}  # bits per weight of the decoder's linear layers
QAT_BLOCKS = {"nvfp4": 16, "mxfp4": 32}  # numbers that share a scale, of what rounds weights and activations to floats
SdpaKernel = Literal["flash", "mem_efficient", "cudnn", "math"]
_BEFORE = "the only option when this plan was made"
OFF = "off"
OWN_DROPOUT = "own"  # as in the model's config.json
Dropout = float | Literal["own"]


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value, the reason for it, and what decided: user / family / hardware / measured / default."""

    value: T
    reason: str
    source: Source


@dataclass(frozen=True)
class PrecisionPlan:
    compute: Choice[DType]  # dtype of matrix products, by autocast if it differs from the weights
    base: Choice[BaseType]  # dtype of frozen weights; fp32 if they are trained
    trainable: Choice[DType]  # always fp32
    scaler: Choice[bool]  # gradient scaler: only with fp16 compute
    tf32: Choice[bool]
    # off | int4 | int8-int4 | int8 | nvfp4 | mxfp4: fake quantization of the decoder's linear layers in training, and
    # their published type.
    qat: Choice[str] = Choice(OFF, _BEFORE, "default")
    qat_group: int | None = None  # weights that share a scale; None: a whole row
    qat_after: int = 0  # steps before the first that rounds

    @property
    def packed(self) -> PackedType | None:
        """Quantized type of the base's linear layers; None if they are not quantized."""
        return self.base.value if self.base.value == "nf4" or self.base.value == "int8" else None

    @property
    def unpacked(self) -> DType:
        """Dtype of the frozen weights that are not quantized: embeddings, head and norms, or all."""
        value = self.base.value
        return self.compute.value if value == "nf4" or value == "int8" else value


@dataclass(frozen=True)
class AttentionPlan:
    implementation: Choice[str]  # eager | sdpa | flash_attention_2
    kernels: Choice[tuple[SdpaKernel, ...]]  # SDPA kernels torch may dispatch to; empty for other implementations
    expected: Choice[
        str
    ]  # the kernel that the run must use; the implementation's name outside SDPA; "none" without attention
    # Whether its gradients are the same each time. Older plans did not ask.
    deterministic: Choice[bool] = Choice(False, "not asked when this was planned", "default")


NONE_ADDED: Choice[tuple[str, ...]] = Choice((), "none", "default")


@dataclass(frozen=True)
class TokenizerPlan:
    pad_token: Choice[str]
    pad_id: int
    added_rows: int  # embedding rows appended, for tokenizer.add and add_special and for tokenizer.pad: add
    bos: Choice[bool]  # prepend BOS exactly once
    bos_id: int | None
    stop: Choice[tuple[int, ...]]  # tokens that end an answer, EOS first
    template: Choice[str]  # name in families.templates, or a .jinja file
    max_length: Choice[int]  # tokens of the longest example
    # Templates that `auto` tries in this order if the one above cannot render a record.
    fallbacks: tuple[str, ...] = ()
    dialogues: str = ""  # if the training records are plain texts: the template that was planned for dialogues
    # Factor of the embedding of the first token of every sequence.
    bos_scale: Choice[float] = Choice(1.0, "unchanged", "default")
    added: Choice[tuple[str, ...]] = NONE_ADDED  # tokens added to the tokenizer
    added_ids: tuple[int, ...] = ()
    added_special: tuple[str, ...] = ()  # those of them that are control tokens

    @property
    def rows(self) -> int | None:
        """Rows of the embedding with the appended ones; None if none are."""
        return max((self.pad_id, *self.added_ids)) + 1 if self.added_rows else None


ZERO = "zero"  # value of adapter.start


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
    # Full names of adapted parameters outside linear layers: stacked experts, routers. Empty in older plans.
    parameters: tuple[str, ...] = ()
    start: str = ZERO  # or PEFT's word for how A and B start from the base's weights


@dataclass(frozen=True)
class KindCoverage:
    """Coverage of one kind of layers.

    kind: see `surefoot.planning.coverage`.
    weights: number of weights; a tied head has none.
    reached: weights that an adapter changes, or that are trained themselves.
    trained: parameters trained for them: the adapter's, or the weights.
    """

    kind: str
    weights: int
    reached: int
    trained: int


@dataclass(frozen=True)
class MemoryPlan:
    """Forecast of peak memory in bytes, by kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    available: int
    gradient_checkpointing: Choice[bool]
    beside: int = 0  # frozen models besides the trained one
    # Number of decoder layers with gradient checkpointing, from the first on, if it is on. None: all of them, also in
    # older plans.
    recomputed: int | None = None
    # To subtract from the sum of the parts: logits, gradients and activations do not reach their maximum at the same
    # time.
    apart: int = 0
    cast: int = 0  # part of `weights`: copies in the dtype of the products
    gathered: int = 0  # weights and gradients that a rank has whole for a moment where an engine shards the weights
    holes: int = 0  # fragmentation of the C library's heap
    ahead: int = 0  # what `grpo.ahead` keeps, where the device has no memory of its own
    drawn: int = 0  # answers that are drawn at once; 0: none, also in older plans
    drawing: int = 0  # what drawing them takes beyond an update
    host: int = 0  # bytes of one rank in host memory, not in the total: `ParallelPlan.offload`, and `host_ahead`
    host_ahead: int = 0  # what `grpo.ahead` keeps, otherwise
    host_available: int | None = None  # host memory of one rank; None: unknown, or a plan for a CPU

    def layers_again(self, layers: int) -> int:
        """Number of layers with gradient checkpointing. layers: number of layers of the model."""
        if not self.gradient_checkpointing.value:
            return 0
        return layers if self.recomputed is None else min(self.recomputed, layers)

    @property
    def total(self) -> int:
        states = self.weights + self.gathered + self.gradients + self.optimizer + self.beside + self.ahead
        return states + self.activations + self.logits + self.holes - self.apart + self.drawing


@dataclass(frozen=True)
class BatchPlan:
    size: Choice[int]  # examples per optimizer step, over all ranks
    micro: Choice[int]  # examples per forward pass of one rank
    accumulation: int  # forward passes of each rank per step
    tokens: int | None = None  # maximum per micro-batch, except for one longer example; None: limited by `micro` only


@dataclass(frozen=True)
class RewardPlan:
    """Plan of a reward model.

    loss: a key of `surefoot.method_facts.losses.REWARD_LOSSES`, or a user's function.
    surplus: positions after the end of a pair that its divergence loss counts.
    center: coefficient of the centering term.
    head: zeros, or the model whose value head it starts from.
    head_parameters: trained parameters of the value head; its bias is only trained if the loss is centered, because it
        cancels in a difference of scores.
    frozen: parameters of the unused output head, in full training.
    """

    loss: Choice[str]
    num_padding_at_beginning: Choice[int]
    surplus: int
    center: float
    head: Choice[str]
    head_parameters: int
    frozen: int
    shared_prompts: Choice[bool]  # whether the common prefix of a pair is computed once


@dataclass(frozen=True)
class ParallelPlan:
    """The engine and its processes.

    zero_stage: for deepspeed only.
    offload: what is kept in host memory: none, optimizer, all.
    """

    engine: Choice[str] = Choice("single", "one process", "default")  # single | ddp | fsdp2 | deepspeed
    ranks: Choice[int] = Choice(1, "no launcher", "default")
    zero_stage: int | None = None
    offload: str = "none"


PLAIN = "plain"  # in each field of `KernelsPlan`: the libraries' code, and padded rows
NONE = "none"  # the attention kernel of a model without attention


@dataclass(frozen=True)
class KernelsPlan:
    """surefoot's own kernels, where used instead of the libraries' code. Older plans without this entry are all
    plain."""

    adapter: Choice[str] = Choice(PLAIN, _BEFORE, "default")  # plain | fast
    loss: Choice[str] = Choice(PLAIN, _BEFORE, "default")  # plain | chunked
    last_block: Choice[str] = Choice(PLAIN, _BEFORE, "default")  # plain | pruned
    pointwise: Choice[str] = Choice(PLAIN, _BEFORE, "default")  # plain | fused
    rotary: Choice[str] = Choice(PLAIN, _BEFORE, "default")  # plain | fused; on a CPU pointwise includes it
    gated: Choice[str] = Choice(PLAIN, _BEFORE, "default")  # plain | fused
    # plain: padded rows. Otherwise the attention over packed rows: a form of `surefoot.planning.packing`.
    documents: Choice[str] = Choice(PLAIN, _BEFORE, "default")


@dataclass(frozen=True)
class PpoPlan:
    """Plan of PPO's models. Each is an adapter on a shared base (trunk), the trunk without its adapter (adapter-off),
    or a separate model; scores may also come from outside.

    critic_parameters: trained parameters of the critic, without its value head.
    critic_adapter: adapter to add for the critic; None if it has one (a copy of the policy's, or a saved one), or is a
        full model.
    critic_head: parameters of its value head; None in plans without an exact count.
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
    """An environment variable that matters, or is believed to."""

    name: str
    value: str
    effect: str  # what it does to this run, or "nothing reads this name"
    verdict: Literal["used", "overridden", "ignored"]


@dataclass(frozen=True)
class Origin:
    """Another tool's config that the run's was translated from. said: keys that the user set; others are its
    defaults."""

    tool: str
    said: tuple[str, ...]


NO_RATES = Choice("", "all weights have optim.lr", "default")


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
    trainable: int  # number of trained parameters
    parameters: int  # all parameters, tied ones once
    environment: tuple[EnvironmentFinding, ...]
    cautions: tuple[str, ...]  # sentences the user should read
    measurements: dict[str, object]  # results of the probes; kept so that a resumed run never measures again
    # Older plans lack the entries below.
    optimizer: Choice[str] = Choice("adamw", _BEFORE, "default")
    rates: Choice[str] = NO_RATES  # of parts of the weights
    report_to: Choice[tuple[str, ...]] = Choice((), "no tracker is configured", "default")
    parallel: ParallelPlan = ParallelPlan()
    reward: RewardPlan | None = None  # of stage reward
    reference: Choice[str] | None = None  # of stages dpo and kto
    ppo: PpoPlan | None = None  # of stage ppo
    # Of stage grpo, in the order of `GrpoConfig.reward_models`: adapter, adapter-off or model, as in `PpoPlan`.
    reward_models: tuple[Choice[str], ...] = ()
    teacher: Choice[str] | None = None  # of stage distill
    dropout: Choice[Dropout] | None = None  # of the model's own layers; None in older plans
    kernels: KernelsPlan = KernelsPlan()
    balance: Choice[float] | None = None  # coefficient of a mixture's load-balancing loss; None without experts
    coverage: tuple[KindCoverage, ...] = ()  # of the language model, by kind; () in older plans
    vision: tuple[str, ...] = ()  # trained parts besides the language model: tower, projector
    trained: tuple[str, ...] = ()  # patterns of the modules that train in full fine-tuning; empty: all
    origin: Origin | None = None  # if the config was translated from another tool's

    @property
    def with_adapter(self) -> int:
        """Parameters of the model with its adapter. As in PEFT, a module trained in full is an additional copy."""
        return self.parameters + (self.trainable if self.adapter else 0)


_PLAN = TypeAdapter(RunPlan)


@dataclass(frozen=True)
class Difference:
    """One value that differs between two plans or records. path: dotted path, such as "batch.micro.value"."""

    path: str
    old: Any
    new: Any


def plan_to_json(plan: RunPlan) -> dict[str, Any]:
    """Plain lists, dicts, strings and numbers, in the order of the fields."""
    return _PLAN.dump_python(plan, mode="json")


def plan_from_json(data: object) -> RunPlan:
    """Inverse of `plan_to_json`. Raises InputError for anything that is not a plan."""
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
    """Return the values that differ, in field order. Reasons, cautions, measurements, the origin and what follows from
    the rest (coverage) are not compared."""
    return diff_values(_decisions(old), _decisions(new))


def diff_values(old: Any, new: Any) -> list[Difference]:
    """Return the values that differ between two trees of dicts, in order; None for an absent key. Of a choice only the
    value is compared, not "reason" and "source"."""
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
