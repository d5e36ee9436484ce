"""Which tools surefoot understands, and which of them a command or a file belongs to.

    translate_command(["llamafactory-cli", "train", "run.yaml"], options)
    translate_file("run.yaml", text, ["lora_rank=8"], options)

A tool claims a command by the program's name and a file by its keys; the first that claims it reads it. Several tools
have a train.py that takes a file: there the file's keys decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.interop import deepspeed_chat, measuring
from surefoot.interop.axolotl import AXOLOTL
from surefoot.interop.faults import command_error
from surefoot.interop.finetune import FINETUNE
from surefoot.interop.launch import Command, Options, is_read, read_command
from surefoot.interop.llamafactory.tool import LLAMAFACTORY
from surefoot.interop.script import SCRIPT
from surefoot.interop.settings import asks_for_help, described
from surefoot.interop.shared_rules import check_resumed
from surefoot.interop.tool import Tool
from surefoot.interop.tool_log import NO_LINES, ToolLog
from surefoot.interop.torchtune import TORCHTUNE
from surefoot.interop.train_sft import TRAIN_SFT
from surefoot.interop.translation import Translation, in_processes
from surefoot.interop.trl import TRL
from surefoot.system.errors import InputError

_SHARED_NAMES = ("train.py", "finetune.py")


def tools() -> tuple[Tool, ...]:
    """Any other script comes last."""
    return (LLAMAFACTORY, *measuring.TOOLS, *deepspeed_chat.TOOLS, FINETUNE, TRAIN_SFT, AXOLOTL, TRL, TORCHTUNE, SCRIPT)


def translate_command(words: Sequence[str], options: Options) -> Translation:
    """Raises InputError with every fault, also for a command of no known tool."""
    command = read_command(words, options)
    of_its_file = _tool_of_its_file(command, options)
    for tool in tools() if of_its_file is None else (of_its_file,):
        if tool is of_its_file or tool.claims_command(command):
            found = in_processes(tool.from_command(command, options), command.processes, command.engine)
            check_resumed(found, options)
            noted = [(note, tool.environment_note(note)) for note in command.notes]
            typed = {word.partition("=")[0] for word in words}
            unread = {note.where for note, of_the_tool in noted if not is_read(note, of_the_tool)}
            # An environment variable is no word of the command: a shell's own FOO=1 would fill every account.
            unread &= options.environment.keys() - typed  # what the process happens to have, and nobody asked for
            notes = tuple(of_the_tool for note, of_the_tool in noted if note.where not in unread)
            environment = {**command.environment, **found.environment}
            kept = {name: value for name, value in environment.items() if name not in unread}
            return replace(found, notes=(*notes, *found.notes), environment=kept)
    if command.program.endswith((".yaml", ".yml", ".json")):
        fix = f"surefoot train {command.program} trains with a config, also with another tool's"
        raise command_error(command.program, "is a file, and no command", fix)
    known = ", ".join(tool.name for tool in tools())
    raise command_error(command.program, "is a program that surefoot does not understand", f"it reads {known}")


def command_help(words: Sequence[str], options: Options) -> tuple[str, list[tuple[str, str]]] | None:
    """(name of the tool, its flags with what becomes of each) where the command asks for --help; None where not.

    Raises InputError for a tool that takes no flags but a file.
    """
    command = read_command(words, options)
    tool = next((tool for tool in tools() if tool.claims_command(command)), None)
    if tool is None or not asks_for_help(command.arguments):
        return None
    if not tool.rows:
        fix = "surefoot translate shows what becomes of every word of its config"
        raise command_error(command.program, f"takes a config ({tool.name}), listed in docs/dialects.md", fix)
    return tool.name, described(tool.rows)


def _tool_of_its_file(command: Command, options: Options) -> Tool | None:
    """Of `python src/train.py run.yaml` and the like."""
    first = command.arguments[0] if command.arguments else ""
    if command.name not in _SHARED_NAMES or not first.endswith((".yaml", ".yml", ".json")):
        return None
    try:
        return file_tool(first, options.read(first))
    except InputError:
        return None  # whoever claims the command says so


def file_tool(path: str, text: str) -> Tool | None:
    """The tool whose config this is; None for one of surefoot's own, and for what nobody claims."""
    return next((tool for tool in tools() if tool.from_file and tool.claims_file(path, text)), None)


def translate_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    """Raises InputError with every fault, also for a file of no known tool."""
    tool = file_tool(path, text)
    from surefoot.config.load import is_run_config  # slow to import, and seldom needed

    if tool is None and is_run_config(text):
        fix = f"there is nothing to translate: surefoot train {path}"
        raise command_error(path, "is a config of surefoot's own already", fix)
    if tool is None or tool.from_file is None:
        known = ", ".join(tool.name for tool in tools())
        raise command_error(path, "is not a config of a tool that surefoot understands", f"it reads {known}")
    found = tool.from_file(path, text, overrides, options)
    check_resumed(found, options)
    return found


def log_of(translation: Translation) -> ToolLog:
    """The log lines of the tool that was translated."""
    return next((tool.log(translation) for tool in tools() if tool.name == translation.tool), NO_LINES)
