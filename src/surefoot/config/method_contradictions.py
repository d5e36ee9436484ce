"""Keys that belong to one training method, set in a run of another; and keys of one method that exclude each other.

A key at its default never contradicts, see `surefoot.config.contradictions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from surefoot.config.methods import AlignmentConfig, PpoConfig
from surefoot.config.problems import Problem
from surefoot.config.schema import DataConfig, ParallelConfig, RunConfig
from surefoot.method_facts.losses import NO_REFERENCE, read_by
from surefoot.method_facts.methods import METHODS, SECTIONS, methods_of
from surefoot.system.locations import is_address
from surefoot.system.redaction import veiled

_FOR_ANSWERS = ("train_on", "encoding")  # keys of data for the methods that learn marked tokens
_WRITES = {"samples": "count", "metrics": "names"}  # section on answers that the model writes -> the key that asks


def unread_keys(stage: str) -> frozenset[str]:
    """Sections and keys that this stage does not read."""
    method = METHODS[stage]
    found = {section for section in SECTIONS if section != method.section}
    found |= {f"{one.section}.{key}" for name, one in METHODS.items() if name != stage for key in one.own_keys}
    if not method.learns_tokens:
        found |= {*(f"data.{name}" for name in _FOR_ANSWERS), "data.packing", "optim.neftune_alpha"}
    if method.scores:
        found |= set(_WRITES)
    return frozenset(found)


def changed_keys(section: Any) -> list[str]:
    """Names of the keys of a section that are not at their default."""
    fields = type(section).model_fields
    return [
        name for name, field in fields.items() if getattr(section, name) != field.get_default(call_default_factory=True)
    ]


def sections(config: RunConfig) -> Iterator[Problem]:
    """One problem for each section that this stage does not read."""
    for section in SECTIONS:
        keys = [f"{section}.{name}" for name in changed_keys(getattr(config, section))]
        if keys and section != config.method.section:
            what = f"belongs to stage {' and '.join(methods_of(section))}, and stage is {config.stage}"
            others = f" (as {', '.join(keys[1:])})" if len(keys) > 1 else ""
            yield problem(keys[0], f"{what}{others}", "leave it out, or choose that stage", "stage", *keys[1:])


def layouts(config: RunConfig) -> Iterator[Problem]:
    """The layout that data.format or a source names, against what the stage learns from."""
    for key, layout in _formats(config):
        taken = config.method.formats
        if taken is None or layout in ("auto", "custom", *taken):
            continue
        what = f"{layout} is for stage {' or '.join(_learning(layout))}, and stage is {config.stage}"
        fix = f"use {' or '.join(taken)}, or another stage"
        yield problem(key, what, fix, "stage")


def _learning(layout: str) -> list[str]:
    """The methods that learn from a layout; from one that none names, those that take any."""
    named = [name for name, method in METHODS.items() if layout in (method.formats or ())]
    return named or [name for name, method in METHODS.items() if method.formats is None]


def _formats(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "data.format", config.data.format
    for key in ("train", "eval"):
        sources = getattr(config.data, key)
        if isinstance(sources, tuple):
            yield from ((f"data.{key}.{place}.format", one.format) for place, one in enumerate(sources))


def preferences(config: RunConfig) -> Iterator[Problem]:
    """What supervised training may choose, and training on preferences or rewards may not."""
    if config.method.learns_tokens:
        return
    for key in _FOR_ANSWERS:
        if getattr(config.data, key) != DataConfig.model_fields[key].default:
            what = f"stage {config.stage} looks at answers alone, each encoded behind the same prompt"
            yield problem(f"data.{key}", what, "leave it out, or use stage: sft", "stage")
    if config.optim.neftune_alpha is not None:
        what = f"NEFTune would perturb what stage {config.stage} compares: {config.method.compared}"
        yield problem("optim.neftune_alpha", what, "leave it out, or use stage: sft", "stage")
    for section, key in _WRITES.items():
        if getattr(getattr(config, section), key) and config.method.scores:
            what = f"stage {config.stage} trains a score, which writes no answers"
            yield problem(f"{section}.{key}", what, f"leave {section} out", "stage")


def shared_sections(config: RunConfig) -> Iterator[Problem]:
    """Keys of a section that another method of the same section reads alone."""
    section, stage = config.method.section, config.stage
    if section is None:
        return
    changed = changed_keys(getattr(config, section))
    for own in (name for name in methods_of(section) if name != stage):
        for key in (key for key in changed if key in METHODS[own].own_keys):
            yield problem(f"{section}.{key}", f"belongs to stage {own}, and stage is {stage}", "leave it out", "stage")


def losses(config: RunConfig) -> Iterator[Problem]:
    """Keys that the chosen loss does not read, where other losses of the method do."""
    method = config.method
    if config.loss is None:
        return
    given = getattr(config, str(method.section))
    key_of_loss = f"{method.section}.loss"
    for key in changed_keys(given):
        readers = read_by(key, method.losses)
        if readers and key not in config.loss.keys:
            named = " and ".join(readers)
            what = f"of the losses only {named} {'reads' if len(readers) == 1 else 'read'} it, and it is {given.loss}"
            fix = f"leave it out, or set {key_of_loss} to {' or '.join(readers)}"
            yield problem(f"{method.section}.{key}", what, fix, key_of_loss)


def references(config: RunConfig) -> Iterator[Problem]:
    if not config.method.reference:
        return
    given, default, stage = config.alignment, AlignmentConfig(), config.stage
    if not config.needs_reference:
        if given.reference != default.reference and given.loss in config.method.losses:
            what = f"alignment.loss {given.loss} compares with no reference"
            yield problem("alignment.reference", what, "leave it out", "alignment.loss")
        return
    if given.reference == NO_REFERENCE:
        what = f"{given.loss if config.loss else stage} compares with a reference"
        yield problem("alignment.reference", what, "leave it out, or use model or cached", "alignment.loss")
    if config.method.other_prompts and given.reference == "cached":
        what = (
            f"stage {stage} pairs prompts with other answers in each step, whose log-probabilities nobody knows before"
        )
        yield problem("alignment.reference", what, "use adapter-off or model, or leave it out", "stage")
    if config.method.other_prompts and config.batch.size == 1:
        what = (
            f"stage {stage} pairs each prompt with the answer of another example of the step, and a step of 1 has none"
        )
        yield problem("batch.size", what, "use at least 2", "stage")
    if given.reference == "adapter-off" and config.adapter is None:
        what = "there is no adapter that could be switched off"
        yield problem("alignment.reference", what, "add an adapter, or use model or cached", "adapter")


def rollouts(config: RunConfig) -> Iterator[Problem]:
    """Of every method that answers prompts."""
    if not config.method.rollouts:
        return
    given, section = config.rollout, config.method.section
    if given.engine == "vllm" and given.vllm_url is None:
        what = "vllm answers over HTTP, and no address is given"
        yield problem(f"{section}.engine", what, f"set {section}.vllm_url, or use embedded", f"{section}.vllm_url")
    if given.engine == "vllm" and config.adapter is not None and config.adapter.kind != "lora":
        what = "a vLLM server takes LoRA adapters or all weights"
        yield problem(f"{section}.engine", what, "use adapter.kind lora, or embedded", "adapter")
    if given.engine != "vllm" and given.vllm_url is not None:
        what = f"is the address of a vLLM server, and {section}.engine is {given.engine}"
        fix = f"set {section}.engine to vllm, or leave it out"
        yield problem(f"{section}.vllm_url", what, fix, f"{section}.engine")
    length, most = config.data.max_length, f"{section}.max_new_tokens"
    if isinstance(length, int) and length <= given.max_new_tokens:
        what = f"{length} tokens hold no prompt beside an answer of up to {given.max_new_tokens} ({most})"
        yield problem("data.max_length", what, f"raise it, or lower {most}", most)


def groups(config: RunConfig) -> Iterator[Problem]:
    """Of a method that compares several answers to one prompt."""
    if not config.method.rollouts or config.method.critic:
        return
    given = config.grpo
    if config.batch.size % given.group:
        what = f"a step learns from whole groups, and {config.batch.size} answers are no multiple of {given.group}"
        near = max(1, round(config.batch.size / given.group)) * given.group
        yield problem("batch.size", what, f"use {near}, or another grpo.group", "grpo.group")
    buffer = given.overlong_buffer
    if buffer is not None and given.overlong != "penalise":
        what = f"grpo.overlong is {given.overlong}, and only penalise reads it"
        yield problem("grpo.overlong_buffer", what, "leave it out, or set grpo.overlong to penalise", "grpo.overlong")
    if buffer is not None and buffer > given.max_new_tokens:
        what = f"{buffer} tokens are more than the longest answer has, {given.max_new_tokens} (grpo.max_new_tokens)"
        yield problem("grpo.overlong_buffer", what, "lower it", "grpo.max_new_tokens")
    low, high = given.correction_low, given.correction_high
    defaults = type(given).model_fields
    for key, bound in (("correction_low", low), ("correction_high", high)):
        if given.correction == "none" and bound != defaults[key].default:
            what = "bounds the ratio of a correction, and grpo.correction is none"
            yield problem(f"grpo.{key}", what, "name a correction, or leave it out", "grpo.correction")
    if low is not None and high is not None and low > high:
        yield problem(
            "grpo.correction_low", f"{low:g} is above grpo.correction_high, {high:g}", "", "grpo.correction_high"
        )
    if given.engine == "vllm" and given.top_p < 1 and given.top_k is None:
        what = "a server tells some tokens alone, and the ratio needs all that top_p leaves to draw from"
        fix = "set grpo.top_k to 20 at most, which vLLM tells unless its --max-logprobs is higher, or leave top_p out"
        yield problem("grpo.top_p", what, fix, "grpo.top_k")
    for place, term in enumerate(given.rewards):
        if term.name == "code" and not given.run_code:
            what = "runs programs that the model writes, which nobody has allowed"
            fix = "read SECURITY.md on what confines them, then set grpo.run_code: true"
            yield problem(f"grpo.rewards.{place}.name", what, fix, "grpo.run_code")
        if is_address(term.name) and veiled(term.name) != term.name:
            what = "holds what looks like a key or a password, and a run's records hold its settings"
            yield problem(f"grpo.rewards.{place}.name", what, "leave it out: a proxy on this machine can add it")


def ppo(config: RunConfig) -> Iterator[Problem]:
    given = config.ppo
    if not config.method.critic:
        return
    if given.unsup_coef > 0 and given.unsup_data == "none":
        yield problem("ppo.unsup_coef", "there is no ppo.unsup_data to weigh", "name the texts", "ppo.unsup_data")
    if given.unsup_coef == 0 and given.unsup_data != "none":
        what = "ppo.unsup_coef is 0, so nothing would be learned from it"
        yield problem("ppo.unsup_data", what, "give a weight (DeepSpeed-Chat has 27.8)", "ppo.unsup_coef")
    for key, address in (("ppo.reward", given.reward), ("ppo.vllm_url", given.vllm_url)):
        if address is not None and address.startswith(("http://", "https://")) and veiled(address) != address:
            what = "holds what looks like a key or a password, and a run's records hold its settings"
            yield problem(key, what, "leave it out: a proxy on this machine can add it")
    if given.kl_horizon != PpoConfig.model_fields["kl_horizon"].default and given.kl_target is None:
        what = "the coefficient is steered only towards ppo.kl_target, and that is not set"
        yield problem("ppo.kl_horizon", what, "set ppo.kl_target, or leave it out", "ppo.kl_target")


def parallel(config: RunConfig) -> Iterator[Problem]:
    given, default = config.parallel, ParallelConfig()
    if given.engine == "single" and (given.nproc or 1) > 1:
        what = f"{given.nproc} processes cannot run as one (parallel.engine: single)"
        yield problem("parallel.nproc", what, "leave one of them out", "parallel.engine")
    if given.zero_stage != default.zero_stage and given.engine != "deepspeed":
        what = f"is DeepSpeed's, and parallel.engine is {given.engine}"
        yield problem(
            "parallel.zero_stage", what, "set parallel.engine to deepspeed, or leave it out", "parallel.engine"
        )
    if given.offload != default.offload and given.engine in ("single", "ddp"):
        what = f"parallel.engine {given.engine} keeps everything on its device"
        yield problem("parallel.offload", what, "use fsdp2 or deepspeed, or leave it out", "parallel.engine")


def problem(key: str, what: str, fix: str, *others: str) -> Problem:
    """A value that cannot stand beside those of `others`."""
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
    ppo,
    parallel,
)
