"""Keys that belong to one training method, set in a run of another; and keys of one method that exclude each other.

A key at its default never contradicts, see `surefoot.config.contradictions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from surefoot.config.methods import AlignmentConfig, PpoConfig, RewardConfig
from surefoot.config.problems import Problem
from surefoot.config.schema import DataConfig, ParallelConfig, RunConfig
from surefoot.system.redaction import veiled

_OWNERS = {"reward": ("reward",), "alignment": ("dpo", "kto"), "ppo": ("ppo",)}  # section -> stages that read it
_ONE_STAGE = {  # keys of alignment that only one of its stages reads
    "dpo": ("loss", "label_smoothing", "margin", "sft"),
    "kto": ("good", "bad"),
}
_LAYOUTS = {  # stage -> what its data may be called
    "pretrain": ("text",),
    "sft": ("alpaca", "sharegpt", "messages", "prompt-completion", "text", "commonsense", "preference"),
    "reward": ("preference",),
    "dpo": ("preference",),
    "kto": ("judged",),
}
_NEEDS = {"preference": "reward or dpo", "judged": "kto", "prompts": "ppo", "text": "pretrain or sft"}
_WITHOUT_REFERENCE = ("orpo", "simpo")
_LEARNS_TEXTS = ("pretrain", "sft")
_FOR_ANSWERS = ("train_on", "encoding")  # keys of data for the stages that learn texts
_WRITES = {"samples": "count", "metrics": "names"}  # section on answers that the model writes -> the key that asks


def unread_keys(stage: str) -> frozenset[str]:
    """Sections and keys that this stage does not read."""
    found = {section for section, stages in _OWNERS.items() if stage not in stages}
    found |= {f"alignment.{name}" for own, keys in _ONE_STAGE.items() if own != stage for name in keys}
    if stage not in _LEARNS_TEXTS:
        found |= {*(f"data.{name}" for name in _FOR_ANSWERS), "data.packing", "optim.neftune_alpha"}
    if stage == "reward":
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
    for section, stages in _OWNERS.items():
        keys = [f"{section}.{name}" for name in changed_keys(getattr(config, section))]
        if keys and config.stage not in stages:
            what = f"belongs to stage {' and '.join(stages)}, and stage is {config.stage}"
            others = f" (as {', '.join(keys[1:])})" if len(keys) > 1 else ""
            yield problem(keys[0], f"{what}{others}", "leave it out, or choose that stage", "stage", *keys[1:])


def layouts(config: RunConfig) -> Iterator[Problem]:
    """The layout that data.format or a source names, against what the stage learns from."""
    for key, layout in _formats(config):
        if config.stage == "ppo" or layout in ("auto", "custom", *_LAYOUTS[config.stage]):
            continue
        what = f"{layout} is for stage {_NEEDS.get(layout, 'sft')}, and stage is {config.stage}"
        fix = f"use {' or '.join(_LAYOUTS[config.stage])}, or another stage"
        yield problem(key, what, fix, "stage")


def _formats(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "data.format", config.data.format
    for key in ("train", "eval"):
        sources = getattr(config.data, key)
        if isinstance(sources, tuple):
            yield from ((f"data.{key}.{place}.format", one.format) for place, one in enumerate(sources))


def preferences(config: RunConfig) -> Iterator[Problem]:
    """What supervised training may choose, and training on preferences or rewards may not."""
    if config.stage in _LEARNS_TEXTS:
        return
    for key in _FOR_ANSWERS:
        if getattr(config.data, key) != DataConfig.model_fields[key].default:
            what = f"stage {config.stage} looks at answers alone, each encoded behind the same prompt"
            yield problem(f"data.{key}", what, "leave it out, or use stage: sft", "stage")
    if config.optim.neftune_alpha is not None:
        what = f"noise would fall on what stage {config.stage} compares"
        yield problem("optim.neftune_alpha", what, "leave it out, or use stage: sft", "stage")
    for section, key in _WRITES.items():
        if getattr(getattr(config, section), key) and config.stage == "reward":
            what = "stage reward trains a score, which writes no answers"
            yield problem(f"{section}.{key}", what, f"leave {section} out", "stage")


def alignment(config: RunConfig) -> Iterator[Problem]:
    given, stage = config.alignment, config.stage
    for own, keys in _ONE_STAGE.items():
        for name in (name for name in changed_keys(given) if name in keys and stage in ("dpo", "kto") and stage != own):
            yield problem(f"alignment.{name}", f"belongs to stage {own}, and stage is {stage}", "leave it out", "stage")
    if stage != "dpo":
        return
    default = AlignmentConfig()
    if given.label_smoothing and given.loss != "sigmoid":
        what = f"only the sigmoid loss knows it, and alignment.loss is {given.loss}"
        yield problem("alignment.label_smoothing", what, "leave it out, or use sigmoid", "alignment.loss")
    if given.margin != default.margin and given.loss != "simpo":
        what = f"only the simpo loss has one, and alignment.loss is {given.loss}"
        yield problem("alignment.margin", what, "leave it out, or use simpo", "alignment.loss")
    if given.reference != default.reference and given.loss in _WITHOUT_REFERENCE:
        what = f"alignment.loss {given.loss} compares with no reference"
        yield problem("alignment.reference", what, "leave it out", "alignment.loss")


def references(config: RunConfig) -> Iterator[Problem]:
    if config.stage == "kto" and config.alignment.reference == "cached":
        what = "stage kto pairs prompts with other answers in each step, whose log-probabilities nobody knows before"
        yield problem("alignment.reference", what, "use adapter-off or model, or leave it out", "stage")
    if config.stage == "kto" and config.batch.size == 1:
        what = "stage kto pairs each prompt with the answer of another example of the step, and a step of 1 has none"
        yield problem("batch.size", what, "use at least 2", "stage")
    if config.stage in ("dpo", "kto") and config.alignment.reference == "adapter-off" and config.adapter is None:
        what = "there is no adapter that could be switched off"
        yield problem("alignment.reference", what, "add an adapter, or use model or cached", "adapter")


def reward(config: RunConfig) -> Iterator[Problem]:
    padding, default = config.reward.num_padding_at_beginning, RewardConfig().num_padding_at_beginning
    if config.stage == "reward" and config.reward.loss != "divergence" and padding != default:
        what = "only the divergence loss looks at the beginning, and reward.loss is last"
        fix = "leave it out, or set reward.loss to divergence"
        yield problem("reward.num_padding_at_beginning", what, fix, "reward.loss")


def ppo(config: RunConfig) -> Iterator[Problem]:
    given = config.ppo
    if config.stage != "ppo":
        return
    if given.unsup_coef > 0 and given.unsup_data == "none":
        yield problem("ppo.unsup_coef", "there is no ppo.unsup_data to weigh", "name the texts", "ppo.unsup_data")
    if given.unsup_coef == 0 and given.unsup_data != "none":
        what = "ppo.unsup_coef is 0, so nothing would be learned from it"
        yield problem("ppo.unsup_data", what, "give a weight (DeepSpeed-Chat has 27.8)", "ppo.unsup_coef")
    if given.engine == "vllm" and given.vllm_url is None:
        what = "vllm answers over HTTP, and no address is given"
        yield problem("ppo.engine", what, "set ppo.vllm_url, or use embedded", "ppo.vllm_url")
    if given.engine == "vllm" and (config.adapter is None or config.adapter.kind != "lora"):
        what = "a vLLM server takes LoRA adapters alone while it runs"
        yield problem("ppo.engine", what, "use adapter.kind lora, or embedded", "adapter")
    if given.engine != "vllm" and given.vllm_url is not None:
        what = f"is the address of a vLLM server, and ppo.engine is {given.engine}"
        yield problem("ppo.vllm_url", what, "set ppo.engine to vllm, or leave it out", "ppo.engine")
    for key, address in (("ppo.reward", given.reward), ("ppo.vllm_url", given.vllm_url)):
        if address is not None and address.startswith(("http://", "https://")) and veiled(address) != address:
            what = "holds what looks like a key or a password, and a run's records hold its settings"
            yield problem(key, what, "leave it out: a proxy on this machine can add it")
    if given.kl_horizon != PpoConfig.model_fields["kl_horizon"].default and given.kl_target is None:
        what = "the coefficient is steered only towards ppo.kl_target, and that is not set"
        yield problem("ppo.kl_horizon", what, "set ppo.kl_target, or leave it out", "ppo.kl_target")
    length = config.data.max_length
    if isinstance(length, int) and length <= given.max_new_tokens:
        what = f"{length} tokens hold no prompt beside an answer of up to {given.max_new_tokens} (ppo.max_new_tokens)"
        yield problem("data.max_length", what, "raise it, or lower ppo.max_new_tokens", "ppo.max_new_tokens")


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
    alignment,
    references,
    reward,
    ppo,
    parallel,
)
