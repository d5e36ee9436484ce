"""Every knob of a run, typed. Attribute path = YAML path = override path.

The classes hold data and field-local checks only; rules that need the model, the data or the machine live in
`surefoot.planning`. The text under each field is what `surefoot explain KEY` prints.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from surefoot.config.durations import Duration


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    return value


def _on_off(value: Any) -> Any:
    """`true`/`false` are accepted for `on`/`off`: in YAML 1.2 the latter are strings."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Int = Annotated[int, BeforeValidator(_no_boolean)]
Float = Annotated[float, BeforeValidator(_no_boolean)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_off)]
DType = Literal["fp32", "bf16", "fp16"]


class Section(BaseModel):
    """A frozen group of keys: unknown keys are refused, NaN and infinity are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _short_form(field: str):
    """Accept `key: value` for `key: {field: value}`."""
    return BeforeValidator(lambda value: value if isinstance(value, dict | BaseModel) else {field: value})


class ModelConfig(Section):
    path: Annotated[str, Field(min_length=1)]
    """Folder with config.json, weights (safetensors) and tokenizer, or a hub id such as meta-llama/Llama-3.1-8B."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; leave out for a local folder."""


class TokenizerConfig(Section):
    pad: Annotated[str, Field(min_length=1)] = "auto"
    """auto: the tokenizer's own pad, a reserved one, a spare embedding row, or EOS (masked by position), in this order.
    add: append <|pad|> and an embedding row. Anything else names an existing token."""


class AdapterConfig(Section):
    kind: Literal["lora", "dora"]
    """lora: W + scale * B A.  dora: the same, with the norm of each row of W learned separately."""
    rank: Annotated[Int, Field(ge=1)] = 16
    """Rank of A and B."""
    alpha: Annotated[Float, Field(gt=0)] = 32.0
    """Scale is alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """all-linear (every linear layer but the output head), or module names such as [q_proj, v_proj]."""
    rslora: bool = False
    """Rank-stabilised scale: alpha / sqrt(rank)."""
    modules_to_save: list[str] = []
    """Modules trained in full and saved with the adapter, such as [lm_head]."""


class DataConfig(Section):
    train: Annotated[str, Field(min_length=1)]
    """File with training examples (.json or .jsonl)."""
    eval: Annotated[str | Annotated[Int, Field(ge=1)] | Annotated[Float, Field(gt=0, lt=1)], BeforeValidator(_no_boolean)] = "none"
    """none; a file; a share between 0 and 1 or a count of the training examples, split off by the seed."""
    format: Literal["auto", "alpaca", "messages", "text"] = "auto"
    """Layout of the records; auto recognises it from the first record and says what it saw."""
    template: str = "auto"
    """auto: the tokenizer's chat template, else alpaca. Or llama3, alpaca, plain, tokenizer."""
    max_length: Annotated[Int, Field(ge=8)] = 2048
    """Longest example in tokens; a longer one loses prompt tokens first, its answer last."""
    max_samples: Annotated[Int, Field(ge=1)] | None = None
    """Use only the first N records."""
    train_on: Literal["responses", "last", "everything"] = "responses"
    """Which tokens carry loss: every answer, the last answer, or all of them."""


class PrecisionConfig(Section):
    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the matrix products. Trainable parameters are always fp32."""
    base: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type in which a frozen base is held; fp32 in full fine-tuning."""
    tf32: Switch = "auto"
    """TF32 for the remaining fp32 products on Ampere or newer GPUs."""


class AttentionConfig(Section):
    implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Which attention code runs; auto takes the fastest that passes the accuracy check on this machine."""
    flash: Switch = "auto"
    """SDPA's flash kernel."""
    mem_efficient: Switch = "auto"
    """SDPA's memory-efficient kernel."""
    cudnn: Switch = "auto"
    """SDPA's cuDNN kernel; off in training unless it passes (PyTorch issue 196678)."""
    math: Switch = "auto"
    """SDPA's plain kernel."""


class BatchConfig(Section):
    size: Annotated[Int, Field(ge=1)] = 16
    """Examples per optimizer step, over all micro-batches and ranks."""
    micro: Annotated[Literal["auto"] | Annotated[Int, Field(ge=1)], BeforeValidator(_no_boolean)] = "auto"
    """Examples per forward pass; auto takes the most that the memory plan allows. Never changes the result."""


class OptimConfig(Section):
    name: Literal["adamw"] = "adamw"
    """Optimizer."""
    lr: Annotated[Float, Field(gt=0)] = 2e-4
    """Highest learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after warm-up. wsd: constant, then linear decay over the last `decay` share."""
    warmup: Annotated[Annotated[Float, Field(ge=0, lt=1)] | Duration, BeforeValidator(_no_boolean)] = 0.03
    """Share of all steps (0.03), or a length (100 steps), with linearly rising rate."""
    decay: Annotated[Float, Field(gt=0, le=1)] = 0.1
    """wsd only: share of all steps in the final decay."""
    betas: tuple[Annotated[Float, Field(ge=0, lt=1)], Annotated[Float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[Float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[Float, Field(ge=0)] = 0.0
    """Decoupled weight decay; biases and norms are left out."""
    max_grad_norm: Annotated[Float, Field(gt=0)] | None = 1.0
    """Clip the global gradient norm to this; null for no clipping."""


class CheckpointConfig(Section):
    every: Duration = Duration(200, "steps")
    """How often a checkpoint is written. The last step always gets one."""
    keep: Annotated[Int, Field(ge=1)] = 3
    """How many to keep, newest first; the best one is kept besides."""
    best: Literal["loss", "none"] = "loss"
    """Which evaluation result decides the best checkpoint (its weights end up in the output folder)."""


class EarlyStoppingConfig(Section):
    patience: Annotated[Int, Field(ge=1)] = 3
    """Stop after this many evaluations without improvement."""
    min_delta: Annotated[Float, Field(ge=0)] = 0.0
    """An evaluation loss must fall by more than this to count as improvement."""


class GuardConfig(Section):
    max_consecutive: Annotated[Int, Field(ge=1)] = 3
    """Stop with exit 5 after this many non-finite steps in a row."""


class BosConfig(Section):
    prepend: Switch = "auto"
    """Put BOS once before every example. auto: when the tokenizer has one that its family uses."""


class SamplesConfig(Section):
    count: Annotated[Int, Field(ge=0)] = 0
    """How many prompts of the evaluation set are answered and logged at each evaluation."""
    max_new_tokens: Annotated[Int, Field(ge=1)] = 64
    """Longest answer in tokens."""


class RunConfig(Section):
    stage: Literal["sft"]
    """What to train: sft = supervised fine-tuning."""
    model: Annotated[ModelConfig, _short_form("path")]
    """Base model: a folder or hub id (short for {path: …, revision: …})."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Special tokens."""
    adapter: AdapterConfig | None = None
    """LoRA or DoRA; leave out for full fine-tuning."""
    data: DataConfig
    """What to train and evaluate on."""
    precision: Annotated[PrecisionConfig, _short_form("compute")] = PrecisionConfig()
    """auto | fp32 | bf16 | fp16 | {compute: …, base: …, tf32: …}."""
    attention: Annotated[AttentionConfig, _short_form("implementation")] = AttentionConfig()
    """auto | eager | sdpa | flash_attention_2 | {implementation: …, flash: …, mem_efficient: …, cudnn: …, math: …}."""
    compile: Annotated[Literal["off", "default", "reduce-overhead", "max-autotune"], BeforeValidator(_on_off)] = "off"
    """torch.compile mode of the decoder; off unless asked for."""
    gradient_checkpointing: Switch = "auto"
    """Recompute activations in the backward pass; auto: only when the memory plan needs it."""
    batch: BatchConfig = BatchConfig()
    """How examples are grouped."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and learning-rate schedule."""
    duration: Duration = Duration(3, "epochs")
    """How long to train: N steps, epochs or tokens (real input tokens). The last short batch of an epoch is kept."""
    log_every: Annotated[Int, Field(ge=1)] = 1
    """Log every N steps."""
    eval_every: Duration | None = Duration(200, "steps")
    """How often to evaluate (needs data.eval); null: only at the end."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save and what to keep."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop when evaluation no longer improves; leave out to train to the end."""
    guard: GuardConfig = GuardConfig()
    """What to do on non-finite values."""
    bos: BosConfig = BosConfig()
    """Beginning-of-sequence token."""
    samples: SamplesConfig = SamplesConfig()
    """Generated answers to look at during the run."""
    output: Annotated[str, Field(min_length=1)]
    """Run folder."""
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 42
    """Every random draw is a function of this, the step, the micro-batch and the rank."""
