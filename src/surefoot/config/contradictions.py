"""Keys that are fine alone and cannot hold together. Only what the config itself shows; the plan checks the rest.

Reading a config asks here, so that a contradiction is shown in the file; planning asks again, for configs made in code.
A key at its default never contradicts: a saved config spells out all defaults and must load again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from surefoot.config.problems import Problem
from surefoot.config.schema import OptimConfig, RunConfig


def contradictions(config: RunConfig) -> list[Problem]:
    """Every pair of keys that excludes each other, named both."""
    return [problem for rule in _RULES for problem in rule(config)]


def _problem(key: str, what: str, fix: str, *others: str) -> Problem:
    return Problem(key, what, fix, "value", (key, *others))


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
    fix = "set data.eval to a file, a share or a count, or leave this key out"
    wants = {
        "early_stopping": config.early_stopping is not None,
        "samples.count": config.samples.count > 0,
        "eval_every": config.eval_every not in (None, RunConfig.model_fields["eval_every"].default),
    }
    for key, wanted in wants.items():
        if wanted:
            yield _problem(key, "needs evaluation data, and data.eval is none", fix, "data.eval")


def _samples(config: RunConfig) -> Iterator[Problem]:
    if config.samples.count and config.data.train_on == "everything":
        yield _problem(
            "samples.count",
            "data.train_on: everything leaves no prompt to answer",
            "leave samples out, or train on responses",
            "data.train_on",
        )


def _schedule(config: RunConfig) -> Iterator[Problem]:
    optim = config.optim
    if optim.schedule != "wsd":
        if optim.decay != OptimConfig.model_fields["decay"].default:
            yield _problem(
                "optim.decay",
                f"only the wsd schedule has a final decay, and optim.schedule is {optim.schedule}",
                "set optim.schedule to wsd, or leave optim.decay out",
                "optim.schedule",
            )
    elif isinstance(optim.warmup, float) and optim.warmup + optim.decay > 1:
        yield _problem(
            "optim.decay",
            f"optim.warmup {optim.warmup:g} and optim.decay {optim.decay:g} together exceed the run",
            "make their sum at most 1",
            "optim.warmup",
        )


def _batch(config: RunConfig) -> Iterator[Problem]:
    micro, size = config.batch.micro, config.batch.size
    if micro != "auto" and micro > size:
        yield _problem(
            "batch.micro",
            f"a forward pass of {micro} examples is more than a step of {size} (batch.size)",
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
                f"is a kernel of SDPA, and attention.implementation is {chosen.implementation}",
                "set attention.implementation to sdpa, or leave this key out",
                "attention.implementation",
            )
    elif set(kernels.values()) == {"off"}:  # kernels are SDPA's: auto takes it once they are switched
        yield _problem(
            "attention.implementation",
            "no SDPA kernel is left: flash, mem_efficient, cudnn and math are all off",
            "leave one on, or use eager",
            *(f"attention.{name}" for name in kernels),
        )


def _precision(config: RunConfig) -> Iterator[Problem]:
    base = config.precision.base
    if config.adapter is None and base in ("fp16", "bf16"):
        harm = "ends in 'Attempting to unscale FP16 gradients'" if base == "fp16" else "loses small updates"
        yield _problem(
            "precision.base",
            f"without an adapter the base itself trains, and training {base} weights {harm}",
            f"use `precision: {base}`, which computes in {base} over fp32 weights, or add an adapter",
            "adapter",
        )


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _evaluation,
    _samples,
    _schedule,
    _batch,
    _attention,
    _precision,
)
