"""Every config key of a run, typed. Attribute path = YAML path = override path.

The classes hold data and field-local checks only; rules that need the model, the data or the machine live in
`surefoot.planning`. The text under each field is what `surefoot explain KEY` prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from surefoot.config.methods import AlignmentConfig, DistillConfig, GrpoConfig, PpoConfig, RewardConfig, SftConfig
from surefoot.config.sections import AdapterShape, DataConfig, ParallelConfig, PartRate, TokenizerConfig
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
else:  # the rows are the only list of names, but a type checker needs constants
    Method = Literal[tuple(METHODS)]

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class ModelConfig(Section):
    path: Annotated[Text, Field(examples=["meta-llama/Llama-3.1-8B"])]
    """Folder with config.json, weights (safetensors) and tokenizer, or a hub id such as meta-llama/Llama-3.1-8B."""
    revision: Annotated[Text | None, Field(examples=["main"])] = None
    """Branch, tag or commit of a hub model; leave out for a local folder."""
    weights: Literal["own", "random"] = "own"
    """own: those of its files. random: drawn by the seed as transformers initializes the model, whose folder or
    repository then needs config.json and tokenizer alone. Full fine-tuning in stages sft and pretrain."""
    dropout: Annotated[Literal["own"] | Share | None, Field(examples=[0.0])] = None
    """Dropout of the model's own layers in training. own: as in its config.json. null: own in stages sft and pretrain,
    0 in the others, which compare log-probabilities or scores. The published config.json keeps its values."""
    trained: Annotated[list[Text] | None, Field(min_length=1, examples=[["lm_head"]])] = None
    """Full fine-tuning of a part: regular expressions, one of which must match a module's whole name in transformers,
    such as model\\.layers\\.31\\..* or lm_head, for its weights to train. (last 2) in one stands for the numbers of the
    last two layers, (last of 4 parts) for those at the end of each quarter. The others stay frozen. null: all train."""
    router_aux_loss_coef: Annotated[Literal["auto", "own"] | NonNegative, Field(examples=[0.001])] = "auto"
    """Mixture-of-experts models: weight of the load-balancing loss over all tokens of a step. auto: as in config.json,
    0 unless output_router_logits is true. own: as in config.json, in any case. Logged separately as aux_loss. If a step
    has several micro-batches, it costs one extra forward pass."""


class AdapterConfig(AdapterShape):
    publish: Literal["adapter", "merged"] = "adapter"
    """What the run folder contains at the end: the adapter, or the whole model with the adapter merged in. Checkpoints
    always contain the adapter."""
    initial: Annotated[Text | None, Field(examples=["runs/first"])] = None
    """Folder or hub id of an adapter of the same shape whose weights training starts from. null: a new adapter. A
    folder's adapter_config.json decides kind, rank, alpha, rslora, targets and modules_to_save where left out. The
    reference of ppo and grpo, and of dpo and kto by default, stays the base without any adapter."""
    start: Literal["zero", "pissa", "olora"] = "zero"
    """What a new adapter starts from; the model's answers stay the same. zero: B is 0. pissa: the largest singular
    values of each weight, which then train while the base keeps the rest (Meng et al. 2024). olora: the first rows and
    columns of its QR decomposition (Büyükakyüz 2024). Run folders hold a LoRA of twice the rank for the unchanged
    base."""
    start_iterations: Annotated[Count | None, Field(examples=[16])] = None
    """pissa only: iterations of a fast approximation; null: the exact decomposition."""
    initial_revision: Annotated[Text | None, Field(examples=["main"])] = None
    """Branch, tag or commit of adapter.initial on the hub."""


QUANTIZED = ("nf4", "int8")
"""Values of precision.base that store the decoder's linear layers in fewer than 16 bits."""


QAT_STAGES = ("sft", "pretrain", "dpo")


class VisionConfig(Section):
    tower: Literal["frozen", "trained", "adapter"] = "frozen"
    """Train all of the vision tower (image encoder) or freeze it, also with an adapter on the language model. adapter:
    adapter.targets reach its linear layers as well."""
    projector: Literal["frozen", "trained", "adapter"] = "frozen"
    """The same for the projector from the tower's features to the language model."""


class PrecisionConfig(Section):
    compute: Annotated[Literal["auto", "fp32", "bf16", "fp16"], Field(examples=["bf16"])] = "auto"
    """Dtype of matrix products. Trainable parameters are always fp32."""
    base: Literal["auto", "fp32", "bf16", "fp16", "nf4", "int8"] = "auto"
    """Dtype of the frozen base weights; fp32 in full fine-tuning. nf4 and int8: 4 and 8 bits per weight with
    bitsandbytes (QLoRA)."""
    qat: Literal["off", "int4", "int8-int4", "int8", "nvfp4", "mxfp4"] = "off"
    """Quantization-aware training with torchao: the decoder's linear layers compute with weights rounded as the later
    conversion rounds them. int4: weights, one scale per group. int8-int4: also activations in int8, one scale per
    token. int8: weights, one scale per row. nvfp4, mxfp4: weights and activations in 4-bit floating-point numbers, one
    scale per 16 or 32. The published model is converted and its loss compared."""
    qat_group_size: Annotated[int, Field(ge=8), Number] = 32
    """qat int4 and int8-int4: number of weights in a row that share a scale."""
    qat_after: Annotated[int, Field(ge=0), Number] = 0
    """Train this many steps without rounding first. Evaluations and the published model are always rounded."""
    tf32: Switch = "auto"
    """TF32 for the remaining fp32 products on Ampere or newer GPUs."""


class AttentionConfig(Section):
    implementation: Annotated[Literal["auto", "eager", "sdpa", "flash_attention_2"], Field(examples=["sdpa"])] = "auto"
    """Attention implementation; auto: the fastest that passes the accuracy check on this machine."""
    flash: Switch = "auto"
    """SDPA's flash kernel."""
    mem_efficient: Switch = "auto"
    """SDPA's memory-efficient kernel."""
    cudnn: Switch = "auto"
    """SDPA's cuDNN kernel; off in training unless it passes (PyTorch issue 196678)."""
    math: Switch = "auto"
    """SDPA's math kernel."""
    deterministic: Switch = "auto"
    """Gradients that are the same each time on a GPU, so that a resumed run equals an uninterrupted one bit for bit.
    auto: where the kernel takes at most 1.1 times as long for it."""


class KernelsConfig(Section):
    adapter: Literal["auto", "plain", "fast"] = "auto"
    """Forward and backward pass of LoRA and DoRA. plain: PEFT's. fast: surefoot's, equal up to rounding. auto: fast
    where supported (under fsdp2 and ZeRO 3 for a mixture's experts), unless its results differ on the run's own
    weights."""
    loss: Literal["auto", "plain", "chunked"] = "auto"
    """Output head and cross entropy. plain: logits of all supervised positions at once. chunked: a chunk of positions
    at a time, with gradients computed in the forward pass, so that memory does not grow with positions x vocabulary.
    auto: chunked where supported, unless its results differ on the run's own weights."""
    last_block: Literal["auto", "plain", "pruned"] = "auto"
    """Last decoder layer after its attention. plain: all positions. pruned: only positions that the loss uses. auto:
    pruned where supported, unless its results differ on the run's own weights."""
    pointwise: Literal["auto", "plain", "fused"] = "auto"
    """RMSNorms, and on a CPU rotary embeddings. plain: the model's own. fused: with less memory for the backward pass;
    on a CPU surefoot's, a few rows at a time so that they stay in the cache, on a GPU the norms of liger-kernel if it
    is installed. auto: fused if it measured faster on this machine, unless its results differ on the run's own
    weights."""
    rotary: Literal["auto", "plain", "fused"] = "auto"
    """Rotary embeddings on a GPU. plain: the model's own. fused: those of liger-kernel. auto: as for pointwise."""
    gated: Literal["auto", "plain", "fused"] = "auto"
    """Gated activations of MLPs (SwiGLU, GeGLU) on a GPU. plain: the model's own. fused: those of liger-kernel. auto:
    as for pointwise."""


class BatchConfig(Section):
    size: Count = 16
    """Examples per optimizer step, over all micro-batches and ranks; rows of examples with row_tokens."""
    row_tokens: Annotated[Annotated[int, Field(ge=8), Number] | None, Field(examples=[4096])] = None
    """Stages sft and pretrain: batch.size counts rows instead of examples. Shuffled examples fill rows of up to this
    many tokens, each goes to the first with room for it; the rows stay as they are, in another order in every epoch. A
    step then has about equally many tokens, as with tools whose batches count packed rows."""
    micro: Annotated[Literal["auto"] | Count, Field(examples=[4])] = "auto"
    """Examples per forward pass; auto: the most that the memory plan allows. Affects results only by rounding, and with
    dropout by the masks, which are drawn per forward pass."""


class OptimConfig(Section):
    name: Literal["adamw", "adamw_8bit", "adafactor", "rmsprop", "sgd", "muon"] = "adamw"
    """adamw; adamw_8bit: moments in 8 bits (bitsandbytes); adafactor: factored second moment; rmsprop; sgd; muon:
    orthogonalized momentum for matrices, AdamW for the rest."""
    lr: Positive = 2e-4
    """Peak learning rate."""
    rates: list[PartRate] = Field(default=[], examples=[[{"of": "lora_B", "lr": 3.2e-3}]])
    """Peak learning rates of parts of the weights; the first that fits counts. Parameters that none fits have lr."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """Schedule after warm-up. wsd: constant, then linear decay over the last `decay` fraction of steps. inverse_sqrt:
    proportional to 1 / sqrt(step), as in transformers."""
    floor: Share = 0.0
    """cosine and linear: fraction of the peak at which the rate ends."""
    warmup: Share | Duration = 0.03
    """Linear warm-up: a fraction of all steps (0.03) or a length (100 steps)."""
    warmup_from_zero: Flag = False
    """Start the warm-up at rate 0, as transformers' schedules do: the first step changes no weights, and a fraction of
    steps is rounded up."""
    decay: Annotated[float, Field(gt=0, le=1), Number] = 0.1
    """wsd only: fraction of all steps in the final decay."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moments."""
    momentum: Annotated[Share | None, Field(examples=[0.9])] = None
    """rmsprop, sgd and muon: decay rate of the momentum; null: 0, for muon 0.95."""
    eps: Positive = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (rmsprop and sgd add it to the gradient); biases and norms are excluded."""
    max_grad_norm: Positive | None = 1.0
    """Clip the global gradient norm to this; null for no clipping."""
    neftune_alpha: Annotated[Positive | None, Field(examples=[5.0])] = None
    """NEFTune: uniform noise of magnitude alpha / sqrt(tokens * width) on the embedding output, in training only."""


class CheckpointConfig(Section):
    every: Duration = Duration(200, "steps")
    """How often to write a checkpoint. The last step always gets one, as does the best evaluation so far unless
    `checkpoint.best` is none."""
    keep: Count = 3
    """Number of newest checkpoints to keep, at least 2; the best one is kept in addition."""
    best: Annotated[Text, Field(examples=["exact_match"])] = "loss"
    """Evaluation result that selects the best checkpoint, whose weights are published: loss, exact_match or another of
    metrics.names (higher is better), reward_accuracy or reward_margin (stages reward, dpo and kto; higher is better),
    or none."""


class EarlyStoppingConfig(Section):
    patience: Count = 3
    """Stop after this many evaluations without improvement."""
    min_delta: NonNegative = 0.0
    """Minimum decrease of the evaluation loss that counts as improvement."""


class GuardConfig(Section):
    max_consecutive: Count = 3
    """Stop with exit 5 after this many non-finite steps in a row."""
    max_recent: Count = 3
    """Stop with exit 5 after more than this many non-finite steps among the last 300."""
    spikes: Literal["clip", "off"] = "clip"
    """What to do if the gradient norm is an outlier among those of the last steps. clip: clip the gradient to the
    highest norm that is not an outlier."""
    rollback: Literal["on", "off"] = "off"
    """on: if non-finite steps would stop the run, return to the last healthy checkpoint and skip the data up to the
    last of these steps, at most twice."""


class BosConfig(Section):
    prepend: Switch | Literal["tokenizer"] = "auto"
    """Prepend one BOS to every example. auto: if the tokenizer has one that its family uses, or bos.scale needs it.
    tokenizer: if its chat template writes one or, for texts, if the tokenizer adds one itself. If the tokenizer has no
    BOS, EOS is used."""
    scale: Annotated[NonNegative, Field(examples=[0.1])] = 1.0
    """Factor on the embedding of the first token of every sequence, in training and inference. 1: no change. 0: the
    embedding is zero."""


class MetricsConfig(Section):
    names: list[Text] = Field(default=[], examples=[["exact_match"]])
    """Metrics on generated answers: exact_match, or one of functions.metrics or of a Python caller."""
    examples: Annotated[Count | None, Field(examples=[200])] = None
    """Generate answers only for the first N evaluation examples; null: all."""
    max_new_tokens: Count = 64
    """Maximum tokens per answer."""


class FunctionsConfig(Section):
    loss: Annotated[Text | None, Field(examples=["focal.py:focal"])] = None
    """A loss that replaces the stage's own: (model, batch) -> surefoot.LossSum. FILE.py:FUNCTION, or from an installed
    package MODULE:FUNCTION or entry_point:NAME."""
    record: Annotated[Text | None, Field(examples=["quiz.py:quiz"])] = None
    """Reads each record if data.format is custom: record -> messages or a text."""
    metrics: list[Text] = Field(default=[], examples=[["own.py:shared_words"]])
    """Metrics for metrics.names, each named after its function: answers -> a number, higher is better."""


class TrackingConfig(Section):
    project: Text = "surefoot"
    """Project (experiment) of the run in trackers."""
    name: Annotated[Text | None, Field(examples=["my-run"])] = None
    """Name of the run; null: the name of the run folder."""
    offline: Flag = False
    """Keep W&B's data in the run folder, for a later `wandb sync`; the other trackers write local files unless their
    own settings name a server."""


class SamplesConfig(Section):
    count: Annotated[int, Field(ge=0), Number] = 0
    """Number of evaluation prompts to answer and log at each evaluation."""
    max_new_tokens: Count = 64
    """Maximum tokens per answer."""


class RunConfig(Section):
    stage: Annotated[Method, Field(examples=["sft"])]
    """What to train. sft: supervised fine-tuning on answers. pretrain: every token of plain texts. reward: a reward
    model, from pairs of a better and a worse answer. dpo: the policy, from such pairs. kto: the policy, from answers
    judged good or bad. ppo: the policy, from scores of its own answers. grpo: the policy, from scores of several
    answers to each prompt. distill: a student, from the token distributions of a teacher."""
    model: Annotated[ModelConfig, ShortForm("path"), Field(examples=["meta-llama/Llama-3.1-8B"])]
    """Base model: a folder or hub id (short for {path: …, revision: …})."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Special and added tokens."""
    adapter: Annotated[AdapterConfig | None, Field(examples=[{"kind": "lora", "rank": 16}])] = None
    """LoRA or DoRA; leave out for full fine-tuning."""
    vision: Annotated[VisionConfig, Field(examples=[{"projector": "trained"}])] = VisionConfig()
    """Vision-language models: what trains in addition to the language model or its adapter."""
    data: Annotated[DataConfig, Field(examples=[{"train": "data/train.jsonl"}])]
    """What to train and evaluate on."""
    precision: Annotated[PrecisionConfig, ShortForm("compute"), Field(examples=["bf16"])] = PrecisionConfig()
    """auto | fp32 | bf16 | fp16 | {compute: …, base: …, tf32: …}."""
    attention: Annotated[AttentionConfig, ShortForm("implementation"), Field(examples=["sdpa"])] = AttentionConfig()
    """auto | eager | sdpa | flash_attention_2 | {implementation: …, flash: …, mem_efficient: …, cudnn: …, math: …}."""
    compile: CompileMode = "off"
    """torch.compile mode of the decoder."""
    kernels: KernelsConfig = KernelsConfig()
    """Faster implementations; each is compared with the plain one before step 1."""
    gradient_checkpointing: Annotated[Switch | Count, Field(examples=[4])] = "auto"
    """Recompute activations in the backward pass. on: in every decoder layer. A number N: in the first N layers. auto:
    in as many layers as the memory plan needs."""
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
    """Also evaluate before step 1, for a comparison with the base model."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save and what to keep."""
    early_stopping: Annotated[EarlyStoppingConfig | None, Field(examples=[{"patience": 3}])] = None
    """Stop when evaluation no longer improves; leave out to train to the end."""
    guard: GuardConfig = GuardConfig()
    """What to do on non-finite values."""
    bos: BosConfig = BosConfig()
    """Beginning-of-sequence token."""
    sft: SftConfig = SftConfig()
    """Stages sft and pretrain: weights of the tokens in the loss."""
    reward: RewardConfig = RewardConfig()
    """Stage reward: the loss of the reward model."""
    alignment: AlignmentConfig = AlignmentConfig()
    """Stages dpo and kto: loss and reference."""
    ppo: PpoConfig = PpoConfig()
    """Stage ppo: rewards, rollouts and hyperparameters."""
    grpo: Annotated[GrpoConfig, Field(examples=[{"rewards": ["numeric"]}])] = GrpoConfig()
    """Stage grpo: rewards, rollouts and hyperparameters."""
    distill: Annotated[DistillConfig, Field(examples=[{"teacher": "runs/large"}])] = DistillConfig()
    """Stage distill: teacher and divergence."""
    parallel: ParallelConfig = ParallelConfig()
    """Training with several processes."""
    samples: SamplesConfig = SamplesConfig()
    """Generated answers to look at during the run."""
    metrics: Annotated[MetricsConfig, Field(examples=[{"names": ["exact_match"]}])] = MetricsConfig()
    """Metrics on generated answers at each evaluation."""
    functions: Annotated[FunctionsConfig, Field(examples=[{"loss": "focal.py:focal"}])] = FunctionsConfig()
    """Custom functions: a loss, a record reader, metrics (docs/python.md). For a reward see ppo.reward."""
    report_to: list[Tracker] = Field(default=[], examples=[["tensorboard"]])
    """Trackers that receive every logged number, in addition to trainer_log.jsonl."""
    tracking: TrackingConfig = TrackingConfig()
    """Project and name of the run in trackers."""
    output: Annotated[Text, Field(examples=["runs/my-run"])]
    """Run folder."""
    seed: Annotated[int, Field(ge=0, lt=2**32), Number] = 42
    """Seed; every random draw is a function of it, the step, the micro-batch and the rank."""

    @property
    def method(self) -> MethodFacts:
        """Facts about the training method of `stage`."""
        return METHODS[self.stage]

    @property
    def loss(self) -> LossFacts | None:
        """Facts about the chosen loss; None for a method with a single loss."""
        if self.loss_name is None:
            return None
        compares = self.method.reference and self.alignment.reference != NO_REFERENCE
        return self.method.losses.get(self.loss_name) or own_pair_loss(reference=compares)

    @property
    def loss_name(self) -> str | None:
        """Name of the chosen loss; None for a method with a single loss."""
        return getattr(self, str(self.method.section)).loss if self.method.losses else None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs a reference policy."""
        if self.method.rollouts:
            return self.method.reference and getattr(self, str(self.method.section)).kl > 0
        return self.method.reference if self.loss is None else self.loss.reference

    @property
    def draws(self) -> bool:
        """Whether the model in training generates answers that it learns from."""
        return self.method.rollouts or (self.method.teacher and self.distill.on_policy > 0)

    @property
    def rollout(self) -> PpoConfig | GrpoConfig | DistillConfig:
        """The config section of a method with rollouts."""
        return getattr(self, str(self.method.section))
