"""Strip what starts a program: `NAME=value`, env, uv run, python, accelerate launch, torchrun, deepspeed.

    command = read_command(["CUDA_VISIBLE_DEVICES=0", "accelerate", "launch", "finetune.py", "--lora_r", "8"], options)
    command.program, command.arguments         # "finetune.py", ("--lora_r", "8")

If a launcher starts several processes, surefoot starts as many (`parallel.nproc`), on each machine that the command is
given on (`parallel.machines`). Nothing here runs a program.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from surefoot.config.yaml_scalars import scalar_or_text
from surefoot.interop import launchers
from surefoot.interop.faults import command_error, setting_error
from surefoot.interop.translation import Note, Translation
from surefoot.interop.words import plain_count, plain_truth
from surefoot.system.redaction import hides, redacted

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_BEFORE = ("env", "nohup", "time", "exec", "command")
_RUNNERS = (("uv", "run"), ("poetry", "run"), ("pdm", "run"), ("pipenv", "run"))
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_PYTHON_WITH_VALUE = ("-X", "-W")
_DEVICES = "CUDA_VISIBLE_DEVICES"
MORE = "start surefoot with the launcher on each machine: docs/several-processes.md"


def no_files(path: str) -> str:
    """Raise: the default of `Options.read`, when no file may be read."""
    raise setting_error(path, "cannot be read here")


FirstRecord = Callable[[str], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Options:
    """What a translation may read besides the settings themselves.

    allow_unknown: list unknown settings instead of refusing them.
    devices: number of accelerators, used by launchers that are given no number.
    read: path -> text of a file that a config or command names; raises InputError if it cannot be read.
    environment: variables of this process that a tool would read; a NAME=value in the command overrides them.
    newest: run folder -> name of its newest checkpoint that verifies; None if folders must not be read.
    folder: working folder, which tells programs of the same name apart.
    first: data file or folder -> its first record, or None if it cannot be read. Cost does not depend on its size.
    example: config -> the text that it would train from the first record, or None without model or data.
    """

    allow_unknown: bool = False
    devices: int = 1
    read: Callable[[str], str] = no_files
    environment: Mapping[str, str] = field(default_factory=dict)
    newest: Callable[[str], str | None] | None = None
    folder: str = ""
    first: FirstRecord = lambda path: None
    example: Callable[[Mapping[str, Any]], str | None] = lambda config: None


@dataclass(frozen=True)
class Command:
    """A program and its arguments, without what starts it.

    program: file or command as written; the dotted module name if `module`.
    environment: variables set for it.
    launcher: name of the launcher, "" for none.
    facts: what the launcher decides for the program, such as mixed_precision. "processes" is the total number of
        processes, also when this process is one of them.
    notes: notes on the launcher's flags.
    folder: working folder.
    processes: number of processes that the launcher starts, on all machines.
    machines: number of machines on which the command is given.
    engine: how they shard memory, as keys of `parallel`.
    """

    program: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    folder: str = ""
    processes: int = 1
    machines: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The file's name without folders, or the module."""
        return self.program if self.module else self.program.rpartition("/")[2]


def read_command(words: Sequence[str], options: Options) -> Command:
    """Separate a program and its arguments from the words that start it. Raises InputError."""
    if blank := next((place for place, word in enumerate(words) if word.isspace()), None):
        what = f"only whitespace after {words[blank - 1]}: a blank or comment after a backslash ends the command"
        raise command_error(repr(words[blank]), what, "put nothing after a backslash at the end of a line")
    environment: dict[str, str] = {}
    left = list(words)
    while left:
        if assignment := _ASSIGNMENT.fullmatch(left[0]):
            environment[assignment[1]] = assignment[2]
            del left[0]
        elif left[0] in _BEFORE:
            del left[0]
        elif tuple(left[:2]) in _RUNNERS:
            del left[:2]
        else:
            break
    if not left:
        raise command_error("", "there is no command to read", "give one after --")
    variables = {**inherited(options), **environment}
    command = _program(left, variables, options)
    notes = (*(environment_note(name, value) for name, value in variables.items()), *command.notes)
    facts, devices = _settled(command, variables)
    environment = {**variables, **devices, **command.environment}
    return replace(command, environment=environment, facts=facts, notes=notes, folder=options.folder)


def python_words(words: Sequence[str]) -> list[str]:
    """Return the words that start the Python of a command: as typed, with its flags, or the one beside a launcher.
    Raises InputError if it cannot be found."""
    left = list(words)
    while left and (_ASSIGNMENT.fullmatch(left[0]) or left[0] in _BEFORE):
        del left[0]
    named = next((place for place, word in enumerate(left) if _PYTHON.fullmatch(word)), None)
    script = next((place for place, word in enumerate(left) if word.endswith(".py")), len(left))
    if named is not None and named < script:
        end = named + 1
        while end < script and left[end].startswith("-") and left[end] != "-m":
            end += 2 if left[end] in _PYTHON_WITH_VALUE else 1
        return left[:end]
    if script == 0:
        return [sys.executable]
    launcher = shutil.which(left[0])
    beside = Path(launcher).with_name("python") if launcher else None
    if beside is None or not beside.is_file():
        raise command_error(left[0], "has no python beside it", "name one: python -m accelerate.commands.launch …")
    return [str(beside)]


def inherited(options: Options) -> dict[str, str]:
    """Return the variables of this process that are not empty or off."""
    nothing = ("no", "false", "0", "")
    own = options.environment.items()
    return {name: value for name, value in own if name == _DEVICES or value.lower() not in nothing}


def is_read(note: Note, of_the_tool: Note) -> bool:
    """Return whether the tool or surefoot uses a NAME=value, given its note before and after the tool saw it."""
    return note != of_the_tool or note.where in _KNOWN_NAMES


def _settled(command: Command, environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (facts, environment) that the launch decides; a launcher passes them through the environment as well."""
    found = {"mixed_precision": environment.get("ACCELERATE_MIXED_PRECISION", "no"), **command.facts}
    # If a launcher started this process, it is one of several already, and batch sizes count all of them.
    started = plain_count(environment.get("WORLD_SIZE", "").strip()) or 0
    processes = started if started > 1 else command.processes
    several = {"processes": processes} if processes > 1 else {}
    launchers.check("mixed_precision", found["mixed_precision"], "mixed_precision")
    launchers.check("dynamo_backend", environment.get("ACCELERATE_DYNAMO_BACKEND"), "ACCELERATE_DYNAMO_BACKEND")
    requested = found["mixed_precision"] not in (None, "", "no", False)
    on_cpu = plain_truth(environment.get("ACCELERATE_USE_CPU", False))
    return {**(found if requested else {}), **several}, {_DEVICES: ""} if on_cpu else {}


def _program(left: list[str], environment: Mapping[str, str], options: Options) -> Command:
    first = left[0].rpartition("/")[2]
    if first == "accelerate" and left[1:2] == ["launch"]:
        return _launched(launchers.ACCELERATE, left[2:], environment, options)
    if first in ("torchrun", "torch.distributed.run"):
        return _launched(launchers.TORCHRUN, left[1:], environment, options)
    if first == "deepspeed":
        return _launched(launchers.DEEPSPEED, left[1:], environment, options)
    if _PYTHON.fullmatch(left[0]):
        return _python(left[1:], environment, options)
    return Command(left[0], tuple(left[1:]))


def _python(left: list[str], environment: Mapping[str, str], options: Options) -> Command:
    at = 0
    while at < len(left) and left[at].startswith("-") and left[at] not in ("-m", "-c"):
        at += 2 if left[at] in _PYTHON_WITH_VALUE else 1
    left = left[at:]
    if left[:1] == ["-c"]:
        raise command_error("python -c", "runs inline code, which surefoot does not", "give the tool's command")
    if not left or left == ["-m"]:
        raise command_error("python", "names no program", "give the script or module")
    if left[0] != "-m":
        return Command(left[0], tuple(left[1:]))
    module, rest = left[1], left[2:]
    if module in ("torch.distributed.run", "torch.distributed.launch"):
        return _launched(launchers.TORCHRUN, rest, environment, options)
    if module in ("accelerate.commands.launch", "accelerate"):
        return _launched(launchers.ACCELERATE, rest[1:] if module == "accelerate" else rest, environment, options)
    return Command(module, tuple(rest), module=True)


_MODULE = ("m", "module")


def _launched(
    launcher: launchers.Launcher, left: Sequence[str], environment: Mapping[str, str], options: Options
) -> Command:
    words: dict[str, str] = {}
    notes: list[Note] = []
    module, at = False, 0
    while at < len(left) and left[at].startswith("-"):
        flag, equals, value = left[at].partition("=")
        name = flag.lstrip("-").replace("-", "_")
        shown = left[at]
        if name in _MODULE:
            module = True
        elif equals:
            words[name] = value
        elif name in launcher.with_value:
            if at + 1 == len(left):
                raise setting_error(flag, "has no value", f"write {flag} VALUE")
            words[name] = left[at + 1]
            shown, at = f"{flag} {left[at + 1]}", at + 1
        else:
            words[name] = "true"
        if name not in _MODULE:
            launchers.check(name, scalar_or_text(words[name]), flag)
            key = "machines" if name == launcher.machines else "nproc" if name in launcher.count else None
            carried = Note(shown, "carried", (f"parallel.{key}",), "", flag)
            listed = Note(shown, "listed", (), launchers.reason_of(name), flag)
            notes.append(carried if key and words[name] != "1" else listed)
        at += 1
    if at == len(left):
        raise command_error(launcher.name, "starts no program", "name the script after its flags")
    settled: dict[str, Any] = {}
    if launcher is launchers.ACCELERATE and (path := words.get("config_file")) is not None:
        settled, of_the_file = launchers.read_file(path, options.read(path))
        notes += of_the_file
    settled |= {name: scalar_or_text(value) for name, value in words.items()}
    command = Command(left[at], tuple(left[at + 1 :]), module, launcher=launcher.name, notes=tuple(notes))
    return started(command, launcher, settled, environment, options)


def started(
    command: Command,
    launcher: launchers.Launcher,
    settled: Mapping[str, Any],
    environment: Mapping[str, str],
    options: Options,
) -> Command:
    """Return the command as a launcher with these settings starts it. environment: variables that the launcher sees."""
    devices = launchers.devices(settled)
    machines = machine_count(settled.get(launcher.machines, 1), f"--{launcher.machines}")
    if machines > 1 and launcher is launchers.DEEPSPEED:
        raise command_error(launcher.name, f"starts processes on {machines} machines, by ssh", MORE)
    count = _processes(launcher, settled, environment, options)
    place = launchers.place(settled) if machines > 1 else {}
    return replace(
        command,
        environment={**command.environment, **place, **({} if devices is None else {_DEVICES: devices})},
        facts={**command.facts, **{name: settled[name] for name in ("mixed_precision",) if name in settled}},
        processes=count if launcher is launchers.ACCELERATE else count * machines,
        machines=machines,
        engine=launchers.engine(settled),
    )


def machine_count(value: Any, where: str) -> int:
    """Return a launcher's number of machines. Raises InputError for a range, of which it would take those that come."""
    least, _, most = str(value).strip().rpartition(":")
    count = plain_count(most)
    if not count or least not in ("", most):
        raise setting_error(where, f"expected one number of machines, got {value}", MORE)
    return count


def in_processes(found: Translation, command: Command) -> Translation:
    """Set `parallel` to the launcher's processes and machines, and to its engine if the tool has set none. Raises
    InputError if the machines cannot share the processes evenly."""
    own = found.config.get("parallel", {})
    if command.processes == 1 or found.command != "train" or "machines" in own:
        return found
    parallel = {"nproc": command.processes, **(own if own.keys() - {"nproc"} else {**command.engine, **own})}
    if (machines := command.machines) > 1:
        each, left = divmod(parallel["nproc"], machines)
        if left or not each:
            what = f"{parallel['nproc']} processes on {machines} machines: surefoot starts as many on each"
            raise command_error(command.launcher or command.name, what, "name a multiple")
        parallel |= {"nproc": each, "machines": machines}
    return replace(found, config={**found.config, "parallel": parallel})


def with_processes(command: Command, count: int, machines: int) -> Command:
    """Return the command of a tool that starts its processes itself. count: on all machines."""
    return replace(command, facts={**command.facts, "processes": count}, processes=count, machines=machines)


def machines_of(command: Command) -> int:
    """Return the number of machines of a launcher, or of NNODES for tools that start their own. Raises InputError."""
    if command.launcher:
        return command.machines
    return machine_count(command.environment.get("NNODES", "").strip() or 1, "NNODES")


def _processes(
    launcher: launchers.Launcher, settled: Mapping[str, Any], environment: Mapping[str, str], options: Options
) -> int:
    """Return how many processes the launcher starts: accelerate's on all machines, others' on each."""
    count = next((settled[name] for name in launcher.count if name in settled), None)
    if settled.get("distributed_type") == "NO" and not settled.get("multi_gpu"):
        count = 1  # accelerate starts one then, whatever num_processes says
    if count in (None, "gpu", "auto", "xpu"):
        default_one = count is None and launcher is launchers.TORCHRUN
        on_cpu = any(plain_truth(settled.get(name, False)) for name in ("use_cpu", "cpu"))
        count = 1 if default_one or on_cpu else visible_devices(environment, settled, options)
    elif count == "cpu":
        count = 1
    processes = plain_count(count)
    if not processes:
        where = next((f"--{name}" for name in launcher.count if name in settled), launcher.name)
        raise setting_error(where, f"expected a number of processes from 1, got {count}")
    return processes


def visible_devices(environment: Mapping[str, str], settled: Mapping[str, Any], options: Options) -> int:
    """Return how many accelerators a launcher uses when it is given no number."""
    chosen = launchers.devices(settled)
    chosen = environment.get(_DEVICES) if chosen is None else chosen
    if chosen is None:
        return max(1, options.devices)
    return max(1, len([one for one in chosen.split(",") if one.strip()]))


_KNOWN_NAMES = {
    _DEVICES: "set for the run",
    "WANDB_PROJECT": "the project of the W&B run",
    "WANDB_MODE": "offline keeps the W&B run on this machine",
    "ACCELERATE_MIXED_PRECISION": "sets the precision unless the program sets it",
    "ACCELERATE_USE_CPU": "the run sees no accelerator",
}


def environment_note(name: str, value: str) -> Note:
    """Return the note on a variable that is set for the run."""
    shown = f"{name}=…" if hides(name) else redacted(f"{name}={value}")
    return Note(
        shown, "carried", (), _KNOWN_NAMES.get(name, "set for the run; libraries that know it will read it"), name
    )
