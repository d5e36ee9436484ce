"""Check for keys that are valid alone but not together, as far as the config itself shows; the plan checks the rest.

Loading a config runs these checks, so that errors point into the file; planning runs them again for configs made in
code. A key at its default never conflicts: a saved config contains all defaults and must load again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from surefoot.config import method_contradictions
from surefoot.config.keys import schema_key, shown_key
from surefoot.config.method_contradictions import problem as _problem
from surefoot.config.problems import Problem
from surefoot.config.schema import (
    QAT_STAGES,
    QUANTIZED,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    TrackingConfig,
)
from surefoot.config.sections import PATTERN, DataConfig, SourceConfig
from surefoot.method_facts.methods import METHODS


def contradictions(config: RunConfig) -> list[Problem]:
    """Return a problem for every conflict, naming all keys involved."""
    return [problem for rule in _RULES for problem in rule(config)]


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    if config.data.eval != "none":
        if config.early_stopping is not None and config.eval_every is None:
            yield _problem(
                "early_stopping",
                "eval_every: null evaluates only at the end, too late to stop early",
                "give eval_every a length, such as 200 steps",
                "eval_every",
            )
        return
    # key=value that turns the feature off: a saved config contains every key, and an override cannot remove one.
    wants = {
        "early_stopping=null": config.early_stopping is not None,
        "samples.count=0": config.samples.count > 0,
        "metrics.names=[]": bool(config.metrics.names),
        "eval_at_start=false": config.eval_at_start,
        "eval_every=null": config.eval_every not in (None, RunConfig.model_fields["eval_every"].default),
    }
    for without, wanted in wants.items():
        if wanted:
            fix = f"set data.eval to a file, a fraction or a count, or leave this key out ({without})"
            key = without.partition("=")[0]
            yield _problem(key, "needs evaluation data, but data.eval is none", fix, "data.eval")


def _prompts(config: RunConfig) -> Iterator[Problem]:
    """Check that there are prompts: answers are generated from the tokens before the first supervised one."""
    requested = {"samples.count": config.samples.count > 0, "metrics.names": bool(config.metrics.names)}
    without = {"data.train_on: everything": config.data.train_on == "everything"}
    without[f"stage: {config.stage}"] = config.method.plain_texts
    for reason in (reason for reason, given in without.items() if given):
        for key in (key for key, wanted in requested.items() if wanted):
            group, other = key.partition(".")[0], reason.partition(":")[0]
            fix = f"leave {group} out, or train on responses"
            yield _problem(key, f"{reason} leaves no prompt to answer", fix, other)


def _best(config: RunConfig) -> Iterator[Problem]:
    best, names = config.checkpoint.best, config.metrics.names
    own = config.method.metrics
    if best not in ("loss", "none", *own, *names):
        has = f"metrics.names has {', '.join(names)}" if names else "metrics.names is empty"
        elsewhere = any(best in method.metrics for method in METHODS.values())  # which metrics.names do not have
        fix = f"{'' if elsewhere else f'add {best} to metrics.names, or '}use {', '.join((*own, 'loss or none'))}"
        yield _problem("checkpoint.best", f"{best} is not a metric of this run: {has}", fix, "metrics.names")


def _plain_texts(config: RunConfig) -> Iterator[Problem]:
    if not config.method.plain_texts:
        return
    for key in ("train_on", "template", "template_arguments"):
        if getattr(config.data, key) != DataConfig.model_fields[key].default:
            what = f"applies to conversations, but stage: {config.stage} trains on every token of plain texts"
            yield _problem(f"data.{key}", what, "leave it out, or use stage: sft", "stage")


def _patterns(config: RunConfig) -> Iterator[Problem]:
    targets = [] if config.adapter is None or config.adapter.targets == "all-linear" else config.adapter.targets
    patterns = [
        *(("adapter.targets", target.removeprefix(PATTERN)) for target in targets if target.startswith(PATTERN)),
        *(("model.trained", pattern) for pattern in config.model.trained or ()),
        *((f"optim.rates.{place}.of", part.of) for place, part in enumerate(config.optim.rates)),
        *((f"grpo.rewards.{place}.pattern", term.pattern) for place, term in enumerate(config.grpo.rewards)),
    ]
    for key, pattern in patterns:
        try:
            re.compile(pattern or "")
        except re.error as error:
            yield _problem(key, f"{pattern!r} is no regular expression: {error}", "correct it", schema_key(key))


def _trained(config: RunConfig) -> Iterator[Problem]:
    if config.model.trained is None:
        return
    key = "model.trained"
    if config.adapter is not None:
        what = "names what trains in full, but an adapter trains instead of the model's weights"
        yield _problem(key, what, "leave one of them out, or use adapter.modules_to_save", "adapter")
    if config.method.scores or config.method.critic:
        what = f"is for the stages that train one language model, but stage is {config.stage}"
        yield _problem(key, what, "leave it out", "stage")
    if config.parallel.offload == "optimizer":
        what = "parallel.offload: optimizer keeps all weights in host memory, also those that do not train"
        yield _problem(key, what, "leave one of them out", "parallel.offload")


def _random(config: RunConfig) -> Iterator[Problem]:
    if config.model.weights == "own":
        return
    key = "model.weights"
    if config.adapter is not None:
        yield _problem(key, "random weights would stay random under an adapter", "leave one of them out", "adapter")
    if not config.method.one_pass or config.method.scores or config.method.reference:
        what = f"is for the stages that begin a model, but stage is {config.stage}"
        yield _problem(key, what, "leave it out, or choose pretrain or sft", "stage")


def _publishing(config: RunConfig) -> Iterator[Problem]:
    if config.adapter is None or config.adapter.publish == "adapter":
        return
    if config.bos.scale != 1:
        what = f"bos.scale {config.bos.scale:g} is stored in a separate file, which a merged model would lose"
        fix = "leave adapter.publish out; `surefoot export --merge` can write the factor into the weights"
        yield _problem("adapter.publish", what, fix, "bos.scale")
    if config.precision.base in QUANTIZED:
        what = "the adapter is trained on quantized weights; merged into unquantized ones the model answers differently"
        fix = "leave adapter.publish out; `surefoot export --merge` shows the difference"
        yield _problem("adapter.publish", what, fix, "precision.base")


def _mixture(config: RunConfig) -> Iterator[Problem]:
    train = [(key, source) for key, source in _sources(config) if key.startswith("data.train.")]
    weighted = [key for key, source in train if source.weight is not None]
    repeated = [key for key, source in train if source.epochs is not None]
    if weighted and repeated:
        what = f"a mixture uses either weights or epochs, but {shown_key(repeated[0])}.epochs is set as well"
        fix = "use weight for all sources, or epochs for all"
        yield _problem(f"{weighted[0]}.weight", what, fix, f"{repeated[0]}.epochs")
    for key, source in _sources(config):
        if key.startswith("data.eval.") and (source.weight is not None or source.epochs is not None):
            name = "weight" if source.weight is not None else "epochs"
            yield _problem(f"{key}.{name}", "evaluation reads every example once", "leave it out")
        if source.share is not None and source.share.take > len(source.share.of):
            what = f"selects part {source.share.take}, but {key}.share.of has {len(source.share.of)}"
            yield _problem(f"{key}.share.take", what, "count parts from 1", f"{key}.share.of")
        if source.streaming and source.max_samples is None and config.data.max_samples is None:
            what = "a stream has no known length to plan for"
            yield _problem(f"{key}.streaming", what, "give this source max_samples", f"{key}.max_samples")


def _sources(config: RunConfig) -> Iterator[tuple[str, SourceConfig]]:
    """Yield (dotted key such as data.train.0, source)."""
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if isinstance(sources, tuple):
            yield from ((f"{key}.{number}", source) for number, source in enumerate(sources))


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    optim = config.optim
    if optim.momentum is not None and optim.name not in ("rmsprop", "sgd", "muon"):
        what = f"only rmsprop, sgd and muon use it, but optim.name is {optim.name}"
        yield _problem(
            "optim.momentum", what, "leave it out; optim.betas[0] is the decay rate of the first moment", "optim.name"
        )
    if optim.name in ("rmsprop", "sgd", "adafactor"):
        for key in ("betas",) if optim.name == "rmsprop" else ("betas", "eps"):
            if getattr(optim, key) != OptimConfig.model_fields[key].default:
                fix = "use optim.momentum, or leave it out" if (optim.name, key) == ("sgd", "betas") else "leave it out"
                yield _problem(f"optim.{key}", f"belongs to AdamW, but optim.name is {optim.name}", fix, "optim.name")


def _trackers(config: RunConfig) -> Iterator[Problem]:
    for name, times in Counter(config.report_to).items():
        if times > 1:
            yield _problem("report_to", f"names {name} {times} times", "name it once")
    for key in (key for key in TrackingConfig.model_fields if not config.report_to):
        if getattr(config.tracking, key) != TrackingConfig.model_fields[key].default:
            yield _problem(f"tracking.{key}", "report_to lists no tracker", "add one, or leave this out", "report_to")


def _schedule(config: RunConfig) -> Iterator[Problem]:
    optim = config.optim
    if optim.floor and optim.schedule not in ("cosine", "linear"):
        what = f"only cosine and linear have a final rate, but optim.schedule is {optim.schedule}"
        yield _problem("optim.floor", what, "leave optim.floor out", "optim.schedule")
    if optim.schedule != "wsd":
        if optim.decay != OptimConfig.model_fields["decay"].default:
            yield _problem(
                "optim.decay",
                f"only the wsd schedule has a final decay, but optim.schedule is {optim.schedule}",
                "set optim.schedule to wsd, or leave optim.decay out",
                "optim.schedule",
            )
    elif isinstance(optim.warmup, float) and optim.warmup + optim.decay > 1:
        yield _problem(
            "optim.decay",
            f"optim.warmup {optim.warmup:g} and optim.decay {optim.decay:g} together exceed 1",
            "make their sum at most 1",
            "optim.warmup",
        )


def _noise(config: RunConfig) -> Iterator[Problem]:
    if config.optim.neftune_alpha is not None and config.compile != "off":
        yield _problem(
            "optim.neftune_alpha",
            f"compile: {config.compile} fixes the forward pass, but NEFTune changes it for every batch",
            "leave one of them out",
            "compile",
        )


def _starts(config: RunConfig) -> Iterator[Problem]:
    """Check adapters that start from the base's own weights, which then change."""
    given = config.adapter
    if given is None:
        return
    if given.start_iterations is not None and given.start != "pissa":
        what = "only adapter.start: pissa reads it"
        yield _problem("adapter.start_iterations", what, "leave it out", "adapter.start")
    if given.start == "zero":
        return
    obstacles = {
        "adapter.kind": given.kind != "lora" and "is for LoRA adapters",
        "adapter.initial": given.initial is not None and "and adapter.initial both set the first values",
        "precision.base": config.precision.base in QUANTIZED and "changes the base's weights, which 4 or 8 bits round",
        "precision.qat": config.precision.qat != "off" and "changes the base's weights, which precision.qat rounds",
        "stage": (config.needs_reference or config.method.rollouts)
        and "changes the base under the adapter, and this stage also uses it as it was",
    }
    for key, obstacle in obstacles.items():
        if obstacle:
            yield _problem("adapter.start", f"{given.start} {obstacle}", "leave one of them out", key)


def _bos(config: RunConfig) -> Iterator[Problem]:
    if config.bos.prepend == "off" and config.bos.scale != 1:
        yield _problem(
            "bos.scale",
            f"{config.bos.scale:g} scales the BOS at the start of every example, but bos.prepend is off",
            "leave bos.prepend out, or set bos.scale to 1",
            "bos.prepend",
        )


def _batch(config: RunConfig) -> Iterator[Problem]:
    micro, size, room = config.batch.micro, config.batch.size, config.batch.row_tokens
    if room is not None and (config.method.teacher or not config.method.learns_tokens):
        what = f"stage {config.stage} has no rows of examples"
        yield _problem("batch.row_tokens", what, "leave it out; batch.size counts its examples", "stage")
    if micro != "auto" and micro > size and room is None:
        yield _problem(
            "batch.micro",
            f"{micro} examples per forward pass are more than the {size} per step (batch.size)",
            f"use at most {size}, or raise batch.size",
            "batch.size",
        )


def _attention(config: RunConfig) -> Iterator[Problem]:
    chosen = config.attention
    kernels = {
        "flash": chosen.flash,
        "mem_efficient": chosen.mem_efficient,
        "cudnn": chosen.cudnn,
        "math": chosen.math,
    }
    if chosen.implementation in ("eager", "flash_attention_2"):
        for name in (name for name, switch in kernels.items() if switch == "on"):
            yield _problem(
                f"attention.{name}",
                f"is an SDPA kernel, but attention.implementation is {chosen.implementation}",
                "set attention.implementation to sdpa, or leave this key out",
                "attention.implementation",
            )
    elif set(kernels.values()) == {"off"}:  # setting a kernel makes auto choose SDPA
        yield _problem(
            "attention.implementation",
            "no SDPA kernel is left: flash, mem_efficient, cudnn and math are all off",
            "leave one on, or use eager",
            *(f"attention.{name}" for name in kernels),
        )


def _precision(config: RunConfig) -> Iterator[Problem]:
    base = config.precision.base
    if config.adapter is None and base in QUANTIZED:
        yield _problem(
            "precision.base",
            "quantized weights cannot train, but without an adapter the base trains",
            "add an adapter (QLoRA), or leave precision.base out",
            "adapter",
        )
    if config.adapter is None and base in ("fp16", "bf16"):
        harm = "ends in 'Attempting to unscale FP16 gradients'" if base == "fp16" else "loses small updates"
        yield _problem(
            "precision.base",
            f"without an adapter the base trains, and training {base} weights {harm}",
            f"use `precision: {base}`, which computes in {base} with fp32 weights, or add an adapter",
            "adapter",
        )


def _qat(config: RunConfig) -> Iterator[Problem]:
    precision, fields = config.precision, PrecisionConfig.model_fields
    grouped = precision.qat in ("int4", "int8-int4")
    if not grouped and precision.qat_group_size != fields["qat_group_size"].default:
        what = f"is the group size of int4, but precision.qat is {precision.qat}"
        yield _problem("precision.qat_group_size", what, "leave it out", "precision.qat")
    if precision.qat == "off":
        if precision.qat_after:
            yield _problem("precision.qat_after", "precision.qat is off", "leave it out", "precision.qat")
        return
    if precision.qat_after and config.needs_reference:
        what = "the policy would be compared with a reference that rounds already"
        yield _problem("precision.qat_after", what, "leave it out", "stage")
    if config.stage not in QAT_STAGES:
        what = f"is supported in stages {', '.join(QAT_STAGES)}, but stage is {config.stage}"
        yield _problem("precision.qat", what, "leave it out", "stage")
    if precision.base in QUANTIZED:
        what = f"would quantize weights again that precision.base: {precision.base} already quantizes"
        yield _problem("precision.qat", what, "leave one of them out", "precision.base")
    if config.compile != "off":
        what = f"compile: {config.compile} is not tested with fake-quantized layers"
        yield _problem("precision.qat", what, "leave compile out", "compile")
    if config.adapter is not None and config.adapter.publish == "merged":
        what = "the adapter is trained with a rounded base; merged into unrounded weights the model answers differently"
        yield _problem("adapter.publish", what, "leave it out", "precision.qat")


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _evaluation,
    _prompts,
    _best,
    _plain_texts,
    _patterns,
    _trained,
    _random,
    _publishing,
    _starts,
    _mixture,
    _optimizer,
    _trackers,
    _schedule,
    _noise,
    _bos,
    _batch,
    _attention,
    _precision,
    _qat,
    *method_contradictions.RULES,
)
