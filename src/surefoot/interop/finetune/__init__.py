"""Translate three programs called `finetune.py`: that of LLM-Adapters and NVlabs/DoRA, that of alpaca-lora, and the
variant in the bf16 migration guide.

    finetune.py --base_model meta-llama/Llama-3.1-8B --adapter_name dora --lora_r=32 --bf16=True

The file in the command tells which one it is, and its defaults. Without the file the flags tell; if they do not, the
guide's defaults apply: eager attention, cuDNN's kernel off, no torch.compile, weights in fp32, a dedicated PAD token.
The programs parse flags with Python Fire: `--flag` is true, `--flag=True` and `--flag True` are the same, and a list is
a literal. The guide writes lists separated by blanks, which Fire misreads, so all spellings of a list are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.finetune import rules as sources
from surefoot.interop.finetune.rows import ALPACA_LORA, GUIDE, LISTS, ORIGINAL, SWITCHES
from surefoot.interop.finetune.rules import MICRO, Source, rules_of
from surefoot.interop.launch import Command, Options, inherited
from surefoot.interop.script import SCRIPT
from surefoot.interop.settings import Row
from surefoot.interop.tool import Tool
from surefoot.interop.tool_log import Lines, RunFacts, ToolLog, trainer_row
from surefoot.interop.translation import Translation
from surefoot.interop.words import Word, read_only_flags
from surefoot.system.errors import InputError

TOOL = "finetune.py"
PROGRAMS: Mapping[str, Mapping[str, Row]] = {
    sources.GUIDE: GUIDE,
    sources.ORIGINAL: ORIGINAL,
    sources.ALPACA_LORA: ALPACA_LORA,
}
ROWS = {**GUIDE, **{name: row for name, row in ALPACA_LORA.items() if name not in GUIDE}}
_THE_GUIDES = ("disable_cudnn_sdpa",)  # the guide's text says True, its code says False


def from_command(command: Command, options: Options) -> Translation:
    """Translate a command. Raises InputError with every fault."""
    try:
        text = options.read(command.program)
    except InputError:
        text = None
    source = None if text is None else sources.read_source(command.program, text)
    if text is not None and source is None:
        return SCRIPT.from_command(command, options)  # another script with the same name
    arguments = [_without_no(text) for text in command.arguments]
    words = read_only_flags(arguments, switches=SWITCHES, lists=LISTS)
    by_flags = None if source else _by_flags({word.name for word in words})
    return _translate(words, options, command, source or sources.known_source(by_flags or sources.GUIDE), by_flags)


def from_keywords(values: Mapping[str, Any], options: Options | None = None) -> Translation:
    """Translate a Python call of the guide's `train(base_model=…, bf16=True)`."""
    words = [Word(name, value, f"{name}=", f"{name}={value!r}") for name, value in values.items() if value is not None]
    options = options or Options()
    command = Command(TOOL, environment=inherited(options))
    return _translate(words, options, command, sources.known_source(sources.GUIDE))


def claims(command: Command) -> bool:
    """Return whether this is a finetune.py with flags; Axolotl's old scripts/finetune.py takes a YAML file first."""
    return command.name == "finetune.py" and (not command.arguments or command.arguments[0].startswith("-"))


def _translate(
    words: Sequence[Word], options: Options, command: Command, source: Source, by_flags: str | None = None
) -> Translation:
    """by_flags: the program recognized by its flags, if there was no file to read."""
    rows = {name: _with_default(row, source) for name, row in PROGRAMS[source.name].items()}
    draft = Draft(Dialect(TOOL, rows, rules_of(source)), words, command, options)
    if by_flags:
        others = " or ".join(name for name in PROGRAMS if name != by_flags)
        why = f"recognized by its flags; {command.program} is not here to tell whether it is that of {others}"
        draft.assume(f"{TOOL} of {by_flags}", why)
    if source.name == sources.GUIDE:
        pad, why = pad_rule(str(draft["base_model"] or ""), options)
        draft.set("tokenizer.pad", pad, why=why)
    return draft.finish("train")


def _by_flags(flags: Set[str]) -> str:
    """Return the program that only these flags fit; the guide's if several do."""
    if flags & (GUIDE.keys() - ORIGINAL.keys()):
        return sources.GUIDE
    if flags & (ALPACA_LORA.keys() - ORIGINAL.keys()) or (
        "lora_target_modules" in flags and flags <= ALPACA_LORA.keys()
    ):
        return sources.ALPACA_LORA
    return sources.ORIGINAL if "micro_batch_size" in flags else sources.GUIDE


def _with_default(row: Row, source: Source) -> Row:
    """Return the row with the default from the file."""
    default = source.defaults.get(row.name, row.default)
    if row.name in _THE_GUIDES or default in ("", row.default):
        return row
    try:
        return replace(row, default=default if row.type is None or default is None else row.type(default))
    except ValueError:
        return row


def pad_rule(base_model: str, options: Options) -> tuple[str, str]:
    """Apply the guide's rule: add a PAD token if there is none or its id is 0. Returns (tokenizer.pad, reason).

    The tokenizer of a local folder is checked. Id 0 is accepted if it is a special token, which texts do not contain;
    the guide's code added a needless row in that case.
    """
    try:
        settings = json.loads(options.read(f"{base_model.rstrip('/')}/tokenizer_config.json"))
    except (InputError, ValueError, RecursionError):
        return "add", "the guide's rule; the tokenizer could not be read, so one is always added"
    pad = settings.get("pad_token") if isinstance(settings, dict) else None
    pad = pad.get("content") if isinstance(pad, dict) else pad
    if not pad:
        return "add", "the guide's rule: the tokenizer has no PAD"
    added = settings.get("added_tokens_decoder") or {}
    found = next((key for key, token in added.items() if token.get("content") == pad), None)
    if found is None or (int(found) == 0 and not added[found].get("special")):
        return "add", f"the guide's rule: texts can contain {pad}"
    return "auto", f"the tokenizer's PAD is {pad}"


def _without_no(text: str) -> str:
    """Rewrite Fire's `--nobf16` as `--bf16=False`."""
    name = text.removeprefix("--no")
    return f"--{name}=False" if name != text and name in SWITCHES else text


def banner(translation: Translation) -> list[str]:
    """Return the lines that finetune.py prints before it loads the model: every argument, given or not."""
    micro: dict[str, Any] = dict.fromkeys(MICRO, translation.config["batch"]["micro"])  # two names of one setting
    given = {name: micro.get(name, value) for name, value in translation.given.items()}
    return ["Finetuning model with params:", *(f"{name}: {value}" for name, value in given.items())]


def _ready(facts: RunFacts) -> Lines:
    types = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
    lines = [f"Model loaded successfully. dtype: {types.get(facts.base, facts.base)}"]
    if facts.added_rows:
        lines.append(f"Adding dedicated PAD token: {facts.pad} (id {facts.pad_id})")
    has_cudnn = facts.device == "cuda" and facts.attention == "sdpa"
    if has_cudnn and facts.config.attention.cudnn == "off" and facts.compute == "bf16":
        lines.append("Disabled cuDNN SDPA for bf16 stability")
    return lines


def log_lines(translation: Translation) -> ToolLog:
    return ToolLog(started=lambda: banner(translation), ready=_ready, row=trainer_row)


FINETUNE = Tool(name=TOOL, claims_command=claims, from_command=from_command, log=log_lines, rows=ROWS)
