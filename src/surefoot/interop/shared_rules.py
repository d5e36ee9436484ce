"""Rules that several tools share: batch sizes, lengths, warm-up, names of modules, parts of splits, resuming.

    set_batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps")
    module_names("q_proj v_proj")                                 # ["q_proj", "v_proj"]
    resume_argument(draft, "resume_from_checkpoint", output)      # --resume, and what must be there

Steps per epoch are ceil(examples / (micro x accumulation)) in transformers' Trainer as here: the short last step stays.
PEFT takes a text for a regular expression; surefoot's targets are names, so a pattern is refused. surefoot resumes from
the newest checkpoint of the run folder that verifies, and from no other. Where there is none it starts, which is right
for a tool that looks for one by itself, and an error where somebody named one, as in transformers.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Sequence
from typing import Any

from surefoot.interop.draft import Draft
from surefoot.interop.launch import Options
from surefoot.interop.settings import AT_LEAST, Refusal
from surefoot.interop.translation import Translation
from surefoot.planning.disk import checkpoints_kept
from surefoot.system.errors import Fault, InputError

KEEP_ALL = 1000  # checkpoints: what a tool that deletes none is given; checkpoint.keep has no word for all
EIGHT_BITS = "weights in bitsandbytes' 8 bits; activations stay whole (LLM.int8() rounds them on a GPU)"
HEAD_NOT_ROUNDED = "the output head is not rounded here"
ROUNDED_UP = "an epoch's fraction becomes a whole number of steps: the nearest here, the next higher one there"


def set_keep(draft: Draft, keep: int, *names: str, why: str = "") -> None:
    """checkpoint.keep, with what is not the same here. keep: of the newest, as the other tool counts."""
    why = "; ".join(filter(None, (why, AT_LEAST if checkpoints_kept(keep) > keep else "")))
    draft.set("checkpoint.keep", keep, *names, why=why)


def set_batch(draft: Draft, micro: str, accumulation: str) -> None:
    """batch.micro examples in a forward pass, and micro x accumulation x processes in a step."""
    processes = draft.facts.get("processes", 1)
    examples, passes = draft[micro], draft[accumulation]
    for name in (micro, accumulation):
        if draft[name] < 1:
            draft.refuse(name, f"expected a number from 1, got {draft[name]}")
            return
    why = f"times {processes} processes" if processes > 1 else ""
    # batch.size is what one step learns from, whatever the devices: the same config then trains alike on any number.
    draft.set("batch.size", examples * passes * processes, micro, accumulation, why=why)
    draft.set("batch.micro", examples, micro)


def set_duration(draft: Draft, epochs: str, steps: str) -> None:
    """Steps above 0 go before epochs."""
    if (limit := draft[steps]) is not None and limit > 0:
        draft.set("duration", counted(limit, "step"), steps)
        draft.drop(f"{steps} goes before it", epochs)
        return
    passes = draft[epochs]
    if passes <= 0:
        draft.refuse(epochs, f"expected a number above 0, got {passes:g}", f"or give {steps}")
        return
    draft.set("duration", counted(passes, "epoch"), epochs, why=ROUNDED_UP if passes != int(passes) else "")
    draft.drop("asks for no limit in steps", steps)


def set_warmup(draft: Draft, steps: str, ratio: str | None, total_steps: int | None) -> None:
    """transformers' rise from 0 over `steps`, else over ceil(ratio x all steps). total_steps: where it is known."""
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
            draft.drop(f"{steps} goes before it", ratio)
    elif share >= 1:
        draft.refuse(ratio or steps, f"expected a share below 1, got {share:g}")
        return
    elif share and total_steps is not None:
        draft.set("optim.warmup", counted(math.ceil(share * total_steps), "step"), *names)
    else:
        draft.set("optim.warmup", float(share) if share else 0.0, *names)
    if count or share:
        # transformers' first step has rate 0; surefoot's own warm-up begins above it, one step earlier.
        draft.set("optim.warmup_from_zero", True, *names)


def counted(count: float, unit: str) -> str:
    """ "1 step", "3 epochs", "0.5 epochs" """
    number = int(count) if count == int(count) else count
    return f"{number} {unit}{'' if number == 1 else 's'}"


def switch(value: Any) -> str:
    return "on" if value else "off"


_NAME = re.compile(r"[\w.-]+")
_LIST = re.compile(r"\[(.*)\]|\((.*)\)", re.DOTALL)
_EXPECTED = "names of modules, such as [q_proj, v_proj], and no pattern"
_BECAUSE = "PEFT's default for Llama, Mistral and Qwen2; name them for a family whose modules are called otherwise"


def module_names(value: Any) -> list[str] | None:
    """Names with blanks or commas between them, a literal of a list, and what a shell makes of one; None for none.

    Raises ValueError, which says what was expected, for a pattern.
    """
    if value is None or value in ("None", ""):
        return None
    items = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, bool | int | float | dict) for item in items):
        raise ValueError(_EXPECTED)
    text = " ".join(str(item) for item in items).strip()
    written = _LIST.fullmatch(text)
    inner = text if written is None else next(group for group in written.groups() if group is not None)
    names = [name.strip("'\"") for name in re.split(r"[\s,]+", inner) if name.strip("'\"")]
    if not all(_NAME.fullmatch(name) for name in names):
        raise ValueError(_EXPECTED)
    return names or None


def set_default_targets(draft: Draft, name: str) -> None:
    """PEFT's choice where nobody names modules in the setting `name`; ours, all linear layers, would be another
    adapter."""
    draft.drop("PEFT's default for the family", name)
    draft.set("adapter.targets", ["q_proj", "v_proj"], *([] if draft.given(name) else [name]), why=_BECAUSE)


_FIRST = re.compile(r"(\w+)\[:(\d+)\]")
_FIX = "give the number of records, as in train[:1000]; the data.eval of surefoot's config holds a share out"


def parse_split(split: str) -> tuple[str, int | None]:
    """(name, how many records from the first on; None: all). Raises Refusal for any other part: what a percentage or an
    end comes to depends on how many records there are, and surefoot reads the first so many."""
    if found := _FIRST.fullmatch(split):
        return found[1], int(found[2])
    if not split.isidentifier():
        raise Refusal(f"takes the part {split!r}", _FIX)
    return split, None


def short_sources(sources: Sequence[dict[str, Any]]) -> Any:
    """data.train or data.eval as a user would write it: one source alone, and a source of a path alone as that path."""
    plain: list[Any] = [source["path"] if source.keys() == {"path"} else source for source in sources]
    return plain[0] if len(plain) == 1 else plain


_NEWEST = "the newest checkpoint in the run folder that verifies, with optimizer and schedule"


def is_requested(value: Any) -> bool:
    return value is not None and str(value).lower() not in ("false", "none", "")


def resume_argument(draft: Draft, name: str, output: str) -> bool:
    """A checkpoint of the run folder itself becomes --resume, and must be there; another one cannot be begun with.
    Whether the run goes on."""
    given = draft[name]
    if not is_requested(given):
        draft.drop("asks for nothing", name)
        return False
    run, folder = posixpath.normpath(output), posixpath.normpath(str(given))
    anything = str(given).lower() == "true"
    if not anything and run not in (folder, posixpath.dirname(folder)):
        fix = f"name the run folder ({output}), or one of its checkpoints"
        draft.refuse(
            name, f"{given} does not lie in the run folder; surefoot resumes a run in its own folder only", fix
        )
        return False
    draft.arguments.append("--resume")
    draft.resumes = run if anything else folder
    draft.note(name, "changed", _NEWEST, "--resume")
    return True


def check_resumed(found: Translation, options: Options) -> None:
    """Raises InputError where the checkpoint that was named is not the one that surefoot would go on from. Nothing is
    checked where folders may not be looked at."""
    if found.resumes is None or options.newest is None:
        return
    run, _, name = found.resumes.rpartition("/")
    if found.resumes == posixpath.normpath(str(found.config.get("output", ""))):
        run, name = found.resumes, ""
    newest = options.newest(run)
    where = next((note.where for note in found.notes if "--resume" in note.keys), run)
    if newest is None:
        raise InputError(
            Fault(
                where,
                f"{run} holds no checkpoint to resume from",
                "leave it out to start anew",
                code="SF-CHECKPOINT-NONE",
            )
        )
    if name and name != newest:
        what = f"{found.resumes} is not what surefoot would resume from: the newest that verifies is {newest}"
        raise InputError(
            Fault(
                where,
                what,
                f"name {run}/{newest}, or the checkpoints of a copy that ends with yours",
                code="SF-RESUME-CHANGED",
            )
        )
