"""Translate Axolotl's YAML, with `key=value` overrides or flags after it, and its commands.

axolotl train run.yml --learning-rate 1e-4
accelerate launch -m axolotl.cli.train run.yml
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surefoot.config.dump import shown
from surefoot.config.yaml_reader import Document
from surefoot.interop.axolotl import back
from surefoot.interop.axolotl.methods import BLOCK, METHODS
from surefoot.interop.axolotl.processes import program_of
from surefoot.interop.axolotl.rows import ALIASES, PARTS, ROWS
from surefoot.interop.axolotl.rules import RULES
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.faults import command_error
from surefoot.interop.launch import Command, Options, in_processes
from surefoot.interop.settings import switches
from surefoot.interop.tool import Target, Tool
from surefoot.interop.translation import Note, Translation
from surefoot.interop.words import Word, parse_document, read_document, read_flags, read_pairs, top_keys

TOOL = "Axolotl"
DIALECT = Dialect(TOOL, ROWS, RULES, ALIASES, {"lora_rank": "lora_r"}, PARTS)
_MODULES = ("axolotl.cli.train",)
_SCRIPTS = ("finetune.py", "train.py")
_OF_THE_LAUNCH = ("launcher", "accelerate", "debug")  # older words of `axolotl.cli.train`


def claims_command(command: Command) -> bool:
    if command.module:
        return command.program in _MODULES
    first = command.arguments[0] if command.arguments else ""
    return command.name == "axolotl" or (command.name in _SCRIPTS and first.endswith((".yml", ".yaml")))


def claims_file(path: str, text: str) -> bool:
    keys = top_keys(path, text)
    return "base_model" in keys and bool(keys & {"datasets", "pretraining_dataset", "sequence_len", "micro_batch_size"})


def from_command(command: Command, options: Options) -> Translation:
    if command.name == "axolotl":
        if command.arguments[:1] != ("train",):
            word = command.arguments[0] if command.arguments else "nothing"
            raise command_error("axolotl", f"{word} is not a training command", "surefoot reads `axolotl train CONFIG`")
        started = program_of(command, options)
        found = in_processes(from_command(started, options), started)
        return replace(found, notes=(*started.notes, *found.notes))
    words, left = read_flags(command.arguments, switches=switches(ROWS) | {*_OF_THE_LAUNCH})
    words = [word for word in words if word.name not in _OF_THE_LAUNCH]
    if len(left) != 1:
        raise command_error(command.program, f"names {len(left)} config files", "name one")
    return _translate([*_read(parse_document(options.read(left[0]), left[0])), *words], options, command)


def from_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    return _translate([*_read(parse_document(text, path)), *read_pairs(overrides)], options, Command(path))


def _translate(words: Sequence[Word], options: Options, command: Command) -> Translation:
    return Draft(DIALECT, words, command, options).finish("train")


def _read(document: Document) -> list[Word]:
    """Return every top-level key, and those of the block `trl:` under their dotted names."""
    found: list[Word] = []
    for word in read_document(document):
        block: Any = None if word.name != BLOCK[:-1] else {} if word.value is None else word.value
        if not isinstance(block, dict):
            found.append(word)
            continue
        inside = {f"{BLOCK}{key}": value for key, value in block.items()}
        found += [Word(name, value, document.where(name), f"{name}: {shown(value)}") for name, value in inside.items()]
    return found


def environment_note(note: Note) -> Note:
    """List accelerate's mixed_precision, which Axolotl overwrites."""
    if "mixed_precision" not in note.word.lower():
        return note
    return replace(note, outcome="listed", why="Axolotl sets the precision from bf16 and fp16 only")


_STAGES = ("sft", "pretrain", "reward", *(stage for stage, _ in METHODS.values()))
_TARGET = Target(
    TOOL,
    "axolotl.yaml",
    lambda ours: {"train": ROWS} if ours["stage"] in _STAGES else {},
    back.start,
    fixed=back.fixed,
    always=("micro_batch_size", "gradient_accumulation_steps"),
    remarks={"model.trained": "all train: unfrozen_parameters match from the start of a parameter's name"},
)
AXOLOTL = Tool(TOOL, claims_command, from_command, claims_file, from_file, environment_note, target=_TARGET)
