"""Definitions of tools and calls to them, from the notations in use to one: objects as in the OpenAI format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.data.formats.conversation import ToolCall
from surefoot.data.formats.fields import RowFault, field, filled, from_json, optional
from surefoot.data.rows import kind_of


def read_tools(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The record's `tools`: a list, or the same as JSON text; absent, null, "" and [] mean none. Each entry is
    {"type": "function", "function": {"name", …}} or the inner object alone."""
    written = record.get("tools")
    if written is None or (isinstance(written, str) and not written.strip()):
        return ()
    tools = from_json(written, "tools")
    if not isinstance(tools, list):
        raise RowFault(f"'tools' is {kind_of(tools)}, not a list of tools")
    return tuple(_numbered(_tool, tool, f"tool {number}") for number, tool in enumerate(tools, start=1))


def read_calls(written: Any, name: str) -> tuple[ToolCall, ...]:
    """One call or a list of them, as objects or as JSON text. Each is {"name", "arguments"}, or that under "function".
    name: the field it stands in."""
    calls = from_json(written, name)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls:
        raise RowFault(f"has no call in {name!r}")
    return tuple(_numbered(_call, call, f"call {number}") for number, call in enumerate(calls, start=1))


def _numbered(read: Any, value: Any, what: str) -> Any:
    try:
        if not isinstance(value, dict):
            raise RowFault(f"is {kind_of(value)}, not an object")
        return read(value)
    except RowFault as fault:
        raise RowFault(f"{what} {fault.what}", fault.fix) from None


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    definition = tool["function"] if isinstance(tool.get("function"), dict) else tool
    filled(definition, "name")
    return {"type": "function", "function": definition}


def _call(call: Mapping[str, Any]) -> ToolCall:
    own = optional(call, "id")
    call = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = from_json(field(call, "arguments"), "arguments")
    if not isinstance(arguments, dict):
        raise RowFault(f"has {kind_of(arguments)} in 'arguments', where an object belongs")
    return ToolCall(filled(call, "name"), arguments, own)
