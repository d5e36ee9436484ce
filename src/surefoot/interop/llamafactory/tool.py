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
from surefoot.interop.settings import names, number, switches, text, whole
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
    if v1.is_v1(top_keys(path, text)):
        words = [*read_flat(parse_document(text, path)), *read_pairs(overrides)]
        return _of_v1(words, options, Command(path, environment=inherited(options)))
    words = [*read_document(parse_document(text, path)), *read_pairs(overrides)]
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
        document = parse_document(options.read(words[0]), words[0])
        read = read_flat if v1.is_v1(frozenset(document.data)) else read_document
        return [*read(document), *read_pairs(words[1:])]
    fix = "write --key value, or a .yaml file first"
    return read_only_flags(words, switches=switches(ROWS), lists=_LISTS, fix=fix)


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


_READ = (
    "model_name_or_path",
    "adapter_name_or_path",
    "export_dir",
    "export_size",
    "export_device",
    "export_legacy_format",
    "export_hub_model_id",
    "export_quantization_bit",
    "quantization_bit",
    "model_revision",
    "infer_dtype",
    "finetuning_type",
    "stage",
    "template",
    "max_new_tokens",
    "temperature",
    "top_p",
)
_TYPES = {
    "export_dir": text,
    "export_size": number,
    "export_device": text,
    "infer_dtype": text,
    "max_new_tokens": whole,
    "temperature": number,
    "top_p": number,
}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def export(words: Sequence[Word], verb: str, options: Options) -> Translation:
    """Translate `export` or `chat`, given as verb. Settings about training are listed."""
    rows = {  # no row is translated on its own here
        name: replace(row, kind="joint", type=_TYPES.get(name, row.type)) for name, row in ROWS.items()
    }
    draft = Draft(Dialect(NAME, rows, (), trainer.ALIASES), words, None, options)
    for word in words:
        name = trainer.ALIASES.get(word.name, word.name)
        if name not in _READ and name in ROWS:
            row = ROWS[name]
            other = "does not apply to export" if verb == "export" else "does not apply to chat"
            draft.drop(row.about if row.kind == "listed" else other, name)
    model, adapters = draft["model_name_or_path"], draft["adapter_name_or_path"]
    if not model:
        return draft.finish(verb)  # which says so
    chain = names(adapters) if adapters is not None else []
    if len(chain) > 1 and verb == "chat":
        draft.refuse("adapter_name_or_path", "surefoot chat takes one adapter", "merge them with export first")
    draft.note("model_name_or_path", "carried", "", "MODEL")
    draft.arguments = [model]
    if chain:
        draft.note("adapter_name_or_path", "carried", "", "--adapter")
        for adapter in chain:
            draft.arguments += ["--adapter", adapter]
    else:
        draft.drop("names no adapter", "adapter_name_or_path")
    draft.drop("is detected from the folder", "finetuning_type", "stage")
    draft.drop("is read from the tokenizer and the run", "template")
    if draft.given("model_revision") and draft["model_revision"] != "main":
        draft.refuse("model_revision", f"{verb} reads models on this machine", "download the revision first")
    draft.note("model_revision", "carried", "the hub's default")
    if draft["quantization_bit"] is not None:
        draft.refuse("quantization_bit", "adapters are merged into the unquantized base", "leave it out")
    (_export if verb == "export" else _chat)(draft, bool(chain))
    return draft.finish(verb)


def _export(draft: Draft, merged: bool) -> None:
    target = draft["export_dir"]
    if not target:
        draft.refuse("export_dir", "is required", "give the folder for the merged model")
        return
    if merged:
        draft.arguments.append("--merge")
    draft.note("export_dir", "carried", "", "--out")
    draft.arguments += ["--out", target]
    if draft.given("export_size"):
        size = draft["export_size"]
        if size <= 0:
            draft.refuse("export_size", f"expected a number of GB above 0, got {size:g}")
        draft.arguments += ["--max-shard-size", f"{size:g}GB"]
        draft.note("export_size", "carried", "", "--max-shard-size")
    else:
        draft.arguments += ["--max-shard-size", "5GB"]
        draft.assume("export_size: 5", "the default of LLaMA-Factory", "--max-shard-size")
    dtype = draft["infer_dtype"]
    if dtype in _DTYPES:
        draft.arguments += ["--dtype", _DTYPES[dtype]]
        draft.note("infer_dtype", "carried", "", "--dtype")
    else:
        draft.drop("the dtype of the base", "infer_dtype")
    device = draft["export_device"]
    if device not in ("cpu", "auto"):
        draft.refuse("export_device", f"expected cpu or auto, got {device}")
        return
    draft.arguments += ["--device", device] if draft.given("export_device") else []
    draft.note("export_device", "carried", "", "--device")
    if draft["export_legacy_format"]:
        draft.refuse("export_legacy_format", "surefoot only writes safetensors", "leave it out")
    if draft["export_quantization_bit"] is not None:
        draft.refuse("export_quantization_bit", "surefoot does not quantize exports", "quantize the merged folder")
    if draft["export_hub_model_id"] is not None:
        draft.refuse("export_hub_model_id", "export writes a folder", "upload it afterwards: surefoot push")
    draft.drop("applies to generation", "max_new_tokens", "temperature", "top_p")


def _chat(draft: Draft, merged: bool) -> None:
    for name, flag in (("max_new_tokens", "--max-new-tokens"), ("temperature", "--temperature"), ("top_p", "--top-p")):
        value = draft[name]
        draft.arguments += [flag, f"{value:g}" if name != "max_new_tokens" else str(value)]
        draft.note(name, "carried", "", flag)
    draft.assume("temperature: 0.95, top_p: 0.7, max_new_tokens: 1024", "used if not given")
    exports = [name for name in _READ if name.startswith("export_")]
    draft.drop("does not apply to chat", "infer_dtype", *exports)
