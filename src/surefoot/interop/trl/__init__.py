"""Translate TRL: `trl sft` with flags or `--config run.yaml`, that file alone, and the script `sft.py`.

    trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --use_peft --lora_r 32

Facts: the dataclasses of TRL 1.16. `tests/equality` compares token ids, masks, learning rates and losses with TRL's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from surefoot.interop import trainer
from surefoot.interop.adapters import EIGHT_BITS, set_default_targets, set_nf4, set_start
from surefoot.interop.backward import Ours
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.faults import command_error
from surefoot.interop.launch import Command, FirstRecord, Options, in_processes, inherited
from surefoot.interop.settings import ALL_POSITIONS, NO_LIMIT, Row, by_name, switches
from surefoot.interop.shared_rules import set_rows
from surefoot.interop.tool import Target, Tool
from surefoot.interop.tool_log import ToolLog, trainer_row
from surefoot.interop.translation import Note, Translation
from surefoot.interop.trl import back
from surefoot.interop.trl.back import DTYPES
from surefoot.interop.trl.data import set_data
from surefoot.interop.trl.group import GROUP_ALIASES
from surefoot.interop.trl.launch import launched, starts
from surefoot.interop.trl.methods import METHODS, pairs_rule, rows_of
from surefoot.interop.trl.rows import OWN_ROWS
from surefoot.interop.words import (
    Word,
    parse_document,
    read_document,
    read_only_flags,
    read_pairs,
    top_keys,
    without_variables,
)
from surefoot.method_facts.losses import OTHER_WAYS

NAME = "TRL"
LATER = ("distillation",)
_NO_TRAINING = ("env", "vllm-serve")
_SCRIPTS = {
    "reward_modeling.py": "reward",
    "dpo_online.py": "online_dpo",
    **{f"{run}{name}.py": name for name in ("sft", *METHODS) for run in ("", "run_")},  # run_: alignment-handbook's
}
_MODULE = "trl.scripts."
_CONFIGS = (".yaml", ".yml")
ROWS: Mapping[str, Row] = by_name(*trainer.ROWS, *OWN_ROWS)
ALIASES = {
    **trainer.ALIASES,
    "torch_dtype": "dtype",
    "max_seq_length": "max_length",
    "dataset_train_name": "dataset_train_split",
    "hub_model_revision": "hub_revision",
    **GROUP_ALIASES,
}
ELSEWHERE = {"lora_rank": "lora_r", "lora_target": "lora_target_modules", "cutoff_len": "max_length"}


def set_length(draft: Draft) -> None:
    if "max_length" not in draft.rows:  # of methods that answer prompts
        _set_prompt_length(draft)
        return
    limit = draft["max_length"]
    if limit is None:  # a plain Trainer script that does not truncate
        return
    draft.set("data.max_length", limit, "max_length", why=NO_LIMIT if limit == ALL_POSITIONS else "")


_BEST_FIT = "TRL fills rows with the longest examples first, which may save a few rows"
_WHOLE = ("bfd", "ffd")  # ffd: of older versions


def set_packing(draft: Draft) -> None:
    """Set batch.row_tokens: with packing, TRL's batches count rows of max_length. Runs after batch.size is written."""
    if not draft["packing"]:
        draft.drop("nothing is packed", "packing", "packing_strategy")
    elif draft["packing_strategy"] not in _WHOLE:
        what = f"surefoot's rows have whole examples, and TRL's strategy {draft['packing_strategy']} cuts them"
        draft.refuse("packing_strategy", what, f"use one of {', '.join(_WHOLE)}")
    elif not isinstance(draft["max_length"], int):
        draft.refuse("packing", "needs a length of the rows", "set max_length")
    else:
        draft.note("packing_strategy", "carried", "", "batch.row_tokens")
        set_rows(draft, draft["max_length"], "packing", "max_length", why=_BEST_FIT)


def _set_prompt_length(draft: Draft) -> None:
    prompt, answer = draft["max_prompt_length"], draft["max_completion_length"]
    if prompt is None:
        draft.set("data.max_length", ALL_POSITIONS, why="TRL truncates no prompts")
    else:
        why = "together with max_completion_length; longer prompts are left out here, and lost their beginning there"
        draft.set("data.max_length", prompt + answer, "max_prompt_length", why=why)


def set_adapter(draft: Draft) -> None:
    shape = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save")
    if not draft["use_peft"]:
        draft.drop("use_peft is off", "use_peft", *shape, "use_dora", "use_rslora")
        if draft["load_in_4bit"]:
            draft.refuse("load_in_4bit", "4-bit weights cannot train", "add use_peft")
        return
    draft.set("adapter.kind", "dora" if draft["use_dora"] else "lora", "use_peft", "use_dora")
    draft.set("adapter.rank", draft["lora_r"], "lora_r")
    draft.set("adapter.alpha", draft["lora_alpha"], "lora_alpha")
    if "disable_dropout" in draft.rows and draft["disable_dropout"]:
        draft.drop("disable_dropout also disables the adapter's dropout, as in TRL", "lora_dropout")
    else:
        draft.set("adapter.dropout", draft["lora_dropout"], "lora_dropout")
    draft.set("adapter.rslora", draft["use_rslora"], "use_rslora")
    if "init_lora_weights" in draft.rows:  # of a script
        set_start(draft, "init_lora_weights")
    draft.set("adapter.modules_to_save", draft["lora_modules_to_save"] or [], "lora_modules_to_save")
    if named := draft["lora_target_modules"]:
        draft.set("adapter.targets", "all-linear" if named == ["all-linear"] else named, "lora_target_modules")
    else:
        set_default_targets(draft, "lora_target_modules")


def set_precision(draft: Draft) -> None:
    set_compute(draft)
    set_weights(draft)


def set_compute(draft: Draft) -> None:
    if draft["fp16"] and draft["bf16"]:
        draft.refuse("fp16", "bf16 and fp16 exclude each other", "keep one")
        return
    if draft["fp16"]:
        draft.set("precision.compute", "fp16", "fp16")
    elif draft["bf16"] is False and (launched := draft.facts.get("mixed_precision")):
        draft.set("precision.compute", launched, why="accelerate's mixed_precision")
    else:
        draft.set("precision.compute", "fp32" if draft["bf16"] is False else "bf16", "bf16")


_MASTER = "trained weights are kept in fp32: fp16 gradients cannot be unscaled, and bf16 loses small updates"


def set_weights(draft: Draft) -> None:
    """Set precision.base."""
    dtype = DTYPES.get(str(draft["dtype"]).removeprefix("torch."))
    if draft["load_in_8bit"] and draft["load_in_4bit"]:
        draft.refuse("load_in_8bit", "load_in_4bit is set as well", "keep one of the two")
        return
    if draft["load_in_8bit"]:
        draft.set("precision.base", "int8", "load_in_8bit", why=EIGHT_BITS)
        draft.drop("the base is in 8 bits", "dtype", "load_in_4bit", "use_bnb_nested_quant")
        return
    if draft["load_in_4bit"]:
        set_nf4(draft, "use_bnb_nested_quant", "load_in_4bit")
        if dtype == draft.written("precision.compute"):
            draft.note("dtype", "carried", "", "precision.base")
        else:
            draft.note("dtype", "changed", "products are computed in the type of training", "precision.base")
        return
    draft.drop("nothing is quantized", "load_in_4bit", "use_bnb_nested_quant")
    if dtype is None:
        draft.refuse("dtype", f"{draft['dtype']} is not a dtype for weights", f"use {', '.join(DTYPES)}")
    elif draft["use_peft"]:
        draft.set("precision.base", dtype, "dtype")
    elif dtype == "fp32":
        draft.note("dtype", "carried", "", "precision.base")
    else:
        draft.note("dtype", "changed", _MASTER, "precision.base")


def _dialect(method: str) -> Dialect:
    """Return the dialect of a method. method: the command's verb."""
    data = set_data if method == "sft" else pairs_rule(method)
    rules = (set_length, set_adapter, data, set_precision, trainer.set_do_train)
    if method == "sft":
        return Dialect(NAME, ROWS, (*rules, *trainer.RULES, set_packing), ALIASES, ELSEWHERE)
    return Dialect(NAME, rows_of(method, OWN_ROWS), (*rules, *trainer.RULES, METHODS[method].rule), ALIASES, ELSEWHERE)


_LISTS = (
    *("loss_type", "loss_weights", "lora_target_modules", "lora_modules_to_save", "lora_target_parameters"),
    *("report_to", "reward_funcs", "reward_weights", "reward_clip_range"),
)


def claims_command(command: Command) -> bool:
    return command.name in ("trl", *_SCRIPTS) or command.name.startswith(_MODULE)


def claims_file(path: str, text: str) -> bool:
    keys = top_keys(path, text)
    return (
        "model_name_or_path" in keys
        and bool(keys & {"dataset_name", "datasets", "dataset_mixture", "dataset_mixer"})
        and "dataset" not in keys
    )


def from_command(command: Command, options: Options) -> Translation:
    arguments = list(command.arguments)
    method = _SCRIPTS.get(command.name, "sft")
    if command.name == "trl":
        method = arguments.pop(0) if arguments else ""
    elif command.name.startswith(_MODULE):
        method = command.name.removeprefix(_MODULE)
    if method != "sft" and method not in METHODS:
        what = "is no training" if method in _NO_TRAINING else "is not a training method that surefoot can translate"
        what = "is not translated; write a surefoot config" if method in LATER else what
        fix = OTHER_WAYS.get(method, f"supported: sft, {', '.join(METHODS)}")
        raise command_error(f"trl {method}".strip(), what, fix)
    if command.name.startswith("run_") and arguments[:1] and arguments[0].endswith(_CONFIGS):
        arguments.insert(0, "--config")  # alignment-handbook's earlier scripts take the file without a flag
    words = read_only_flags(arguments, switches=switches(_dialect(method).rows), lists=_LISTS)
    in_files: list[Word] = []
    for word in [word for word in words if word.name == "config"]:
        in_files += read_document(parse_document(options.read(str(word.value)), str(word.value)))
    words = [*in_files, *(word for word in words if word.name != "config")]
    return _translated(method, words, command, options, launches=command.name == "trl")


def from_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    words = [*read_document(parse_document(text, path)), *read_pairs(overrides)]
    possible = _methods(path, words, options.first)
    if len(possible) > 1:
        fix = f"name it: surefoot run -- trl {' or '.join(possible)} --config {path}"
        raise command_error(path, "the file does not tell which TRL method it is for", fix)
    found = _translated(possible[0], words, Command(path, environment=inherited(options)), options, launches=True)
    told = Note(
        f"trl {possible[0]}", "assumed", ("stage",), "settings, name or first record of the file tell the method"
    )
    return replace(found, notes=(*found.notes, told))


def _translated(
    method: str, words: Sequence[Word], command: Command, options: Options, *, launches: bool
) -> Translation:
    """Translate the settings of a method. launches: whether TRL's command starts the processes, with accelerate."""
    dialect = _dialect(method)
    words, environment = without_variables(words, "env")
    command = replace(command, environment={**environment, **command.environment})
    notes: tuple[Note, ...] = ()
    if launches:
        of_the_launch = [word for word in words if starts(word, dialect.rows)]
        words = [word for word in words if not starts(word, dialect.rows)]
        command, notes = launched(of_the_launch, command, options)
    found = Draft(dialect, words, command, options).finish("train")
    found = in_processes(found, command)
    return replace(found, notes=(*notes, *found.notes))


def _methods(path: str, words: Sequence[Word], first: FirstRecord) -> list[str]:
    """Return the verbs of `trl VERB --config path` that a file could be for, judged by its settings, its name or
    folder, and the first record of the data."""
    known = {"sft": set(ROWS)} | {name: set(rows_of(name, OWN_ROWS)) for name in METHODS}
    if not any(word.name == "teacher_model_name_or_path" for word in words):
        del known["gkd"]  # whose other settings are those of sft
    given = {ALIASES.get(word.name, word.name) for word in words} & set().union(*known.values())
    fitting = [name for name, rows in known.items() if given <= rows]
    if not fitting or len(fitting) == 1:
        return fitting or list(known)
    named = re.split(r"[^a-z]+", "/".join(path.split("/")[-2:]).lower())
    if matching := [name for name in fitting if name in named]:
        return matching
    source = next((word.value for word in words if word.name == "dataset_name"), None)
    record = first(source) if isinstance(source, str) else None
    if record is None:
        return fitting
    kind = "chosen" in record, "label" in record
    answered = {"sft"} if "prompt" not in record or "completion" in record else {"grpo", "rloo"}
    of_kind = {(True, False): {"dpo", "reward", "orpo", "cpo"}, (False, True): {"kto"}, (False, False): answered}
    return [name for name in fitting if name in of_kind.get(kind, known)] or fitting


def _fitting(ours: Ours) -> Mapping[str, Mapping[str, Row]]:
    """Return the rows of the methods that train a config's stage."""
    stage = ours["stage"]
    texts = {"sft": ROWS} if ours.facts.learns_tokens and not ours.facts.teacher else {}
    return texts | {name: rows_of(name, OWN_ROWS) for name, method in METHODS.items() if method.stage == stage}


TRL = Tool(
    NAME,
    claims_command,
    from_command,
    claims_file,
    from_file,
    log=lambda translation: ToolLog(row=trainer_row),
    target=Target(
        NAME,
        "trl.yaml",
        _fitting,
        back.start,
        always=("report_to",),
        files=back.files,
        origin=back.origin,
        remarks=back.REMARKS,
    ),
)
