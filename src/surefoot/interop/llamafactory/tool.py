"""LLaMA-Factory's commands and files: `llamafactory-cli train run.yaml lora_rank=8`, flags, and YAML or JSON alone.

Facts: its README and the docstrings of its argument classes, as of version 0.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from surefoot.interop import trainer
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.launch import MORE, Command, Options, inherited, visible_devices
from surefoot.interop.llamafactory.data import reading, set_data
from surefoot.interop.llamafactory.export import export
from surefoot.interop.llamafactory.rows import ROWS
from surefoot.interop.llamafactory.rules import RULES
from surefoot.interop.llamafactory.voice import voice
from surefoot.interop.tool import Tool
from surefoot.interop.translation import Note, Translation, in_processes
from surefoot.interop.words import Word, parse_document, plain_count, plain_truth, read_document, read_flags, read_pairs
from surefoot.system.errors import Fault, InputError

NAME = "LLaMA-Factory"
DIALECT = Dialect(NAME, ROWS, RULES, trainer.ALIASES)
_PROGRAMS = ("llamafactory-cli", "lmf", "llamafactory.cli", "llamafactory.launcher")
_SCRIPTS = ("train.py", "train_bash.py")  # how it was started before it had a command
_SWITCHES = frozenset(name for name, row in ROWS.items() if isinstance(row.default, bool))
_SUFFIXES = (".yaml", ".yml", ".json")
# By these a file is known: each is a word of LLaMA-Factory's that neither surefoot nor the other tools have.
_FLAGS = ("--stage", "--finetuning_type", "--dataset_dir", "--cutoff_len")
_OWN = ("finetuning_type", "dataset_dir", "cutoff_len", "lora_target", "export_dir", "template", "stage", "dataset")
_OF_A_TRAINING = {"dataset", "do_train", "output_dir", "learning_rate", "per_device_train_batch_size"}
_LISTS = ("lora_target", "additional_target")
_ELSEWHERE = {
    "eval": "`surefoot evaluate` measures models",
    "api": "surefoot serves no API; `surefoot generate` answers files of prompts",
    "webui": "`surefoot board` shows runs; `surefoot init` writes a config",
    "webchat": "`surefoot chat` talks in the terminal",
    "env": "`surefoot --version` lists versions",
    "version": "`surefoot --version` lists versions",
    "help": "`surefoot --help` lists commands",
}
_ENVIRONMENT = {
    "FORCE_TORCHRUN": "surefoot starts its processes itself",
    "NNODES": "one machine",
    "NODE_RANK": "one machine",
    "NPROC_PER_NODE": "as many processes (parallel.nproc)",
    "MASTER_ADDR": "surefoot picks one on this machine",
    "MASTER_PORT": "surefoot picks one on this machine",
    "MAX_RESTARTS": "surefoot resumes with --resume",
    "RDZV_ID": "processes on one machine need no meeting point",
    "MIN_NNODES": "one machine",
    "MAX_NNODES": "one machine",
    "DISABLE_VERSION_CHECK": "surefoot has no such check",
    "LLAMAFACTORY_VERBOSITY": "surefoot's own lines are few",
    "RECORD_VRAM": "peak memory is always logged",
    "OPTIM_TORCH": "surefoot starts itself",
    "USE_RAY": "surefoot starts its processes itself",
    "ALLOW_EXTRA_ARGS": "words that LLaMA-Factory does not know are listed, not refused",
}
_REFUSED_SWITCHES = {
    "USE_MODELSCOPE_HUB": "surefoot does not read ModelScope",
    "USE_OPENMIND_HUB": "surefoot does not read Modelers",
    "USE_MCA": "surefoot has no Megatron",
}


def from_command(command: Command, options: Options) -> Translation:
    verb, words = _split(command)
    if verb in _ELSEWHERE:
        raise InputError(
            Fault(f"{command.name} {verb}", "has no counterpart here", _ELSEWHERE[verb], code="SF-TRANSLATE-COMMAND")
        )
    if verb not in ("train", "export", "chat"):
        raise InputError(
            Fault(
                f"{command.name} {verb}",
                "is no command of LLaMA-Factory",
                "it has train, export, chat",
                code="SF-TRANSLATE-COMMAND",
            )
        )
    _check_processes(command.environment)
    given = _words(words, options)
    allow = options.allow_unknown or plain_truth(command.environment.get("ALLOW_EXTRA_ARGS", False)) is True
    if verb == "train":
        found = _train(given, replace(options, allow_unknown=allow), command)
    else:
        found = export(given, verb, DIALECT, allow_unknown=allow)
    return replace(found, environment={**command.environment, **found.environment})


def from_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    words = [*read_document(parse_document(text, path)), *read_pairs(overrides)]
    names = {word.name for word in words if word.value is not None}
    if "export_dir" in names and "dataset" not in names:
        return export(words, "export", DIALECT, allow_unknown=options.allow_unknown)
    if not names & _OF_A_TRAINING:
        return export(words, "chat", DIALECT, allow_unknown=options.allow_unknown)
    return _train(words, options, Command(path, environment=inherited(options)))


def claims_command(command: Command) -> bool:
    if command.name in _PROGRAMS or "llamafactory" in command.program.split("/"):
        return True
    flags = {word.partition("=")[0].replace("-", "_").replace("__", "--", 1) for word in command.arguments}
    return command.name in _SCRIPTS and bool(flags & set(_FLAGS))


def claims_file(path: str, text: str) -> bool:
    if not path.lower().endswith(_SUFFIXES):
        return False
    try:
        data = parse_document(text, path).data
    except InputError:
        return False
    return "model_name_or_path" in data and any(name in data for name in _OWN)


def _split(command: Command) -> tuple[str, Sequence[str]]:
    """The verb and what follows it. The file that torchrun is given stands for `train`."""
    if command.program.endswith("launcher.py") or command.name in ("llamafactory.launcher", "run_exp.py", *_SCRIPTS):
        return "train", command.arguments
    if not command.arguments:
        raise InputError(
            Fault(command.name, "names no command", "it has train, export, chat", code="SF-TRANSLATE-COMMAND")
        )
    return command.arguments[0], command.arguments[1:]


def _words(words: Sequence[str], options: Options) -> list[Word]:
    if words and words[0].lower().endswith(_SUFFIXES) and not words[0].startswith("-"):
        return [*read_document(parse_document(options.read(words[0]), words[0])), *read_pairs(words[1:])]
    flags, left = read_flags(words, switches=_SWITCHES, lists=_LISTS)
    if left:
        fix = "write --key value, or a .yaml file first"
        raise InputError([Fault(word, "belongs to no flag", fix, code="SF-TRANSLATE-SETTING") for word in left])
    return flags


def _train(words: Sequence[Word], options: Options, command: Command) -> Translation:
    rules = tuple(reading(options.read) if rule is set_data else rule for rule in RULES)
    devices = _processes(command, options)
    draft = Draft(
        replace(DIALECT, rules=rules),
        words,
        allow_unknown=options.allow_unknown,
        read=options.read,
        environment=command.environment,
        facts={**command.facts, "processes": devices},
    )
    if devices > 1:
        whole = f"{devices} x per_device_train_batch_size x gradient_accumulation_steps examples in a step"
        draft.assume(f"{devices} processes", whole, "batch.size", "parallel.nproc")
    return in_processes(draft.finish("train", environment=draft.environment), devices, command.engine)


def _processes(command: Command, options: Options) -> int:
    """One on each device, unless a launcher or the environment says how many."""
    if command.launcher or "processes" in command.facts:
        return command.facts.get("processes", 1)
    asked = plain_count(command.environment.get("NPROC_PER_NODE", "").strip())
    return asked if asked is not None else visible_devices(command.environment, {}, options)


def _check_processes(environment: Mapping[str, str]) -> None:
    for name in ("NNODES", "MIN_NNODES", "MAX_NNODES"):
        value = environment.get(name, "1").strip()
        if value not in ("", "1"):
            raise InputError(
                Fault(
                    name,
                    f"asks for {value}, and surefoot starts processes on one machine",
                    MORE,
                    code="SF-TRANSLATE-COMMAND",
                )
            )
    value = environment.get("NPROC_PER_NODE", "").strip()
    if value not in ("", "gpu", "auto") and plain_count(value) is None:
        raise InputError(
            Fault("NPROC_PER_NODE", f"expected a number of processes, got {value!r}", code="SF-TRANSLATE-SETTING")
        )
    for name, reason in _REFUSED_SWITCHES.items():
        if plain_truth(environment.get(name, False)):
            raise InputError(
                Fault(
                    name,
                    reason,
                    "leave it out, and name what lies on this machine or the hub",
                    code="SF-TRANSLATE-COMMAND",
                )
            )


def environment_note(note: Note) -> Note:
    """LLaMA-Factory's own names say what becomes of them."""
    reason = _ENVIRONMENT.get(note.where)
    return note if reason is None else replace(note, fate="listed", why=reason)


LLAMAFACTORY = Tool(
    name=NAME,
    claims_command=claims_command,
    from_command=from_command,
    claims_file=claims_file,
    from_file=from_file,
    environment_note=environment_note,
    voice=voice,
    rows=ROWS,
)
