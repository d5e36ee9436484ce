"""Layouts of Axolotl's preference pairs, judged answers and scored pairs: which field is what, and in which template.

`type: chatml.intel` names a template and a layout of records; `chat_template.default` leaves the template to the
config; a type that is a group of settings defines its own. Facts: prompt_strategies of Axolotl 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.config.dump import shown
from surefoot.interop.settings import Refusal
from surefoot.system.messages import did_you_mean

FIELDS = ("field_prompt", "field_system", "field_chosen", "field_rejected", "field_completion", "field_label",
          "prompt_format", "chosen_format", "rejected_format", "completion_format")  # fmt: skip
_CHAT = ("chat_template", "chat_template.default", "chat_template.argilla_chat")
OF_ORPO = "chat_template.argilla"  # the only type of rl: orpo, and of nothing else
# Record layout -> {surefoot field: record field}. Fields that are not listed have the same name.
_PAIRS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "argilla_chat": {},
    "icr": {"prompt": "input"},
    "intel": {"prompt": "question"},
    "prompt_pairs": {},
    "ultra": {},
}
_JUDGED: Mapping[str, Mapping[str, str]] = {
    "argilla": {"prompt": "instruction"},
    "argilla_chat": {"messages": "completion"},
    "intel": {"prompt": "question"},
    "prompt_pairs": {},
    "ultra": {},
}
_SCORED: Mapping[str, str] = {"bradley_terry.chat_template": "", "bradley_terry.llama3": "llama3"}
_STYLES = ("chatml", "llama3")
# (prompt format, answer format) of a user-defined layout -> the template that renders the same text.
_FORMATS: Mapping[tuple[str, str], str] = {
    ("{prompt}", "{answer}"): "raw",
    ("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n", "{answer}<|im_end|>"): "chatml",
    (
        "<|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{answer}<|eot_id|>",
    ): "llama3",
}  # fmt: skip
_SYSTEMS = {
    "chatml": "<|im_start|>system\n{system}<|im_end|>\n",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>",
}


@dataclass(frozen=True)
class Layout:
    """columns: surefoot field -> record field. template: surefoot's; None if the config's chat_template decides."""

    columns: Mapping[str, str]
    template: str | None


def read_layout(stage: str, entry: Mapping[str, Any], *, orpo: bool = False) -> Layout:
    """Return the layout of an entry of `datasets`. stage: surefoot's stage. orpo: whether the method is `rl: orpo`.

    Raises Refusal for an unsupported type.
    """
    kind = entry.get("type")
    if orpo:
        if kind != OF_ORPO:
            raise Refusal(f"Axolotl has no layout {shown(kind)} for rl: orpo", f"use {OF_ORPO}")
        return Layout({}, None)
    if isinstance(kind, dict):
        return _own(stage, kind)
    if kind == "user_defined.default":
        return _own(stage, entry)
    if kind in _CHAT and stage == "dpo":
        return Layout(_chat_columns(entry), None)
    if stage == "reward" and kind in _SCORED:
        return Layout({"prompt": "input"}, _SCORED[str(kind)] or None)
    if kind == "passthrough" and stage == "dpo":
        return Layout({}, "raw")
    style, _, records = str(kind).partition(".")
    layouts = {"dpo": _PAIRS, "kto": _JUDGED}.get(stage, {})
    if style not in _STYLES or records not in layouts:
        raise Refusal(f"surefoot does not support the layout {shown(kind)} for this method", f"use {_known(stage)}")
    return Layout(layouts[records], style)


def kinds(stage: str) -> tuple[str, ...]:
    """Return the types that name a layout."""
    if stage == "reward":
        return tuple(_SCORED)
    layouts = _PAIRS if stage == "dpo" else _JUDGED
    named = tuple(f"{style}.{records}" for style in _STYLES for records in layouts)
    return (*named, *(["passthrough"] if stage == "dpo" else []))


def _known(stage: str) -> str:
    if stage == "reward":
        return " or ".join(_SCORED)
    layouts = _PAIRS if stage == "dpo" else _JUDGED
    chat = "chat_template.default, " if stage == "dpo" else ""
    return f"{chat}chatml.NAME or llama3.NAME, where NAME is one of {', '.join(layouts)}"


def _chat_columns(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of a chat entry; the turns before the answers are in `messages` by default, or a text."""
    field = entry.get("field_messages", "messages")
    opening = "prompt" if field == "prompt" else "messages"  # both may be a text or turns
    requested = {opening: field, **{name: entry.get(f"field_{name}", name) for name in ("chosen", "rejected")}}
    return {ours: own for ours, own in requested.items() if ours != own}


def _own(stage: str, given: Mapping[str, Any]) -> Layout:
    """Return a user-defined layout. Raises Refusal unless its formats are those of a template."""
    answers = ("chosen", "rejected") if stage == "dpo" else ("completion",)
    if unknown := [name for name in given if name.startswith("field") and name not in (*FIELDS, "field_messages")]:
        raise Refusal(f"{unknown[0]} is not a field of a layout", did_you_mean(unknown[0], FIELDS, "leave it out"))
    if stage == "reward":
        raise Refusal("user-defined layouts belong to dpo and kto", f"use {_known(stage)}")
    names = ("prompt", "system", *answers, *(() if stage == "dpo" else ("label",)))
    columns = {name: own for name in names if (own := given.get(f"field_{name}", name)) != name}
    prompt = str(given.get("prompt_format") or "{prompt}")
    written = {str(given.get(f"{name}_format") or f"{{{name}}}").replace(f"{{{name}}}", "{answer}") for name in answers}
    for (question, answer), template in _FORMATS.items():
        if written == {answer} and prompt in (question, _SYSTEMS.get(template, "") + question):
            return Layout(columns, template)
    what = "the formats match none of surefoot's templates"
    raise Refusal(what, "write them as a chat template into a .jinja file, and use chat_template.default with it")
