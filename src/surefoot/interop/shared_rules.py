"""Rules that several tools share: batch sizes, duration, warm-up, slices of splits, resuming.

    set_batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps")
    resume_argument(draft, "resume_from_checkpoint", output)      # --resume, and the checkpoint that must exist

Steps per epoch are ceil(examples / (micro x accumulation)), as in transformers' Trainer: the short last step is kept.
surefoot resumes only from the newest checkpoint of the run folder that verifies. If there is none, it starts a new run
for a tool that looks for a checkpoint by itself, and fails if the user named one, as transformers does.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.families.template_row import Dialogue
from surefoot.families.templates import find_row
from surefoot.interop.draft import Draft
from surefoot.interop.launch import Options
from surefoot.interop.settings import AT_LEAST, Refusal, group
from surefoot.interop.translation import Translation
from surefoot.planning.disk import checkpoints_kept
from surefoot.system.errors import Fault, InputError

KEEP_ALL = 1000  # checkpoint.keep for a tool that deletes no checkpoint; the key has no value for all
SCALED = "pictures are scaled in one step here, so that the tokens of a large one may differ by a row or column"
LAYERS_WHOLE = "surefoot keeps layers whole and shards the weights: the same sums, more memory for a process"
NEW_ROWS = "under an adapter, embedding and head train in full here"
OF_TOKENS = "in training; evaluations report the cross entropy here"
HEAD_NOT_ROUNDED = "the output head is not rounded here"
ROUNDED_UP = "a fraction of an epoch is rounded to the nearest step here, and up there"


def set_keep(draft: Draft, keep: int, *names: str, why: str = "") -> None:
    """Set checkpoint.keep. keep: number of newest checkpoints in the other tool. why: how surefoot differs."""
    why = "; ".join(filter(None, (why, AT_LEAST if checkpoints_kept(keep) > keep else "")))
    draft.set("checkpoint.keep", keep, *names, why=why)


def set_batch(draft: Draft, micro: str, accumulation: str) -> None:
    """Set batch.micro (examples of a forward pass) and batch.size (micro x accumulation x processes)."""
    processes = draft.processes
    examples, passes = draft[micro], draft[accumulation]
    for name in (micro, accumulation):
        if draft[name] < 1:
            draft.refuse(name, f"expected a number from 1, got {draft[name]}")
            return
    why = f"times {processes} processes" if processes > 1 else ""
    # batch.size counts the examples of a step over all devices, so a config trains the same on any number of them.
    draft.set("batch.size", examples * passes * processes, micro, accumulation, why=why)
    draft.set("batch.micro", examples, micro)


def set_added(draft: Draft, tokens: Sequence[str], *names: str, why: str = "") -> None:
    """Set tokenizer.add and add_special, after data.template: control tokens are those that the template writes. Texts
    that spell another out mean the token in these tools, as they do one of tokenizer.add.

    tokens: in the tool's order. names: settings that they come from.
    """
    row = find_row(str(draft.written("data.template")))
    control = row.control if isinstance(row, Dialogue) else ()
    for key, added in (("add", [one for one in tokens if one not in control]), ("add_special", control)):
        if chosen := [*(draft.written(f"tokenizer.{key}") or ()), *(one for one in added if one in tokens)]:
            draft.set(f"tokenizer.{key}", list(dict.fromkeys(chosen)), *names, why=why)


def set_random(draft: Draft, name: str) -> None:
    """Set model.weights, after stage and adapter. name: the tool's setting."""
    if not draft[name]:
        return
    if draft.written("adapter.kind") or draft.written("adapter.initial") or draft.written("stage") not in _BEGIN:
        what = "surefoot draws the weights of a model that trains whole, in stages sft and pretrain"
        draft.refuse(name, what, "leave it out")
    else:
        draft.set("model.weights", "random", name)


_BEGIN = ("sft", "pretrain")


def set_patience(draft: Draft, name: str, fix: str) -> None:
    """Set early_stopping.patience, after data.eval. name: the tool's setting. fix: how to name evaluation data."""
    if draft[name] is not None and draft.written("data.eval") is None:
        draft.refuse(name, "there is no evaluation data", fix)
    elif draft[name] is not None:
        draft.set("early_stopping.patience", draft[name], name)


def set_together(draft: Draft, name: str, what: str) -> None:
    """Set the number of processes with a batch of their own, where some share one to divide its layers or sequences.

    name: the tool's number of processes that share a batch. what: what they divide, layers or sequences.
    """
    together, started, why = draft[name], draft.processes, LAYERS_WHOLE.replace("layers", what)
    if together < 1 or (started > 1 and started % together):
        draft.refuse(name, f"{together} do not divide {started} processes", "start a multiple of them")
        return
    draft.facts["processes"] = max(1, started // together)
    if together == 1:
        draft.drop(f"divides no {what}", name)
        return
    draft.note(name, "changed", why, "parallel.nproc")
    if started > 1:
        draft.set("parallel.nproc", draft.processes, name, why=why)


def set_rows(draft: Draft, tokens: int, *names: str, why: str) -> None:
    """Let batch.size count rows of packed examples. Runs after `set_batch`. why: how the tool fills them otherwise."""
    draft.set("batch.row_tokens", tokens, *names, why=why)
    draft.config["batch"].pop("micro", None)  # rows of a forward pass there, examples here


def set_duration(draft: Draft, epochs: str, steps: str) -> None:
    """Set duration; a positive number of steps overrides epochs."""
    if (limit := draft[steps]) is not None and limit > 0:
        draft.set("duration", counted(limit, "step"), steps)
        draft.drop(f"{steps} takes precedence", epochs)
        return
    passes = draft[epochs]
    if passes <= 0:
        draft.refuse(epochs, f"expected a number above 0, got {passes:g}", f"or give {steps}")
        return
    draft.set("duration", counted(passes, "epoch"), epochs, why=ROUNDED_UP if passes != int(passes) else "")
    draft.drop("sets no limit in steps", steps)


def set_warmup(draft: Draft, steps: str, ratio: str | None, total_steps: int | None) -> None:
    """Set transformers' warm-up: from 0 over `steps`, else over ceil(ratio x total_steps).

    total_steps: None if not known before the data is read.
    """
    count = draft[steps] or 0
    share = (draft[ratio] or 0.0) if ratio else 0.0
    names = [steps, *([ratio] if ratio else [])]
    for name, value in ((steps, count), (ratio or steps, share)):
        if value < 0:
            draft.refuse(name, f"expected a number from 0, got {value:g}")
            return
    if 0 < count < 1:  # a share, since transformers 5
        count, share = 0, count
    if count:
        draft.set("optim.warmup", counted(math.ceil(count), "step"), steps)
        if ratio:
            draft.drop(f"{steps} takes precedence", ratio)
    elif share >= 1:
        draft.refuse(ratio or steps, f"expected a share below 1, got {share:g}")
        return
    elif share and total_steps is not None:
        draft.set("optim.warmup", counted(math.ceil(share * total_steps), "step"), *names)
    else:
        draft.set("optim.warmup", float(share) if share else 0.0, *names)
    if count or share:
        # transformers' first step has learning rate 0; surefoot's own warm-up would start above 0.
        draft.set("optim.warmup_from_zero", True, *names)


def template_arguments(value: Any) -> dict[str, Any]:
    """Convert `chat_template_kwargs`. Raises Refusal for lists and groups, which surefoot does not pass."""
    for name, one in group(value or {}).items():
        if not isinstance(one, bool | int | float | str):
            raise Refusal(f"{name}: surefoot passes texts, numbers, true and false to a template", "leave it out")
    return dict(value or {})


def counted(count: float, unit: str) -> str:
    """Format "1 step", "3 epochs", "0.5 epochs"."""
    number = int(count) if count == int(count) else count
    return f"{number} {unit}{'' if number == 1 else 's'}"


def switch(value: Any) -> str:
    return "on" if value else "off"


def on_or_auto(value: Any) -> str:
    return "on" if value else "auto"


# The hub's own rule for names, and a slice.
_SLICE = re.compile(r"(\w+(?:\.\w+)*)(?:\[(-?\d+%)?:(-?\d+%?)?\])?")
_FIX = "give the first records, as in train[:1000], or a share, as in train[:95%]"


def parse_split(split: str) -> tuple[str, dict[str, Any]]:
    """Return (split name, keys of a source that select its part): `train[:1000]`, or `train[5%:95%]` as `datasets` cuts
    it. Raises Refusal for other slices: a source has no numbered end or start."""
    found = _SLICE.fullmatch(split)
    if found is None:
        raise Refusal(f"{split!r} is not a split, its first N records or a share of it", _FIX)
    name, start, end = found.groups()
    if start is None and end is not None and end.isdecimal():
        return name, {"max_samples": int(end)}
    if end is not None and not end.endswith("%"):
        raise Refusal(f"{split!r} ends at a record that is counted from the start or the end", _FIX)
    first, last = (_percent(part, usual) for part, usual in ((start, 0), (end, 100)))
    if not 0 <= first < last <= 100:
        raise Refusal(f"{split!r} has no record", _FIX)
    of = [size for size in (first, last - first, 100 - last) if size]
    return name, {"share": {"of": of, "take": 2 if first else 1, "in_order": True}} if len(of) > 1 else {}


def written_split(source: Mapping[str, Any]) -> str:
    """Write a source's split with its part, as `parse_split` reads it; without a part that has no such form."""
    name, most, share = source.get("split", "train"), source.get("max_samples"), source.get("share") or {}
    if most is not None:
        return f"{name}[:{most}]"
    first = share["of"][0] if share.get("take") == 2 else 0
    last = first + share["of"][share["take"] - 1] if share else 0
    whole = sum(share.get("of", ())) == 100 and share.get("in_order") and first == int(first) and last == int(last)
    return f"{name}[{f'{first:g}%' if first else ''}:{last:g}%]" if whole else name


def _percent(text: str | None, usual: int) -> int:
    """Read "95%"; -5% counts from the end."""
    number = usual if text is None else int(text.removesuffix("%"))
    return number + 100 if number < 0 else number


def short_sources(sources: Sequence[dict[str, Any]]) -> Any:
    """Shorten data.train or data.eval: a single source without the list, a source with only a path as that path."""
    plain: list[Any] = [source["path"] if source.keys() == {"path"} else source for source in sources]
    return plain[0] if len(plain) == 1 else plain


_NEWEST = "the newest checkpoint in the run folder that verifies, with optimizer and schedule"


def is_requested(value: Any) -> bool:
    return value is not None and str(value).lower() not in ("false", "none", "")


def resume_argument(draft: Draft, name: str, output: str) -> bool:
    """Turn a checkpoint of the run folder into --resume, and refuse any other. Returns whether the run resumes.

    name: the setting. output: the run folder.
    """
    given = draft[name]
    if not is_requested(given):
        draft.drop("is off or not set", name)
        return False
    run, folder = posixpath.normpath(output), posixpath.normpath(str(given))
    newest = str(given).lower() == "true"
    if not newest and run not in (folder, posixpath.dirname(folder)):
        fix = f"name the run folder ({output}), or one of its checkpoints"
        draft.refuse(name, f"{given} is not in the run folder; surefoot resumes a run only in its own folder", fix)
        return False
    draft.arguments.append("--resume")
    draft.resumes = run if newest else folder
    draft.note(name, "changed", _NEWEST, "--resume")
    return True


def check_resumed(found: Translation, options: Options) -> None:
    """Raise InputError if the named checkpoint is not the one that surefoot would resume from. Checks nothing if
    `options` allows no reading of folders."""
    if found.resumes is None or options.newest is None:
        return
    run, _, name = found.resumes.rpartition("/")
    if found.resumes == posixpath.normpath(str(found.config.get("output", ""))):
        run, name = found.resumes, ""
    newest = options.newest(run)
    where = next((note.where for note in found.notes if "--resume" in note.keys), run)
    if newest is None:
        what, fix = f"{run} holds no checkpoint to resume from", "leave it out to start a new run"
        raise InputError(Fault(where, what, fix, code="SF-CHECKPOINT-NONE"))
    if name and name != newest:
        what = f"{found.resumes} is not the newest checkpoint that verifies, {newest}, from which surefoot would resume"
        fix = f"name {run}/{newest}, or resume in a copy of the run folder whose newest checkpoint is yours"
        raise InputError(Fault(where, what, fix, code="SF-RESUME-CHANGED"))
