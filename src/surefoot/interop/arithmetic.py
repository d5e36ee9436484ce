"""What the tools around transformers' Trainer share: sizes, lengths and switches, in surefoot's words.

Trainer's steps per epoch are ceil(examples / (micro x accumulation)), the short last step kept, as here.
"""

from __future__ import annotations

import math
from typing import Any

from surefoot.interop.draft import Draft
from surefoot.interop.rows import AT_LEAST
from surefoot.planning.disk import checkpoints_kept

KEEP_ALL = 1000  # checkpoints: what a tool that deletes none is given
UP = "an epoch's fraction becomes a whole number of steps: the nearest here, the next higher one there"


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
    draft.set("duration", counted(passes, "epoch"), epochs, why=UP if passes != int(passes) else "")
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
        draft.set("optim.warmup_from_zero", True, *names)


def counted(count: float, unit: str) -> str:
    """ "1 step", "3 epochs", "0.5 epochs" """
    number = int(count) if count == int(count) else count
    return f"{number} {unit}{'' if number == 1 else 's'}"


def switch(value: Any) -> str:
    return "on" if value else "off"
