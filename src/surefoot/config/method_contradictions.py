"""Check for keys of one training method in a run of another, and for keys of a method that exclude each other.

A key at its default never conflicts, see `surefoot.config.contradictions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from surefoot.config.methods import AlignmentConfig, PpoConfig
from surefoot.config.problems import Problem
from surefoot.config.schema import RunConfig
from surefoot.config.sections import DataConfig, ParallelConfig
from surefoot.method_facts.losses import GROUP_LOSSES, NO_REFERENCE, read_by
from surefoot.method_facts.methods import METHODS, SECTIONS, methods_of
from surefoot.system.locations import is_address, is_function
from surefoot.system.redaction import veiled

_FOR_ANSWERS = ("train_on", "encoding")  # keys of data for methods with a loss on selected tokens
_WRITES = {"samples": "count", "metrics": "names"}  # section about generated answers -> key that enables it


def unread_keys(stage: str) -> frozenset[str]:
    """Return the sections and keys that a stage does not read."""
    method = METHODS[stage]
    found = {section for section in SECTIONS if section != method.section}
    found |= {f"{one.section}.{key}" for name, one in METHODS.items() if name != stage for key in one.own_keys}
    if not method.learns_tokens:
        found |= {*(f"data.{name}" for name in _FOR_ANSWERS), "data.packing", "optim.neftune_alpha"}
    if method.scores:
        found |= set(_WRITES)
    return frozenset(found)


def changed_keys(section: Any) -> list[str]:
    """Return the keys of a section that are not at their default."""
    fields = type(section).model_fields
    return [
        name for name, field in fields.items() if getattr(section, name) != field.get_default(call_default_factory=True)
    ]


def sections(config: RunConfig) -> Iterator[Problem]:
    """Yield one problem per section that is set but not read by the stage."""
    for section in SECTIONS:
        keys = [f"{section}.{name}" for name in changed_keys(getattr(config, section))]
        if keys and section != config.method.section:
            what = f"belongs to stage {' and '.join(methods_of(section))}, but stage is {config.stage}"
            others = f" (as {', '.join(keys[1:])})" if len(keys) > 1 else ""
            yield problem(keys[0], f"{what}{others}", "leave it out, or choose that stage", "stage", *keys[1:])


def layouts(config: RunConfig) -> Iterator[Problem]:
    """Check the formats of data.format and sources against the stage."""
    for key, layout in _formats(config):
        taken = config.method.formats
        if taken is None or layout in ("auto", "custom", *taken):
            continue
        what = f"{layout} is for stage {' or '.join(_learning(layout))}, but stage is {config.stage}"
        fix = f"use {' or '.join(taken)}, or another stage"
        yield problem(key, what, fix, "stage")


def _learning(layout: str) -> list[str]:
    """Return the methods for a format; if none names it, those that take any."""
    named = [name for name, method in METHODS.items() if layout in (method.formats or ())]
    return named or [name for name, method in METHODS.items() if method.formats is None]


def _formats(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "data.format", config.data.format
    for key in ("train", "eval"):
        sources = getattr(config.data, key)
        if isinstance(sources, tuple):
            yield from ((f"data.{key}.{place}.format", one.format) for place, one in enumerate(sources))


def preferences(config: RunConfig) -> Iterator[Problem]:
    """Check for keys of supervised training in preference, reward or RL stages."""
    if config.method.learns_tokens:
        return
    for key in _FOR_ANSWERS:
        if getattr(config.data, key) != DataConfig.model_fields[key].default:
            what = f"stage {config.stage} uses only answers, each encoded after the same prompt"
            yield problem(f"data.{key}", what, "leave it out, or use stage: sft", "stage")
    if config.optim.neftune_alpha is not None:
        what = f"NEFTune would add noise to what stage {config.stage} compares: {config.method.compared}"
        yield problem("optim.neftune_alpha", what, "leave it out, or use stage: sft", "stage")
    for section, key in _WRITES.items():
        if getattr(getattr(config, section), key) and config.method.scores:
            what = f"stage {config.stage} trains a reward model, which generates no answers"
            yield problem(f"{section}.{key}", what, f"leave {section} out", "stage")


def shared_sections(config: RunConfig) -> Iterator[Problem]:
    """Check for keys that only another method of the same section reads."""
    section, stage = config.method.section, config.stage
    if section is None:
        return
    changed = changed_keys(getattr(config, section))
    for own in (name for name in methods_of(section) if name != stage):
        for key in (key for key in changed if key in METHODS[own].own_keys):
            yield problem(f"{section}.{key}", f"belongs to stage {own}, but stage is {stage}", "leave it out", "stage")


def losses(config: RunConfig) -> Iterator[Problem]:
    """Check for keys that other losses of the method read but the chosen one does not."""
    method = config.method
    if config.loss is None:
        return
    given = getattr(config, str(method.section))
    key_of_loss = f"{method.section}.loss"
    for key in changed_keys(given):
        readers = read_by(key, method.losses)
        if key in config.loss.unread:
            what = f"the loss {given.loss} does not read it"
            yield problem(f"{method.section}.{key}", what, "leave it out, or choose another loss", key_of_loss)
        elif readers and key not in config.loss.keys:
            named = " and ".join(readers)
            what = f"only the loss {named} reads it, but the loss is {given.loss}"
            fix = f"leave it out, or set {key_of_loss} to {' or '.join(readers)}"
            yield problem(f"{method.section}.{key}", what, fix, key_of_loss)
    if config.functions.loss is not None and "loss" in changed_keys(given):
        what = "functions.loss replaces it"
        yield problem(key_of_loss, what, "leave one of them out", "functions.loss")
    for key in config.loss.positive:
        if not getattr(given, key):
            what = f"must be above 0: the loss {given.loss} divides by it"
            yield problem(f"{method.section}.{key}", what, "set it, such as to 0.001", key_of_loss)


def references(config: RunConfig) -> Iterator[Problem]:
    if not config.method.reference:
        return
    given, default, stage = config.alignment, AlignmentConfig(), config.stage
    if given.sft_prompt and (config.needs_reference or not (given.sft or (config.loss and config.loss.sft))):
        what = "counts prompts in the cross entropy of a loss without a reference"
        yield problem("alignment.sft_prompt", what, "leave it out, or set alignment.loss to orpo", "alignment.loss")
    if not config.needs_reference:
        if given.reference != default.reference and given.loss in config.method.losses:
            what = f"alignment.loss {given.loss} uses no reference"
            yield problem("alignment.reference", what, "leave it out", "alignment.loss")
        return
    if given.reference == NO_REFERENCE:
        what = f"{given.loss if config.loss else stage} needs a reference"
        yield problem("alignment.reference", what, "leave it out, or use model or cached", "alignment.loss")
    if config.method.other_prompts and given.reference == "cached":
        what = f"stage {stage} pairs prompts with other answers in each step, whose log-probabilities cannot be cached"
        yield problem("alignment.reference", what, "use adapter-off or model, or leave it out", "stage")
    if config.method.other_prompts and config.batch.size == 1:
        what = (
            f"stage {stage} pairs each prompt with the answer of another example of the step, but a step has only one"
        )
        yield problem("batch.size", what, "use at least 2", "stage")
    if given.reference == "adapter-off" and config.adapter is None:
        what = "there is no adapter to switch off"
        yield problem("alignment.reference", what, "add an adapter, or use model or cached", "adapter")


def rollouts(config: RunConfig) -> Iterator[Problem]:
    """Check runs that draw answers."""
    if not config.draws:
        return
    given, section = config.rollout, config.method.section
    if given.engine == "vllm" and given.vllm_url is None:
        what = "vllm is used over HTTP, but no address is given"
        yield problem(f"{section}.engine", what, f"set {section}.vllm_url, or use embedded", f"{section}.vllm_url")
    if given.engine == "vllm" and config.adapter is not None and config.adapter.kind != "lora":
        what = "a vLLM server accepts LoRA adapters or full weights"
        yield problem(f"{section}.engine", what, "use adapter.kind: lora, or embedded", "adapter")
    if given.engine != "vllm" and given.vllm_url is not None:
        what = f"is the address of a vLLM server, but {section}.engine is {given.engine}"
        fix = f"set {section}.engine to vllm, or leave it out"
        yield problem(f"{section}.vllm_url", what, fix, f"{section}.engine")
    length, most = config.data.max_length, f"{section}.max_new_tokens"
    if isinstance(length, int) and length <= given.max_new_tokens:
        what = f"{length} tokens leave no room for a prompt with answers of up to {given.max_new_tokens} ({most})"
        yield problem("data.max_length", what, f"raise it, or lower {most}", most)


def groups(config: RunConfig) -> Iterator[Problem]:
    """Check methods that compare several answers per prompt."""
    if not config.method.rollouts or config.method.critic:
        return
    given = config.grpo
    if config.batch.size % given.group:
        what = f"a step needs whole groups, but {config.batch.size} answers are not a multiple of {given.group}"
        near = max(1, round(config.batch.size / given.group)) * given.group
        yield problem("batch.size", what, f"use {near}, or another grpo.group", "grpo.group")
    if given.kl_by_ratio and GROUP_LOSSES[given.loss].penalty == "score":
        what = f"grpo.loss is {given.loss}, whose KL penalty is part of the score"
        yield problem("grpo.kl_by_ratio", what, "leave it out", "grpo.loss")
    buffer = given.overlong_buffer
    if buffer is not None and given.overlong != "penalise":
        what = f"only grpo.overlong: penalise reads it, but it is {given.overlong}"
        yield problem("grpo.overlong_buffer", what, "leave it out, or set grpo.overlong to penalise", "grpo.overlong")
    if buffer is not None and buffer > given.max_new_tokens:
        what = f"{buffer} tokens exceed the maximum answer length of {given.max_new_tokens} (grpo.max_new_tokens)"
        yield problem("grpo.overlong_buffer", what, "lower it", "grpo.max_new_tokens")
    low, high = given.correction_low, given.correction_high
    defaults = type(given).model_fields
    for key, bound in (("correction_low", low), ("correction_high", high)):
        if given.correction == "none" and bound != defaults[key].default:
            what = "bounds the correction ratio, but grpo.correction is none"
            yield problem(f"grpo.{key}", what, "choose a correction, or leave it out", "grpo.correction")
    if low is not None and high is not None and low > high:
        yield problem(
            "grpo.correction_low", f"{low:g} is above grpo.correction_high, {high:g}", "", "grpo.correction_high"
        )
    if given.engine == "vllm" and given.top_p < 1 and given.top_k is None:
        what = "a server returns only some log-probabilities, but the ratio needs those of all tokens within top_p"
        fix = "set grpo.top_k to at most 20 (or to vLLM's --max-logprobs), or leave top_p out"
        yield problem("grpo.top_p", what, fix, "grpo.top_k")
    if given.environment is not None and not is_address(given.environment.name):
        for key in ("action", "observation"):
            if getattr(given.environment, key) is not None:
                what = "names a field of an OpenEnv server, and the environment is a class"
                yield problem(f"grpo.environment.{key}", what, "leave it out", "grpo.environment.name")
    for place, term in enumerate(given.rewards):
        if term.convention and not (is_function(term.name) or term.name.startswith("entry_point:")):
            what = f"says how a function is called, but {term.name} is none"
            yield problem(f"grpo.rewards.{place}.convention", what, "leave it out", f"grpo.rewards.{place}.name")
        if term.name == "code" and not given.run_code:
            what = "runs programs that the model writes, which is not allowed yet"
            fix = "read SECURITY.md about the sandbox, then set grpo.run_code: true"
            yield problem(f"grpo.rewards.{place}.name", what, fix, "grpo.run_code")


_SERVED = ("teacher_name", "top")  # keys of distill about a teacher on a server
_DRAWING = ("max_new_tokens", "sampling_temperature", "engine", "vllm_url")  # keys of distill about drawn answers


def teachers(config: RunConfig) -> Iterator[Problem]:
    """Check methods with a teacher."""
    if not config.method.teacher:
        return
    if config.distill.teacher is None:
        what = f"stage {config.stage} learns from a teacher, and none is named"
        yield problem("distill.teacher", what, "name its folder or hub id", "stage")
    for key in changed_keys(config.tokenizer):
        if key in ("add", "add_special"):
            what = "a teacher knows no token that is added here"
            yield problem(f"tokenizer.{key}", what, "add the tokens to the folders of both models first", "stage")
    if is_address(config.distill.teacher or ""):
        if config.distill.temperature != 1:
            what = "a server returns only some log-probabilities, at temperature 1; those at another one need all"
            fix = "leave it out, or name the teacher's folder"
            yield problem("distill.temperature", what, fix, "distill.teacher")
    else:
        for key in (key for key in changed_keys(config.distill) if key in _SERVED):
            what = "is about a teacher on a server, and distill.teacher is no address"
            yield problem(f"distill.{key}", what, "leave it out", "distill.teacher")
    if not config.draws:
        for key in (key for key in changed_keys(config.distill) if key in _DRAWING):
            what = "is about answers that the student draws, but distill.on_policy is 0"
            yield problem(f"distill.{key}", what, "leave it out, or set distill.on_policy", "distill.on_policy")


def ppo(config: RunConfig) -> Iterator[Problem]:
    given = config.ppo
    if not config.method.critic:
        return
    if given.unsup_coef > 0 and given.unsup_data == "none":
        yield problem("ppo.unsup_coef", "there is no ppo.unsup_data", "set ppo.unsup_data", "ppo.unsup_data")
    if given.unsup_coef == 0 and given.unsup_data != "none":
        what = "ppo.unsup_coef is 0, so it would have no effect"
        yield problem("ppo.unsup_data", what, "set a weight (DeepSpeed-Chat uses 27.8)", "ppo.unsup_coef")
    if given.kl_horizon != PpoConfig.model_fields["kl_horizon"].default and given.kl_target is None:
        what = "the coefficient adapts only if ppo.kl_target is set"
        yield problem("ppo.kl_horizon", what, "set ppo.kl_target, or leave it out", "ppo.kl_target")


def addresses(config: RunConfig) -> Iterator[Problem]:
    """Check for addresses with a secret in them."""
    ppo, grpo = config.ppo, config.grpo
    named = {
        "ppo.reward": ppo.reward,
        "ppo.vllm_url": ppo.vllm_url,
        "grpo.vllm_url": grpo.vllm_url,
        "distill.teacher": config.distill.teacher,
        "distill.vllm_url": config.distill.vllm_url,
        "grpo.environment.name": grpo.environment.name if grpo.environment else None,
        **{f"grpo.rewards.{place}.name": term.name for place, term in enumerate(grpo.rewards)},
    }
    for key, address in named.items():
        if address is not None and is_address(address) and veiled(address) != address:
            what = "contains what looks like a key or a password, which would be written to the run's files"
            yield problem(key, what, "leave it out; a local proxy can add it")


def parallel(config: RunConfig) -> Iterator[Problem]:
    given, default = config.parallel, ParallelConfig()
    if given.engine == "single" and (count := (given.nproc or 1) * given.machines) > 1:
        what = f"parallel.engine: single runs one process, not {count}"
        yield problem("parallel.nproc", what, "leave one of them out", "parallel.engine")
    if given.machines > 1 and given.nproc is None:
        what = f"each of {given.machines} machines has to know how many processes to start"
        yield problem("parallel.machines", what, "set parallel.nproc, or use torchrun without both", "parallel.nproc")
    if given.zero_stage != default.zero_stage and given.engine != "deepspeed":
        what = f"belongs to DeepSpeed, but parallel.engine is {given.engine}"
        yield problem(
            "parallel.zero_stage", what, "set parallel.engine to deepspeed, or leave it out", "parallel.engine"
        )
    if given.offload != default.offload and given.engine == "ddp":
        what = "parallel.engine ddp cannot offload"
        yield problem("parallel.offload", what, "use fsdp2 or deepspeed, or leave it out", "parallel.engine")


def problem(key: str, what: str, fix: str, *others: str) -> Problem:
    """Return a problem for a value that conflicts with those of `others`."""
    return Problem(key, what, fix, "value", (key, *others), "SF-CONFIG-CONFLICT")


RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    sections,
    layouts,
    preferences,
    shared_sections,
    losses,
    references,
    rollouts,
    groups,
    teachers,
    ppo,
    addresses,
    parallel,
)
