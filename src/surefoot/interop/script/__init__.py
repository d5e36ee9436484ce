"""Translate Python scripts that use Hugging Face's Trainer or TRL's SFTTrainer.

    surefoot translate simple_finetune.py

The literals in calls of TrainingArguments or SFTConfig, LoraConfig, BitsAndBytesConfig, from_pretrained, load_dataset
and the trainer are read from the syntax tree, as are later statements about these objects. Nothing is executed, so
other effects of the script (above all, how its functions turn records into texts) are unknown, and noted as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.interop import trainer, trl
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.faults import script_error
from surefoot.interop.launch import Command, Options, inherited
from surefoot.interop.script.data import code_notes
from surefoot.interop.script.literals import Script
from surefoot.interop.script.reader import PLAIN_TRAINER, ROWS, Reader
from surefoot.interop.script.rules import SHARED, data_rule, precision_rule, set_kernels
from surefoot.interop.settings import by_name
from surefoot.interop.tool import Tool
from surefoot.interop.tool_log import ToolLog, trainer_row
from surefoot.interop.translation import Translation
from surefoot.system.errors import InputError

NAME = "Hugging Face"
_COMPAT = {
    "train_phi3_bos_zero.py": "examples/train_lora/train_phi3_bos_zero.py",
    "debug_bos_zero.py": "debug_bos_zero.py",
}
"""Scripts that existing guides mention -> the script that `surefoot compat` writes."""


def claims_file(path: str, text: str) -> bool:
    return path.endswith(".py")


def claims_command(command: Command) -> bool:
    return command.program.endswith(".py")


def from_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    if overrides:
        raise script_error(overrides[0], "a script takes no key=value", "change the script or its translated config")
    return _translate(Script.parse(text, path), options, Command(path, environment=inherited(options)))


def from_command(command: Command, options: Options) -> Translation:
    """Translate a command that runs a script. Arguments of the script are refused: code cannot be followed."""
    try:
        text = options.read(command.program)
    except InputError as error:
        if command.name in _COMPAT:
            fix = "surefoot compat FOLDER writes it: then python FOLDER/" + _COMPAT[command.name]
            raise InputError([replace(fault, fix=fix) for fault in error.faults]) from None
        raise
    if command.arguments:
        what = "a script's own arguments cannot be followed through its code"
        raise script_error(" ".join(command.arguments), what, "write their values into the script")
    return _translate(Script.parse(text, command.program), options, command)


def _translate(script: Script, options: Options, command: Command) -> Translation:
    reader = Reader(script)
    reader.read()
    if reader.faults:
        raise InputError(reader.faults)
    own = by_name(*trl.ROWS.values(), *ROWS, *(() if reader.is_trl else PLAIN_TRAINER))
    if reader.named_by_trainer:
        own["dtype"] = trl.ROWS["dtype"]  # SFTTrainer loads a model in fp32, from_pretrained in its saved dtype
    rules = (
        data_rule(reader),
        set_kernels,
        trl.set_length,
        trl.set_adapter,
        precision_rule(reader),
        *SHARED,
        *trainer.RULES,
    )
    environment = {**reader.machine.defaults, **command.environment, **reader.machine.environment}
    command = replace(command, environment=environment)
    found = Draft(Dialect(NAME, own, rules, trl.ALIASES), reader.words, command, options).finish("train")
    assert reader.train is not None
    record = options.first(reader.train.source["path"])
    code = code_notes(script, reader.train.code, reader.formatting, record, lambda: options.example(found.config))
    return replace(found, notes=(*found.notes, *reader.notes, *code))


SCRIPT = Tool(
    NAME, claims_command, from_command, claims_file, from_file, log=lambda translation: ToolLog(row=trainer_row)
)
