"""`surefoot init`: write a commented config from the files of model and data, without loading weights.

The proposal is a starting point, not a measurement: full fine-tuning for small models that fit, LoRA otherwise; unless
given, the stage is the one that learns from such data, and alpha is twice the rank. Values that are given as KEY=VALUE
stand in it. Comments say what the plan would decide.

`starting_config` writes the most used keys of the stage, grouped and explained, then the names of the others. Keys and
explanations come from the schema, so new keys appear here as well; keys that the stage does not read are left out.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from surefoot.commands.terminal import echo
from surefoot.config.dump import shown
from surefoot.config.keys import Key, all_keys, as_yaml, config_schema, typed_key
from surefoot.config.load import check_config
from surefoot.config.method_contradictions import unread_keys
from surefoot.config.overrides import Sources, apply_override, expand_short_forms, with_settings
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import Document
from surefoot.method_facts.methods import METHODS, SECTIONS
from surefoot.planning.memory import fits
from surefoot.planning.plan import RunPlan
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import counted, size_text


@click.command()
@click.argument("model")
@click.argument("data")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--out", "out", default="run.yaml", show_default=True, type=click.Path(path_type=Path), help="Where to write it."
)
@click.option(
    "--stage",
    type=click.Choice(list(METHODS)),
    help="Training stage.  [default: what DATA fits]",
)
def init(model: str, data: str, overrides: tuple[str, ...], out: Path, stage: str | None) -> None:
    """Look at MODEL (folder or hub id) and DATA (file, folder or hub id) and write a config in which every line is
    explained. It asks no questions and overwrites nothing.

    Keys whose value you know are given behind DATA: surefoot init base data.json adapter.rank=64

    surefoot init base questions.jsonl --stage grpo grpo.rewards=[numeric]

    The JSON Schema with which editors check the config is written next to it, as surefoot.schema.json.
    """
    schema = out.parent / "surefoot.schema.json"
    for path in (out, schema):
        if path.exists() and not (path == schema and _is_ours(schema)):
            raise InputError(Fault(str(path), "already exists", "name another file with --out", code="SF-USE-OUTPUT"))

    text = propose(model, data, schema=schema.name, stage=stage, overrides=overrides)
    durable.make_folders(out.parent)
    durable.write_json(schema, config_schema())
    durable.write_text(out, text)
    echo(f"wrote {out} and {schema}")
    echo(f"next: surefoot plan {out}")


def _is_ours(schema: Path) -> bool:
    """Whether a schema file was written by surefoot, and so may be overwritten."""
    try:
        return json.loads(schema.read_text(encoding="utf-8")).get("title") == "surefoot config"
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


SMALL = 500_000_000  # parameters up to which full fine-tuning is proposed, if memory allows
FULL_SHARE = 0.1  # learning rate of full fine-tuning, as a share of an adapter's
RANK = 16
CRITIC_RATE = 1e-4  # of a critic that is an adapter, as in docs/ppo.md
HELD_OUT = 0.05
ENOUGH = 200  # examples above which a share is held out
EPOCH = "1 epoch"  # interval of evaluations and checkpoints if an epoch is short


@dataclass(frozen=True)
class Records:
    """What the data hold. stage: the one that learns from such data. seen: how each file's layout was recognized, one
    sentence per file. answer: the field of that name in the first record."""

    stage: str
    count: int
    seen: tuple[str, ...]
    answer: object = None


def propose(model: str, data: str, *, schema: str, stage: str | None = None, overrides: Sequence[str] = ()) -> str:
    """Return the text of a config for a model (folder or hub id) and data (file, folder or hub id).

    schema: path of the schema, named in the first line for editors.
    stage: None takes the one that learns from such data.
    overrides: KEY=VALUE that stand in the config.

    Raises InputError for data that cannot be read or recognized, or that this stage cannot learn from, and for a stage
    that needs a key which is not given.
    """
    from surefoot.runs.make_plan import make_plan

    output = _run_folder(model, data)
    required: dict[str, Any] = {"stage": stage or "sft", "model": model, "data": {"train": data}, "output": output}
    required, asked = _overridden(required, overrides)
    if any(key.startswith("adapter.") for key in asked) and not asked.keys() & {"adapter.kind", "adapter.initial"}:
        required["adapter"]["kind"] = "lora"
    held = {} if "data.eval" in asked else {"data.eval": HELD_OUT}
    # Checked before the data are opened, so that a wrong path is one line.
    _checked(with_settings(required, held))
    records = _look_at(data, stage)
    method = METHODS[records.stage]
    proposed: dict[str, Any] = held if records.count >= ENOUGH else {}
    if method.rollouts and not method.critic and records.answer is not None and "grpo.rewards" not in asked:
        proposed["grpo.rewards"] = ["numeric" if re.search(r"\d", str(records.answer)) else "exact"]
    required = with_settings(required, {"stage": records.stage} | proposed)
    config = _checked(required, whole=True)
    adapter = required.pop("adapter", None)
    full = make_plan(check_config(required), measure=False)
    adapted = make_plan(check_config(required | {"adapter": adapter or {"kind": "lora"}}), measure=False)
    whole = adapter is None and ("adapter" in asked or (full.parameters <= SMALL and fits(full.memory)))
    plan = full if whole else adapted
    base = "model.path" if any(key.startswith("model.") for key in asked) else "model"
    given: dict[str, Any] = {"stage": records.stage, base: model, "data.train": data, "output": output, **proposed}
    given["optim.lr"] = float(f"{FULL_SHARE * method.first_rate:.1g}") if whole else method.first_rate
    if not whole:
        rank = asked.get("adapter.rank", RANK)
        shape = {"adapter.kind": "lora", "adapter.rank": rank, "adapter.alpha": 2 * rank}
        given |= {} if "adapter.initial" in asked else shape  # which has its own
        given |= {"ppo.critic_lr": CRITIC_RATE} if method.critic else {}
    rhythm = {key: said for key, said in _rhythm(config, records).items() if key not in asked}
    reasons = _reasons(model, full, adapted, plan, records) | rhythm
    return starting_config(given | dict.fromkeys(rhythm, EPOCH) | asked, reasons, schema)


def _overridden(required: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config with the overrides applied, and their values by the keys of the file that is written: those of
    a section, or at the top."""
    sources = Sources(Document({}, {}, {}, ""))
    config = expand_short_forms(dict(required))
    for text in overrides:
        config = apply_override(config, text, sources)
    asked: dict[str, Any] = {}
    for key in sources.overrides:
        section, _, name = typed_key(key).partition(".")
        value = config[section]
        if not name and isinstance(value, dict):
            asked |= {f"{section}.{own}": one for own, one in value.items()}
        else:
            own = name.partition(".")[0]
            asked[f"{section}.{own}" if own else section] = value[own] if own else value
    return config, asked


def _checked(config: Mapping[str, Any], *, whole: bool = False) -> RunConfig:
    """Raise InputError for what is wrong with the config; whole: and for a score that it lacks. A key of the stage's
    own section is given behind DATA."""
    try:
        found = check_config(config)
        if whole and found.method.rollouts:
            from surefoot.runs.custom import NOTHING, custom_faults

            if faults := custom_faults(found, NOTHING):
                raise InputError(faults)
    except InputError as error:
        own = METHODS.get(str(config["stage"]))
        told = [
            replace(fault, fix=f"write {fault.where}=… behind DATA: {fault.fix}")
            if own is not None and own.section and fault.where.startswith(f"{own.section}.") and fault.fix
            else fault
            for fault in error.faults
        ]
        raise InputError(told) from None
    return found


def _look_at(data: str, stage: str | None) -> Records:
    from surefoot.data.formats import kind_of_record, scan_format
    from surefoot.data.sources.records import read_rows
    from surefoot.data.sources.resolve import SourceSpec, open_sources

    count, described, answer = 0, [], None
    for source in open_sources(SourceSpec(data)):
        rows = read_rows(source)
        first = next(rows)
        answer = first.value.get("answer") if answer is None else answer
        if stage is None:
            kind = kind_of_record(first.value)
            stage = next(name for name, one in METHODS.items() if one.proposed and one.records == kind)
        method = METHODS[stage]
        rows = itertools.chain([first], rows)
        seen = scan_format(method.records, source.format, rows, source.name, texts=method.plain_texts)
        count += seen.rows
        described.append(f"{source.name}: {seen.rows:,} records, {seen.layout} ({seen.reason})")
    return Records(stage or "sft", count, tuple(described), answer)


def _rhythm(config: RunConfig, records: Records) -> dict[str, str]:
    """Keys for events that would otherwise be rare because an epoch is short, each with its comment. Omits plain text,
    whose number of examples is unknown, and events that the run does not have."""
    share = HELD_OUT if records.count >= ENOUGH else 0.0
    size = config.batch.size // (config.grpo.group if config.method.counts else 1)  # records of a step
    steps = -(-round(records.count * (1 - share)) // size)
    lengths = {"eval_every": config.eval_every if share else None, "checkpoint.every": config.checkpoint.every}
    said = f"Here: an epoch has {counted(steps, 'step')}."
    return {
        key: said
        for key, every in lengths.items()
        if not config.method.plain_texts and every is not None and every.unit == "steps" and steps < every.count
    }


def _reasons(model: str, full: RunPlan, adapted: RunPlan, plan: RunPlan, records: Records) -> dict[str, str]:
    from surefoot.models.facts import facts_of
    from surefoot.models.folder import resolve_folder

    facts = facts_of(resolve_folder(model, weights=False))
    tokens = plan.tokenizer
    size = f"{_count(full.parameters)} parameters, {facts.layers} layers, width {facts.hidden}"
    held = f"{records.count * HELD_OUT:,.0f} of {records.count:,} examples are held out for evaluation."
    few = f"With only {records.count:,} examples nothing is held out; set a file or a share such as 0.1 to evaluate."
    return {
        "model": f"Here: {facts.family.name if facts.family else facts.model_type}, {size}; "
        f"PAD {tokens.pad_token.value} ({tokens.pad_token.reason}); "
        f"BOS {'prepended' if tokens.bos.value else 'not prepended'} ({tokens.bos.reason}).",
        "adapter": _adapter_reason(full, adapted, plan is full),
        "data.train": f"Here: {'; '.join(records.seen[:3])}{'; …' if len(records.seen) > 3 else ''}.",
        "data.eval": held if records.count >= ENOUGH else few,
        "data.template": f"Here: {tokens.template.value} ({tokens.template.reason}).",
        "data.max_length": f"Here: {tokens.max_length.value} ({tokens.max_length.reason}).",
        "precision": f"Here: {plan.precision.compute.value} ({plan.precision.compute.reason}).",
        "adapter.alpha": "Twice the rank: change them together.",
        "optim": "All weights are trained, so the learning rate is a tenth of an adapter's." if plan is full else "",
        "stage": _other_methods(records.stage),
    }


def _other_methods(stage: str) -> str:
    """Name the other methods that learn from pairs of answers."""
    if METHODS[stage].records != "pairs" or not METHODS[stage].proposed:
        return ""
    others = [name for name, one in METHODS.items() if one.records == "pairs" and name != stage]
    return f"Here: pairs of answers; {' or '.join(others)} would learn a score from them."


def _adapter_reason(full: RunPlan, adapted: RunPlan, whole: bool) -> str:
    room = f"{size_text(full.memory.available)} on this machine"
    need = f"training all of it needs about {size_text(full.memory.total)} of {room}"
    if whole:
        return f"Left out: the model is small and {need}. kind: lora would need {size_text(adapted.memory.total)}."
    share = 100 * adapted.trainable / adapted.parameters
    text = f"LoRA trains {share:.2g} % of the parameters in about {size_text(adapted.memory.total)}; {need}."
    if not fits(adapted.memory):
        text += " Even LoRA's forecast does not fit: a smaller data.max_length, precision.base: nf4 or a larger GPU."
    return f"{text} kind: dora learns the norms of the weights too, at some cost in time."


def _count(number: int) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def _run_folder(model: str, data: str) -> str:
    names = (re.sub(r"[^\w.-]+", "-", Path(path).name.split(".")[0]).strip("-") for path in (model, data))
    return f"runs/{'-'.join(name or 'x' for name in names)}"


WIDTH = 110  # columns
_GROUPS: Mapping[str, Sequence[str]] = {  # the most used sections and keys, in order
    "What is trained, on what, and where it goes": ("stage", "model", "data", "output"),
    "How it is trained": ("adapter", *SECTIONS, "duration", "batch", "optim", "precision"),
    "Evaluation, checkpoints and logging": ("eval_every", "checkpoint", "early_stopping", "report_to", "seed"),
}
_WANTED: Mapping[str, Sequence[str]] = {  # section -> its most used keys
    "data": ("train", "eval", "template", "max_length", "packing"),
    "adapter": ("kind", "rank", "alpha", "targets"),
    "sft": ("loss",),
    "reward": ("loss", "center", "init"),
    "alignment": ("loss", "beta", "sft", "good", "bad", "reference"),
    "ppo": ("reward", "critic", "critic_lr", "max_new_tokens", "epochs", "kl"),
    "grpo": ("rewards", "group", "max_new_tokens", "loss", "kl"),
    "distill": ("teacher", "beta", "sft", "on_policy"),
    "batch": ("size", "micro"),
    "optim": ("lr", "schedule", "warmup", "weight_decay", "name"),
    "precision": ("compute", "base"),
    "checkpoint": ("every", "keep", "best"),
    "early_stopping": ("patience",),
}


def starting_config(given: Mapping[str, Any], reasons: Mapping[str, str], schema: str) -> str:
    """Return the config as YAML.

    given: dotted key -> value; must include every required key.
    reasons: dotted key -> reason for the value.
    schema: path or URL of the JSON Schema, for editors.
    """
    parts = [f"# yaml-language-server: $schema={schema}\n"]
    keys, unread = all_keys(), unread_keys(given["stage"])
    usual = {name for names in _GROUPS.values() for name in names}
    asked = dict.fromkeys(section for key in given if (section := key.partition(".")[0]) not in usual)
    for title, names in _GROUPS.items():
        parts.append(f"# --- {title} ---\n")
        also = asked if names == [*_GROUPS.values()][-1] else ()
        written = (name for name in (*names, *also) if name not in unread)
        parts += ["\n".join(_top(keys[name], given, reasons, unread)) + "\n" for name in written]
    parts.append("\n".join(_others(unread | asked.keys(), given)) + "\n")
    return "\n".join(parts)


def _others(unread: frozenset[str], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield comment lines with the names of the keys that are not written."""
    written = {name for names in _GROUPS.values() for name in names}
    top = [key for key in all_keys().values() if not key.group and key.name not in written | unread]
    more = {name: [f"{name}.{child}" for child in _rest(all_keys()[name], unread | given.keys())] for name in _WANTED}
    names = [*(key.name for key in top), *(child for name in more if name not in unread for child in more[name])]
    yield "# --- Everything else, at its default ---"
    yield from _comment(f"{', '.join(names)}.", "")
    yield "# `surefoot explain` lists all keys with their defaults, `surefoot explain KEY` explains one."


def _rest(section: Key, unread: frozenset[str]) -> list[str]:
    """Return the keys of a section that the stage reads but that are not written."""
    children = [path.rpartition(".")[2] for path in section.children if path not in unread]
    return [name for name in children if name not in _WANTED[section.name]]


def _top(key: Key, given: Mapping[str, Any], reasons: Mapping[str, str], unread: frozenset[str]) -> list[str]:
    lines = [*_comment(key.help, ""), *_comment(reasons.get(key.path, ""), "")]
    if key.path in given:
        return [*lines, f"{key.name}: {_written(given[key.path])}"]
    if not key.children:
        return [*lines, f"# {key.name}: {as_yaml(key.default)}"]
    also = (path.partition(".")[2] for path in given if path.startswith(f"{key.path}."))
    wanted = dict.fromkeys((*_WANTED.get(key.name, ()), *also))
    children = [all_keys()[path] for name in wanted if (path := f"{key.path}.{name}") not in unread]
    if not any(child.path in given for child in children):
        return [*lines, f"# {key.name}:", *(f"#   {line}" for child in children for line in _default(child))]
    lines.append(f"{key.name}:")
    for child in children:
        lines += _comment(reasons.get(child.path, ""), "  ")
        if child.path in given:
            lines += [f"  {line}" for line in _explained(f"{child.name}: {_written(given[child.path])}", child)]
        else:
            *above, last = _default(child)
            lines += [*(f"  {line}" for line in above), f"  # {last}"]
    return lines


def _written(value: Any) -> str:
    return shown(value) if isinstance(value, str) else as_yaml(value)


def _default(key: Key) -> list[str]:
    value = key.example if key.required else key.default
    return _explained(f"{key.name}: {as_yaml(value)}", key)


def _explained(line: str, key: Key) -> list[str]:
    """Append as many whole sentences of the key's help as fit; if not even the first fits, put it above."""
    room = WIDTH - max(len(line), 24) - 8
    text, *more = re.split(r"(?<=\.)\s+(?=[A-Z])", " ".join(key.help.split()))
    if len(text) > room:
        return [*_comment(text, "", WIDTH - 4), line]
    for sentence in more:
        if len(text) + 1 + len(sentence) > room:
            break
        text += f" {sentence}"
    return [f"{line:<24}  # {text}"]


def _comment(text: str, indent: str, width: int = WIDTH) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)
