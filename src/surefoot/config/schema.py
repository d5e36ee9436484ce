"""Every knob of a run, typed. Attribute path = YAML path = override path.

The classes hold data and field-local checks only; rules that need the model, the data or the machine live in
`surefoot.planning`. The text under each field is what `surefoot explain KEY` prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_serializer

from surefoot.config.methods import AlignmentConfig, GrpoConfig, PpoConfig, RewardConfig
from surefoot.config.sections import AdapterShape, DataFormat, Sources, plain_sources
from surefoot.config.types import (
    CompileMode,
    Count,
    Duration,
    Flag,
    NonNegative,
    Number,
    Positive,
    Section,
    Share,
    ShortForm,
    Switch,
    Text,
)
from surefoot.method_facts.losses import NO_REFERENCE, LossFacts, own_pair_loss
from surefoot.method_facts.methods import METHODS, MethodFacts

if TYPE_CHECKING:
    Method = str
else:  # the rows are the one list of names; a type checker wants constants
    Method = Literal[tuple(METHODS)]

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class ModelConfig(Section):
    path: Annotated[Text, Field(examples=["meta-llama/Llama-3.1-8B"])]
    """Folder with config.json, weights (safetensors) and tokenizer, or a hub id such as meta-llama/Llama-3.1-8B."""
    revision: Annotated[Text | None, Field(examples=["main"])] = None
    """Branch, tag or commit of a hub model; leave out for a local folder."""
    dropout: Annotated[Literal["own"] | Share | None, Field(examples=[0.0])] = None
    """Dropout of the model's own layers while it trains. own: as its config.json says. null: own in stages sft and
    pretrain, 0 in the others, which compare log-probabilities or scores. The published config.json keeps what it
    had."""
    router_aux_loss_coef: Annotated[Literal["auto"] | NonNegative, Field(examples=[0.001])] = "auto"
    """Mixtures of experts: by what their load-balancing loss, over all tokens of a step, is multiplied before it is
    added. auto: as config.json says, which is 0 unless its output_router_logits is true. It is logged apart, as
    aux_loss; where a step has several micro-batches, it costs one more forward pass."""


class TokenizerConfig(Section):
    pad: Text = "auto"
    """auto: the tokenizer's own pad, a reserved one, a spare embedding row, or EOS (masked by position), in this order.
    add: append <|pad|> and an embedding row. Anything else names an existing token."""


class AdapterConfig(AdapterShape):
    publish: Literal["adapter", "merged"] = "adapter"
    """What the run folder holds at the end: the adapter, or the whole model with the adapter merged into its weights.
    Checkpoints hold the adapter either way."""


class DataConfig(Section):
    train: Annotated[Sources, Field(examples=["data/train.jsonl"])]
    """Training examples: a file (.json, .jsonl, .csv, .tsv, .parquet, .txt), a folder, a hub data set, or a list of
    sources, each a path or {path: …, format: …, columns: …, weight: …}."""
    eval: Annotated[
        Literal["none"] | Sources | Count | Annotated[float, Field(gt=0, lt=1), Number], Field(examples=[0.05])
    ] = "none"
    """none; a source as in train; a share between 0 and 1 or a count of the training records, split off by the
    seed."""
    format: DataFormat = "auto"
    """Layout of the records of every source that names none; auto recognises it and says what it saw. custom: a Python
    caller passes the function that reads a record."""
    template: Text = "auto"
    """auto: the tokenizer's chat template, else alpaca, or vicuna for dialogues. Or tokenizer, llama3, llama2, phi3,
    qwen, qwen3, mistral, gemma, deepseek, chatml, alpaca, vicuna, human-assistant, zephyr, plain, raw, commonsense,
    commonsense-eval, commonsense-sentence, or a .jinja file. by-record: what the first record is: raw for texts
    (human-assistant for pairs of such dialogues), tokenizer for conversations. tokenizer-or-chatml: that name where
    the tokenizer brings no template."""
    max_length: Annotated[Literal["auto", "model"] | Annotated[int, Field(ge=8), Number], Field(examples=[2048])] = (
        "auto"
    )
    """Longest example in tokens; a longer one loses prompt tokens first, but for a quarter of the room, then the end of
    its answer. auto: 2048, or all positions of a model that has fewer. model: all positions."""
    max_samples: Annotated[Count | None, Field(examples=[1000])] = None
    """Use only the first N records of every training source that sets no max_samples itself."""
    train_on: Literal["responses", "last", "completion", "everything", "by-record"] = "responses"
    """Which tokens carry loss: every answer, the last answer, all that follows the first prompt, or all of them.
    by-record: completion where the first record has a prompt, else everything."""
    encoding: Literal["parts", "whole"] = "parts"
    """parts: an answer is a text of its own for the tokenizer, as when a model writes it. whole: prompt and answer are
    encoded in one go, and what is too long loses its end, as in TRL."""
    packing: Switch = "auto"
    """Stages sft and pretrain: the examples of a micro-batch go through the model as one row without padding, none
    seeing another. auto: where a form of attention passes the accuracy check and saves time here. off: padded rows of
    like lengths. Which examples make a step is the same either way."""
    max_pixels: Annotated[Count | None, Field(examples=[262144])] = None
    """Most pixels of a picture that the model sees: larger ones are made smaller, and so take fewer tokens. null: as
    the model's processor has it."""
    workers: Annotated[int, Field(ge=0), Number] = 0
    """Threads that prepare the batches of coming steps; 0 prepares each when its step begins. Changes no number."""

    @field_serializer("train", "eval", when_used="json")
    def _short(self, value: Any) -> Any:
        return plain_sources(value) if isinstance(value, tuple) else value


QUANTISED = ("nf4", "int8")
"""Of precision.base: what holds the decoder's linear layers in less than 16 bits."""


QAT_STAGES = ("sft", "pretrain", "dpo")


class VisionConfig(Section):
    tower: Literal["frozen", "trained"] = "frozen"
    """The vision tower, which turns pictures into features: as it was, or all of it trained, beside an adapter too."""
    projector: Literal["frozen", "trained"] = "frozen"
    """What maps the tower's features to the language model's width, in the same way."""


class PrecisionConfig(Section):
    compute: Annotated[Literal["auto", "fp32", "bf16", "fp16"], Field(examples=["bf16"])] = "auto"
    """Type of the matrix products. Trainable parameters are always fp32."""
    base: Literal["auto", "fp32", "bf16", "fp16", "nf4", "int8"] = "auto"
    """Type in which a frozen base is held; fp32 in full fine-tuning. nf4 and int8: 4 and 8 bits per weight through
    bitsandbytes (QLoRA)."""
    qat: Literal["off", "int4", "int8-int4", "int8"] = "off"
    """Quantisation-aware training by torchao: in each pass the decoder's linear layers compute with weights rounded as
    conversion will round them. int4: weights in groups. int8-int4: that, and activations in int8, a scale for each
    token. int8: weights, a scale for each row. What is published is converted, and its loss compared."""
    qat_group_size: Annotated[int, Field(ge=8), Number] = 32
    """qat int4 and int8-int4: weights of a row that share a scale."""
    tf32: Switch = "auto"
    """TF32 for the remaining fp32 products on Ampere or newer GPUs."""


class AttentionConfig(Section):
    implementation: Annotated[Literal["auto", "eager", "sdpa", "flash_attention_2"], Field(examples=["sdpa"])] = "auto"
    """Which attention code runs; auto takes the fastest that passes the accuracy check on this machine."""
    flash: Switch = "auto"
    """SDPA's flash kernel."""
    mem_efficient: Switch = "auto"
    """SDPA's memory-efficient kernel."""
    cudnn: Switch = "auto"
    """SDPA's cuDNN kernel; off in training unless it passes (PyTorch issue 196678)."""
    math: Switch = "auto"
    """SDPA's plain kernel."""


class KernelsConfig(Section):
    adapter: Literal["auto", "plain", "fast"] = "auto"
    """LoRA's and DoRA's forward and backward pass. plain: PEFT's. fast: surefoot's own, the same up to rounding. auto:
    fast where it can run, unless it differs on the run's own weights."""
    loss: Literal["auto", "plain", "chunked"] = "auto"
    """Output head and cross entropy. plain: logits of all supervised positions at once. chunked: of some at a time,
    with the gradient formed in the forward pass, so that memory does not grow with positions times vocabulary. auto:
    chunked where it can run, unless it differs on the run's own weights."""
    last_block: Literal["auto", "plain", "pruned"] = "auto"
    """Last decoder layer behind its attention. plain: all positions. pruned: those alone that the loss reads. auto:
    pruned where it can run, unless it differs on the run's own weights."""
    pointwise: Literal["auto", "plain", "fused"] = "auto"
    """RMSNorms and rotary positions. plain: the model's own, operator by operator. fused: surefoot's own, on a CPU, a
    few rows at a time, so that they stay in the cache; less is kept for the backward pass. auto: fused where it was
    measured to be faster on this machine, unless it differs on the run's own weights."""


class BatchConfig(Section):
    size: Count = 16
    """Examples per optimizer step, over all micro-batches and ranks."""
    micro: Annotated[Literal["auto"] | Count, Field(examples=[4])] = "auto"
    """Examples per forward pass; auto takes the most that the memory plan allows. Changes the result by rounding only,
    and with dropout by the masks, which are drawn for each forward pass."""


class OptimConfig(Section):
    name: Literal["adamw", "adamw_8bit", "adafactor", "sgd", "muon"] = "adamw"
    """adamw; adamw_8bit: moments in 8 bits (bitsandbytes); adafactor: factored second moment; sgd; muon: orthogonalised
    momentum for matrices, AdamW for the rest."""
    lr: Positive = 2e-4
    """Highest learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after warm-up. wsd: constant, then linear decay over the last `decay` share."""
    warmup: Share | Duration = 0.03
    """Share of all steps (0.03), or a length (100 steps), with linearly rising rate."""
    warmup_from_zero: Flag = False
    """Begin the warm-up at rate 0, as transformers' schedules do: its first step moves nothing, and a share of steps is
    rounded up."""
    decay: Annotated[float, Field(gt=0, le=1), Number] = 0.1
    """wsd only: share of all steps in the final decay."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    momentum: Annotated[Share | None, Field(examples=[0.9])] = None
    """sgd and muon: decay rate of the momentum; null: 0 for sgd, 0.95 for muon."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (sgd adds it to the gradient); biases and norms are left out."""
    max_grad_norm: Positive | None = 1.0
    """Clip the global gradient norm to this; null for no clipping."""
    neftune_alpha: Annotated[Positive | None, Field(examples=[5.0])] = None
    """NEFTune: uniform noise of size alpha / sqrt(tokens * width) on the embedding output, in training only."""


class CheckpointConfig(Section):
    every: Duration = Duration(200, "steps")
    """How often a checkpoint is written. The last step always gets one, and so does the best evaluation so far unless
    `checkpoint.best` is none."""
    keep: Count = 3
    """How many to keep, newest first, 2 at least; the best one is kept besides."""
    best: Annotated[Text, Field(examples=["exact_match"])] = "loss"
    """Which evaluation result decides the best checkpoint (its weights end up in the output folder): loss, exact_match
    or another of metrics.names (higher is better), reward_accuracy or reward_margin (stages reward, dpo and kto; higher
    is better), or none."""


class EarlyStoppingConfig(Section):
    patience: Count = 3
    """Stop after this many evaluations without improvement."""
    min_delta: NonNegative = 0.0
    """An evaluation loss must fall by more than this to count as improvement."""


class GuardConfig(Section):
    max_consecutive: Count = 3
    """Stop with exit 5 after this many non-finite steps in a row."""
    max_recent: Count = 3
    """Stop with exit 5 after more than this many non-finite steps among the last 300."""
    spikes: Literal["clip", "off"] = "clip"
    """What to do with a gradient norm that is an outlier among those of the last steps. clip: the step moves the
    weights by no more than the highest norm that would have been none."""
    rollback: Literal["on", "off"] = "off"
    """on: where non-finite steps would stop the run, go back to the last healthy checkpoint and skip the data between
    it and the last of these steps, at most twice."""


class BosConfig(Section):
    prepend: Switch | Literal["tokenizer"] = "auto"
    """Put BOS once before every example. auto: when the tokenizer has one that its family uses, or a scale asks for it.
    tokenizer: when its chat template writes one or, for texts, when it puts one there itself. EOS stands in for a BOS
    that the tokenizer does not have."""
    scale: Annotated[NonNegative, Field(examples=[0.1])] = 1.0
    """The embedding of the first token of every sequence is multiplied by this, in training and in use. 1: not at all.
    0: it begins as zeros."""


class MetricsConfig(Section):
    names: list[Text] = Field(default=[], examples=[["exact_match"]])
    """Metrics on generated answers: exact_match, or one of functions.metrics or of a Python caller."""
    examples: Annotated[Count | None, Field(examples=[200])] = None
    """Answer only the first N evaluation examples; null: all."""
    max_new_tokens: Count = 64
    """Longest answer in tokens."""


class FunctionsConfig(Section):
    loss: Annotated[Text | None, Field(examples=["focal.py:focal"])] = None
    """A loss in place of the stage's own: (model, batch) -> surefoot.LossSum. FILE.py:FUNCTION, or of an
    installed package MODULE:FUNCTION or entry_point:NAME."""
    record: Annotated[Text | None, Field(examples=["quiz.py:quiz"])] = None
    """Reads each record where data.format is custom: record -> messages or a text."""
    metrics: list[Text] = Field(default=[], examples=[["own.py:shared_words"]])
    """Metrics for metrics.names, each under its function's name: answers -> a number, higher is better."""


class TrackingConfig(Section):
    project: Text = "surefoot"
    """Project (experiment) under which trackers file the run."""
    name: Annotated[Text | None, Field(examples=["my-run"])] = None
    """Name of the run; null: that of the run folder."""
    offline: Flag = False
    """Keep W&B's data in the run folder, to be sent later with `wandb sync`; the other trackers write local files
    unless their own settings name a server."""


class SamplesConfig(Section):
    count: Annotated[int, Field(ge=0), Number] = 0
    """How many prompts of the evaluation set are answered and logged at each evaluation."""
    max_new_tokens: Count = 64
    """Longest answer in tokens."""


class ParallelConfig(Section):
    engine: Literal["auto", "single", "ddp", "fsdp2", "deepspeed"] = "auto"
    """How several processes share the work. ddp: each has the whole model. fsdp2, deepspeed: weights, gradients and
    optimizer state are shared out. auto: single in one process; in several the first of ddp and fsdp2 that fits."""
    nproc: Annotated[Count | None, Field(examples=[2])] = None
    """Processes to start on this machine; null: as many as the launcher did (torchrun, accelerate, deepspeed), or 1."""
    zero_stage: Annotated[int, Field(ge=1, le=3), Number] = 2
    """deepspeed only: what is shared out. 1: optimizer state. 2: gradients as well. 3: weights as well."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """fsdp2 and deepspeed: keep the optimizer's state in host memory, or sharded weights as well."""
    check_every: Count = 100
    """ddp: steps between two comparisons of the ranks' weights by hash."""
    timeout: Positive = 1800.0
    """Seconds that a rank waits for the others before it gives up; a rank that is dead or stopped is noticed in less
    than a minute."""


class RunConfig(Section):
    stage: Annotated[Method, Field(examples=["sft"])]
    """What to train. sft: supervised fine-tuning on answers. pretrain: every token of plain texts. reward: a score for
    answers, from pairs of a better and a worse one. dpo: the policy itself, from such pairs. kto: from answers that are
    judged good or bad. ppo: from a score of the policy's own answers. grpo: from scores of several answers to each
    prompt."""
    model: Annotated[ModelConfig, ShortForm("path"), Field(examples=["meta-llama/Llama-3.1-8B"])]
    """Base model: a folder or hub id (short for {path: …, revision: …})."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Special tokens."""
    adapter: Annotated[AdapterConfig | None, Field(examples=[{"kind": "lora", "rank": 16}])] = None
    """LoRA or DoRA; leave out for full fine-tuning."""
    vision: Annotated[VisionConfig, Field(examples=[{"projector": "trained"}])] = VisionConfig()
    """Of a model that sees: what trains besides its language model, or an adapter on that."""
    data: Annotated[DataConfig, Field(examples=[{"train": "data/train.jsonl"}])]
    """What to train and evaluate on."""
    precision: Annotated[PrecisionConfig, ShortForm("compute"), Field(examples=["bf16"])] = PrecisionConfig()
    """auto | fp32 | bf16 | fp16 | {compute: …, base: …, tf32: …}."""
    attention: Annotated[AttentionConfig, ShortForm("implementation"), Field(examples=["sdpa"])] = AttentionConfig()
    """auto | eager | sdpa | flash_attention_2 | {implementation: …, flash: …, mem_efficient: …, cudnn: …, math: …}."""
    compile: CompileMode = "off"
    """torch.compile mode of the decoder; off unless asked for."""
    kernels: KernelsConfig = KernelsConfig()
    """Faster ways to compute the same; each is held against the plain way before step 1."""
    gradient_checkpointing: Annotated[Switch | Count, Field(examples=[4])] = "auto"
    """Recompute activations in the backward pass: on: in every decoder layer; a number: in the first so many; auto: in
    as many as the memory plan needs."""
    batch: BatchConfig = BatchConfig()
    """How examples are grouped."""
    optim: Annotated[OptimConfig, Field(examples=[{"lr": 2e-4}])] = OptimConfig()
    """Optimizer and learning-rate schedule."""
    duration: Annotated[Duration, Field(examples=["3 epochs"])] = Duration(3, "epochs")
    """How long to train: N steps, epochs or tokens (real input tokens). The last short batch of an epoch is kept."""
    log_every: Count = 1
    """Log every N steps."""
    eval_every: Duration | None = Duration(200, "steps")
    """How often to evaluate (needs data.eval); null: only at the end."""
    eval_at_start: Flag = False
    """Evaluate before step 1 as well: the figures of the base model, to compare with."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save and what to keep."""
    early_stopping: Annotated[EarlyStoppingConfig | None, Field(examples=[{"patience": 3}])] = None
    """Stop when evaluation no longer improves; leave out to train to the end."""
    guard: GuardConfig = GuardConfig()
    """What to do on non-finite values."""
    bos: BosConfig = BosConfig()
    """Beginning-of-sequence token."""
    reward: RewardConfig = RewardConfig()
    """Stage reward: the loss of the reward model."""
    alignment: AlignmentConfig = AlignmentConfig()
    """Stages dpo and kto: loss and reference."""
    ppo: PpoConfig = PpoConfig()
    """Stage ppo: scores, rollouts and the constants of the method."""
    grpo: Annotated[GrpoConfig, Field(examples=[{"rewards": ["numeric"]}])] = GrpoConfig()
    """Stage grpo: rewards, rollouts and the constants of the method."""
    parallel: ParallelConfig = ParallelConfig()
    """Several processes."""
    samples: SamplesConfig = SamplesConfig()
    """Generated answers to look at during the run."""
    metrics: Annotated[MetricsConfig, Field(examples=[{"names": ["exact_match"]}])] = MetricsConfig()
    """Metrics on generated answers at each evaluation."""
    functions: Annotated[FunctionsConfig, Field(examples=[{"loss": "focal.py:focal"}])] = FunctionsConfig()
    """Functions of your own: a loss, a record reader, metrics (docs/python.md). ppo.reward names a reward."""
    report_to: list[Tracker] = Field(default=[], examples=[["tensorboard"]])
    """Trackers that get every logged number besides trainer_log.jsonl."""
    tracking: TrackingConfig = TrackingConfig()
    """How trackers file the run."""
    output: Annotated[Text, Field(examples=["runs/my-run"])]
    """Run folder."""
    seed: Annotated[int, Field(ge=0, lt=2**32), Number] = 42
    """Every random draw is a function of this, the step, the micro-batch and the rank."""

    @property
    def method(self) -> MethodFacts:
        """What is true of the method that `stage` names."""
        return METHODS[self.stage]

    @property
    def loss(self) -> LossFacts | None:
        """What is true of the loss that the method's section names; None for a method that has one loss alone."""
        if self.loss_name is None:
            return None
        compares = self.method.reference and self.alignment.reference != NO_REFERENCE
        return self.method.losses.get(self.loss_name) or own_pair_loss(reference=compares)

    @property
    def loss_name(self) -> str | None:
        """As the method's section names it; None for a method that has one loss alone."""
        return getattr(self, str(self.method.section)).loss if self.method.losses else None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference policy."""
        if self.method.rollouts:
            return self.method.reference and self.rollout.kl > 0
        return self.method.reference and (self.loss is None or self.loss.reference)

    @property
    def rollout(self) -> PpoConfig | GrpoConfig:
        """The section of a method that answers prompts."""
        return getattr(self, str(self.method.section))
