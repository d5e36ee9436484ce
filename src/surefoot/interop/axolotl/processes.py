"""How many processes share a step of Axolotl's, and what its launcher, Ray and the sizes of its device mesh say.

A mesh has tensor x context x shard x replica x expert processes. Those that divide a layer (tensor) or a sequence
(context) work on one and the same batch; the others have a batch each. Facts: `build_parallelism_config`,
`normalize_config`, the expert_parallel plugin and cli/utils/train.py of Axolotl 0.19.
"""

from __future__ import annotations

import math
from dataclasses import replace

from surefoot.interop.draft import Draft
from surefoot.interop.faults import setting_error
from surefoot.interop.launch import Command, Options, read_command
from surefoot.interop.shared_rules import LAYERS_WHOLE

SAME_BATCH = {
    "tensor_parallel_size": LAYERS_WHOLE,
    "context_parallel_size": LAYERS_WHOLE.replace("layers", "sequences"),
}
OWN_BATCH = ("dp_shard_size", "dp_replicate_size", "expert_parallel_size")
_SHARDS = "surefoot's processes, which all have a batch of their own, shard the weights between them"
_LAUNCHERS = {"accelerate": ["accelerate", "launch"], "torchrun": ["torchrun"], "python": ["python"]}


def set_processes(draft: Draft) -> None:
    """Set the number of processes with a batch of their own; runs before the rules that read it."""
    for name in (*SAME_BATCH, *OWN_BATCH):
        if draft[name] < 1:
            draft.refuse(name, f"expected a number from 1, got {draft[name]}")
            return
    launched = draft.processes
    started = draft["ray_num_workers"] if draft["use_ray"] else launched
    together = math.prod(draft[name] for name in SAME_BATCH)
    each = math.prod(draft[name] for name in OWN_BATCH)
    if started > 1 and started % (together * each):
        names = ", ".join(name for name in (*SAME_BATCH, *OWN_BATCH) if draft[name] > 1)
        draft.refuse(names.partition(",")[0], f"{names} do not divide the {started} processes", "mend the sizes")
        return
    count = started // together if started > 1 else each
    for name in (*SAME_BATCH, *OWN_BATCH):
        alone = draft[name] == 1
        why = SAME_BATCH.get(name, _SHARDS)
        draft.note(name, "listed" if alone else "changed", "1: nothing is divided" if alone else why,
                   *(() if alone else ("parallel.nproc",)))  # fmt: skip
    draft.note("use_ray", "changed" if draft["use_ray"] else "listed", "surefoot starts the processes itself")
    draft.note("ray_num_workers", "carried" if draft["use_ray"] else "listed", "the number of processes")
    if count != launched:
        draft.facts["processes"] = count
        draft.set("parallel.nproc", count, why="the processes that have a batch of their own")


def program_of(command: Command, options: Options) -> Command:
    """Return the module that `axolotl train` starts, with what its launcher decides. Raises InputError."""
    words = list(command.arguments[1:])
    end = words.index("--") if "--" in words else len(words)
    own, of_launcher = words[:end], words[end + 1 :]
    taken: dict[str, str] = {}
    kept: list[str] = []
    while own:
        flag, equals, value = own.pop(0).partition("=")
        name = flag.lstrip("-").replace("-", "_")
        if not flag.startswith("--") or name not in (*_OF_LAUNCH, *_ELSEWHERE):
            kept.append(flag + equals + value)
            continue
        taken[name] = value if equals else own.pop(0) if own else ""
        if name in _ELSEWHERE:
            raise setting_error(flag, *_ELSEWHERE[name])
    launcher = taken.pop("launcher", "accelerate")
    if launcher not in _LAUNCHERS:
        raise setting_error("--launcher", f"Axolotl has no launcher {launcher}", f"use {', '.join(_LAUNCHERS)}")
    if launcher == "accelerate":  # the others take these flags of Axolotl's for settings
        of_launcher = [word for name, value in taken.items() for word in (f"--{name}", value)] + of_launcher
    program = [*_LAUNCHERS[launcher], *(of_launcher if launcher != "python" else ()), "-m", "axolotl.cli.train"]
    found = read_command([*program, *kept], replace(options, environment=command.environment))
    return replace(found, notes=tuple(note for note in found.notes if note.where.startswith("-")))


_OF_LAUNCH = ("launcher", "num_processes", "main_process_port")
_ELSEWHERE = {
    "sweep": ("starts a run for each of several configs", "translate one of them; surefoot tune tries several values"),
    "cloud": ("starts the run at a provider, which surefoot does not", "run surefoot on that machine"),
}
