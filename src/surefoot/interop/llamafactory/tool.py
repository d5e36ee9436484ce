"""Translate LLaMA-Factory: `llamafactory-cli train run.yaml lora_rank=8`, flags, and YAML or JSON files.

`llamafactory-cli export` and `chat` become arguments of `surefoot export` and `surefoot chat`. Facts: its README and
the docstrings of its argument classes, as of version 0.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from surefoot.interop import launchers, trainer
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.faults import command_error, setting_error
from surefoot.interop.launch import (
    MORE,
    Command,
    Options,
    in_processes,
    inherited,
    machines_of,
    visible_devices,
    with_processes,
)
from surefoot.interop.llamafactory import back, v1
from surefoot.interop.llamafactory.data import STAGES
from surefoot.interop.llamafactory.log_lines import log_lines
from surefoot.interop.llamafactory.rows import PARTS, ROWS
from surefoot.interop.llamafactory.rules import RULES
from surefoot.interop.settings import (
    OF_THE_HUB,
    all_listed,
    by_name,
    joint,
    listed,
    names,
    number,
    refused,
    switches,
    text,
)
from surefoot.interop.tool import Target, Tool
from surefoot.interop.translation import Note, Translation
from surefoot.interop.words import (
    Word,
    parse_document,
    plain_count,
    plain_truth,
    read_document,
    read_flat,
    read_only_flags,
    read_pairs,
    top_keys,
)

NAME = "LLaMA-Factory"
DIALECT = Dialect(NAME, ROWS, RULES, trainer.ALIASES, parts=PARTS)
_PROGRAMS = ("llamafactory-cli", "lmf", "llamafactory.cli", "llamafactory.launcher")
_SCRIPTS = ("train.py", "train_bash.py")  # names from before it had a command
_SUFFIXES = (".yaml", ".yml", ".json")
# Settings that identify a file or command: neither surefoot nor the other tools have them.
_FLAGS = ("--stage", "--finetuning_type", "--dataset_dir", "--cutoff_len")
_OWN = {"finetuning_type", "dataset_dir", "cutoff_len", "lora_target", "export_dir", "template", "stage", "dataset"}
_OF_A_TRAINING = {"dataset", "do_train", "output_dir", "learning_rate", "per_device_train_batch_size"}
_LISTS = ("lora_target", "additional_target")
_ELSEWHERE = {
    "rm": "USE_V1's reward models are not translated: write a surefoot config (docs/reward.md)",
    "eval": "`surefoot evaluate` measures models",
    "api": "surefoot serves no API; use `surefoot generate` with a file of prompts",
    "webui": "`surefoot board` shows runs; `surefoot init` writes a config",
    "webchat": "`surefoot chat` runs in the terminal",
    "env": "`surefoot --version` lists versions",
    "version": "`surefoot --version` lists versions",
    "help": "`surefoot --help` lists commands",
}
_ENVIRONMENT = {
    "FORCE_TORCHRUN": "surefoot starts its own processes",
    "NNODES": "the number of machines (parallel.machines)",
    "NPROC_PER_NODE": "the number of processes (parallel.nproc)",
    **dict.fromkeys(("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"), launchers.PLACE),
    "MAX_RESTARTS": "surefoot resumes with --resume",
    "RDZV_ID": "surefoot's machines know their number",
    **dict.fromkeys(("MIN_NNODES", "MAX_NNODES"), "the number of machines is fixed (parallel.machines)"),
    "DISABLE_VERSION_CHECK": "surefoot has no such check",
    "LLAMAFACTORY_VERBOSITY": "surefoot prints few lines",
    "RECORD_VRAM": "peak memory is always logged",
    "OPTIM_TORCH": "surefoot starts its own processes",
    "USE_RAY": "surefoot starts its own processes",
    "ALLOW_EXTRA_ARGS": "unknown settings are listed, not refused",
}
_REFUSED_SWITCHES = {
    "USE_MODELSCOPE_HUB": "surefoot does not support ModelScope",
    "USE_OPENMIND_HUB": "surefoot does not support Modelers",
    "USE_MCA": "surefoot has no Megatron",
}


def from_command(command: Command, options: Options) -> Translation:
    verb, words = _split(command)
    if verb in ("sft", "dpo") or (verb == "train" and plain_truth(command.environment.get("USE_V1", False))):
        _check_processes(command.environment)
        return _of_v1(_words(words, options), options, command, "" if verb == "train" else verb)
    if verb in _ELSEWHERE:
        raise command_error(f"{command.name} {verb}", "has no counterpart in surefoot", _ELSEWHERE[verb])
    if verb not in ("train", "export", "chat"):
        raise command_error(
            f"{command.name} {verb}", "is not a command of LLaMA-Factory", "choose from train, export, chat"
        )
    _check_processes(command.environment)
    given = _words(words, options)
    if plain_truth(command.environment.get("ALLOW_EXTRA_ARGS", False)):
        options = replace(options, allow_unknown=True)
    if verb == "train":
        found = _train(given, options, command)
    else:
        found = export(given, verb, options)
    return replace(found, environment={**command.environment, **found.environment})


def from_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    words = _in_file(path, text, overrides)
    if v1.is_v1(top_keys(path, text)):
        return _of_v1(words, options, Command(path, environment=inherited(options)))
    names = {word.name for word in words if word.value is not None}
    if "export_dir" in names and "dataset" not in names:
        return export(words, "export", options)
    if not names & _OF_A_TRAINING:
        return export(words, "chat", options)
    return _train(words, options, Command(path, environment=inherited(options)))


def claims_command(command: Command) -> bool:
    if command.name in _PROGRAMS or "llamafactory" in command.program.split("/"):
        return True
    flags = {word.partition("=")[0].replace("-", "_").replace("__", "--", 1) for word in command.arguments}
    return command.name in _SCRIPTS and bool(flags & set(_FLAGS))


def claims_file(path: str, text: str) -> bool:
    keys = top_keys(path, text)
    return v1.is_v1(keys) or ("model_name_or_path" in keys and bool(keys & _OWN))


def _of_v1(words: Sequence[Word], options: Options, command: Command, stage: str = "") -> Translation:
    given = v1.renamed(words)
    if any(word.name == "export_dir" for word in given):
        return export(given, "export", options)
    return v1.translate(given, options, _launched(command, options), stage)


def _split(command: Command) -> tuple[str, Sequence[str]]:
    """Return the verb and the words after it. A file started by torchrun means `train`."""
    if command.program.endswith("launcher.py") or command.name in ("llamafactory.launcher", "run_exp.py", *_SCRIPTS):
        return "train", command.arguments
    if not command.arguments:
        raise command_error(command.name, "names no command", "choose from train, export, chat")
    return command.arguments[0], command.arguments[1:]


def _words(words: Sequence[str], options: Options) -> list[Word]:
    if words and words[0].lower().endswith(_SUFFIXES) and not words[0].startswith("-"):
        return _in_file(words[0], options.read(words[0]), words[1:])
    fix = "write --key value, or a .yaml file first"
    return read_only_flags(words, switches=switches(ROWS), lists=_LISTS, fix=fix)


def _in_file(path: str, text: str, overrides: Sequence[str]) -> list[Word]:
    document = parse_document(text, path)
    read = read_flat if v1.is_v1(frozenset(document.data)) else read_document
    return [*read(document), *read_pairs(overrides)]


def _train(words: Sequence[Word], options: Options, command: Command) -> Translation:
    command = _launched(command, options)
    draft = Draft(DIALECT, words, command, options)
    if (count := command.processes) > 1:
        whole = f"{count} x per_device_train_batch_size x gradient_accumulation_steps examples per step"
        draft.assume(f"{count} processes", whole, "batch.size", "parallel.nproc")
    return in_processes(draft.finish("train"), command)


def _launched(command: Command, options: Options) -> Command:
    """Return the command with its processes: one per device, unless a launcher or the environment sets them."""
    machines = machines_of(command)
    if command.launcher or "processes" in command.facts:
        count = command.facts.get("processes", 1)
    else:
        requested = plain_count(command.environment.get("NPROC_PER_NODE", "").strip())
        each = requested if requested is not None else visible_devices(command.environment, {}, options)
        if each == 1 and not plain_truth(command.environment.get("FORCE_TORCHRUN", False)):
            machines = 1  # it starts torchrun, which reads the number, for several devices or when it has to
        count = each * machines
    return with_processes(command, count, machines)


def _check_processes(environment: Mapping[str, str]) -> None:
    for name in ("MIN_NNODES", "MAX_NNODES"):
        value = environment.get(name, "1").strip()
        if value not in ("", "1"):
            raise command_error(name, f"takes {value} machines if they come; surefoot's number is fixed", MORE)
    value = environment.get("NPROC_PER_NODE", "").strip()
    if value not in ("", "gpu", "auto") and plain_count(value) is None:
        raise setting_error("NPROC_PER_NODE", f"expected a number of processes, got {value!r}")
    for name, reason in _REFUSED_SWITCHES.items():
        if plain_truth(environment.get(name, False)):
            raise command_error(name, reason, "leave it out, and use files on this machine or the Hugging Face hub")


def environment_note(note: Note) -> Note:
    """Replace the reason for LLaMA-Factory's own environment variables."""
    reason = _ENVIRONMENT.get(note.where)
    return note if reason is None else replace(note, outcome="listed", why=reason)


_TARGET = Target(
    name=NAME,
    file="llamafactory.yaml",
    rows=lambda ours: {"train": ROWS} if ours["stage"] in STAGES.values() else {},
    start=back.start,
    fixed=lambda ours: {"do_train": True},
    always=("report_to",),
    files=back.files,
    origin=back.origin,
    remarks={"model.trained": "freeze takes first or last layers, counted in a config.json that can be read here"},
)


LLAMAFACTORY = Tool(
    name=NAME,
    claims_command=claims_command,
    from_command=from_command,
    claims_file=claims_file,
    from_file=from_file,
    environment_note=environment_note,
    log=log_lines,
    rows=ROWS,
    target=_TARGET,
)


# What export and chat read of a training's settings; the others are listed.
_SAVED = by_name(
    joint("model_name_or_path", None, ("MODEL",), type=text, required=OF_THE_HUB),
    joint("adapter_name_or_path", None, ("--adapter",), type=text),
    *all_listed("is detected from the folder", finetuning_type="lora", stage="sft"),
    listed("template", None, "is read from the tokenizer and the run"),
    refused("model_revision", "main", "is of the hub, and models are read on this machine", "download it first"),
    refused("quantization_bit", None, "adapters are merged into the unquantized base"),
)
_MERGED = by_name(
    joint("export_dir", None, ("--out",), type=text, required="give the folder for the merged model"),
    joint("export_size", 5, ("--max-shard-size",), type=number),
    joint("export_device", "cpu", ("--device",), type=text),
    joint("infer_dtype", "auto", ("--dtype",), type=text),
    refused("export_legacy_format", False, "surefoot only writes safetensors"),
    refused("export_quantization_bit", None, "surefoot does not quantize exports", "quantize the merged folder"),
    refused("export_hub_model_id", None, "export writes a folder", "upload it afterwards: surefoot push"),
)
_ANSWERS = {"max_new_tokens": "--max-new-tokens", "temperature": "--temperature", "top_p": "--top-p"}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def export(words: Sequence[Word], verb: str, options: Options) -> Translation:
    """Translate `export` or `chat`, given as verb. Settings about training are listed."""
    other = "applies to training" if verb == "chat" else "applies to training or generation"
    rows = {
        name: listed(name, row.default, row.about if row.kind == "listed" else other, secret=row.secret)
        for name, row in ROWS.items()
    }
    asked = _MERGED if verb == "export" else {name: ROWS[name] for name in _ANSWERS}
    dialect = Dialect(NAME, {**rows, **_SAVED, **asked}, (_export if verb == "export" else _chat,), trainer.ALIASES)
    return Draft(dialect, words, None, options).finish(verb)


def _adapters(draft: Draft) -> list[str]:
    """Add the model and its adapters to the arguments, and return the adapters."""
    chain = names(draft["adapter_name_or_path"] or [])
    draft.arguments += [str(draft["model_name_or_path"]), *(word for one in chain for word in ("--adapter", one))]
    for name in ("model_name_or_path", "adapter_name_or_path"):
        draft.note(name, "carried", "", *draft.rows[name].keys)
    return chain


def _export(draft: Draft) -> None:
    size, dtype, device = draft["export_size"], draft["infer_dtype"], draft["export_device"]
    draft.arguments += ["--merge"] if _adapters(draft) else []
    draft.arguments += ["--out", str(draft["export_dir"]), "--max-shard-size", f"{size:g}GB"]
    if size <= 0:
        draft.refuse("export_size", f"expected a number of GB above 0, got {size:g}")
    elif not draft.given("export_size"):
        draft.assume("export_size: 5", "the default of LLaMA-Factory", "--max-shard-size")
    if dtype in _DTYPES:
        draft.arguments += ["--dtype", _DTYPES[dtype]]
    else:
        draft.drop("the dtype of the base", "infer_dtype")
    if device not in ("cpu", "auto"):
        draft.refuse("export_device", f"expected cpu or auto, got {device}")
    draft.arguments += ["--device", device] if draft.given("export_device") else []
    for name in ("export_dir", "export_size", "export_device", *(["infer_dtype"] if dtype in _DTYPES else [])):
        draft.note(name, "carried", "", *draft.rows[name].keys)


def _chat(draft: Draft) -> None:
    if len(_adapters(draft)) > 1:
        draft.refuse("adapter_name_or_path", "surefoot chat takes one adapter", "merge them with export first")
    for name, flag in _ANSWERS.items():
        draft.arguments += [flag, f"{draft[name]:g}" if name != "max_new_tokens" else str(draft[name])]
        draft.note(name, "carried", "", flag)
    draft.assume("temperature: 0.95, top_p: 0.7, max_new_tokens: 1024", "used if not given")
