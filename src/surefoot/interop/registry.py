"""List the tools that surefoot translates, and find the one that a command or file belongs to.

    translate_command(["llamafactory-cli", "train", "run.yaml"], options)
    translate_file("run.yaml", text, ["lora_rank=8"], options)

A tool claims a command by the program's name and a file by its keys; the first tool that claims it translates it.
Several tools have a train.py that takes a file: there the file's keys decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.interop import deepspeed_chat, measuring
from surefoot.interop.axolotl import AXOLOTL
from surefoot.interop.faults import command_error
from surefoot.interop.finetune import FINETUNE
from surefoot.interop.launch import Command, Options, in_processes, is_read, read_command
from surefoot.interop.llamafactory.tool import LLAMAFACTORY
from surefoot.interop.script import SCRIPT
from surefoot.interop.settings import asks_for_help, described
from surefoot.interop.shared_rules import check_resumed
from surefoot.interop.swift import SWIFT
from surefoot.interop.takeover import find_script
from surefoot.interop.tool import Tool
from surefoot.interop.tool_log import NO_LINES, ToolLog
from surefoot.interop.torchtune import TORCHTUNE
from surefoot.interop.train_sft import TRAIN_SFT
from surefoot.interop.translation import Translation
from surefoot.interop.trl import TRL
from surefoot.system.errors import InputError

_SHARED_NAMES = ("train.py", "finetune.py")


def tools() -> tuple[Tool, ...]:
    """Return all tools in the order in which they are tried; SCRIPT claims every script, so it is last."""
    own = (FINETUNE, TRAIN_SFT, AXOLOTL, TRL, TORCHTUNE, SWIFT)
    return (LLAMAFACTORY, *measuring.TOOLS, *deepspeed_chat.TOOLS, *own, SCRIPT)


def translate_command(words: Sequence[str], options: Options) -> Translation:
    """Translate a command. Raises InputError with every fault, also if no known tool claims it."""
    command = read_command(words, options)
    of_its_file = _tool_of_its_file(command, options)
    for tool in tools() if of_its_file is None else (of_its_file,):
        if tool is of_its_file or tool.claims_command(command):
            found = in_processes(tool.from_command(command, options), command)
            check_resumed(found, options)
            noted = [(note, tool.environment_note(note)) for note in command.notes]
            given = {word.partition("=")[0] for word in words}
            unread = {note.where for note, of_the_tool in noted if not is_read(note, of_the_tool)}
            # Variables that the shell happens to set and nobody reads would fill every account of the settings.
            unread &= options.environment.keys() - given
            notes = tuple(of_the_tool for note, of_the_tool in noted if note.where not in unread)
            environment = {**command.environment, **found.environment}
            kept = {name: value for name, value in environment.items() if name not in unread}
            return replace(found, notes=(*notes, *found.notes), environment=kept)
    if command.program.endswith((".yaml", ".yml", ".json")):
        fix = f"use surefoot train {command.program}, which also takes another tool's config"
        raise command_error(command.program, "is a file, not a command", fix)
    known = ", ".join(tool.name for tool in tools())
    raise command_error(command.program, "is not a program that surefoot can translate", f"supported: {known}")


def own_script(words: Sequence[str], options: Options) -> Command | None:
    """Return the command if it runs a user's own script that calls `Trainer.train()`, else None."""
    command = read_command(words, options)
    if _tool_of_its_file(command, options) is not None:
        return None
    tool = next((tool for tool in tools() if tool.claims_command(command)), None)
    if find_script(command, options) is None:
        return None
    if command.machines > 1:
        what = f"starts the script on {command.machines} machines; surefoot takes scripts over on one"
        raise command_error(command.launcher, what, "translate it there, and train the YAML on all of them")
    # A tool's script of that name: those need arguments, and TRL's own read them with its TrlParser.
    if tool is not SCRIPT and command.arguments and (tool is not TRL or "TrlParser" in options.read(command.program)):
        return None
    return command


def command_help(words: Sequence[str], options: Options) -> tuple[str, list[tuple[str, str]]] | None:
    """Return (tool name, [(flag, what becomes of it)]) if the command asks for --help, else None.

    Raises InputError for a tool that takes a file instead of flags.
    """
    command = read_command(words, options)
    tool = next((tool for tool in tools() if tool.claims_command(command)), None)
    if tool is None or not asks_for_help(command.arguments):
        return None
    if not tool.rows:
        fix = "surefoot translate shows what becomes of every setting in its config"
        raise command_error(command.program, f"takes a config ({tool.name}), listed in docs/dialects.md", fix)
    return tool.name, described(tool.rows)


def _tool_of_its_file(command: Command, options: Options) -> Tool | None:
    """Return the tool whose file a shared program name is given, as in `python src/train.py run.yaml`."""
    first = command.arguments[0] if command.arguments else ""
    if command.name not in _SHARED_NAMES or not first.endswith((".yaml", ".yml", ".json")):
        return None
    try:
        return file_tool(first, options.read(first))
    except InputError:
        return None  # the tool that claims the command reports it


def file_tool(path: str, text: str) -> Tool | None:
    """Return the tool whose config this is; None for surefoot's own and for files that no tool claims."""
    return next((tool for tool in tools() if tool.from_file and tool.claims_file(path, text)), None)


def translate_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    """Translate a config file. Raises InputError with every fault, also if no known tool claims it."""
    tool = file_tool(path, text)
    from surefoot.config.load import is_run_config  # slow to import, rarely needed

    if tool is None and is_run_config(text):
        fix = f"there is nothing to translate: surefoot train {path}"
        raise command_error(path, "is already a surefoot config", fix)
    if tool is None or tool.from_file is None:
        known = ", ".join(tool.name for tool in tools())
        raise command_error(path, "is not a config that surefoot can translate", f"supported: {known}")
    found = tool.from_file(path, text, overrides, options)
    check_resumed(found, options)
    return found


def log_of(translation: Translation) -> ToolLog:
    """Return the log lines of the translated tool."""
    return next((tool.log(translation) for tool in tools() if tool.name == translation.tool), NO_LINES)
