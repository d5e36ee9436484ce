"""What every record becomes: turns of a conversation, or one text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """What an assistant asks a tool to do. arguments: a JSON object. id: by which a result names it, "" without one."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Turn:
    """role: system | user | assistant | tool, or "text" for a text without turns. context: alpaca's `input`, else
    empty. calls: of an assistant turn, whose content may then be empty. learned: False for an answer that the data
    marks as not to be learned. call, tool: of a result, the id of its call and the tool's name, where the data gives
    them."""

    role: str
    content: str
    context: str = ""
    calls: tuple[ToolCall, ...] = ()
    learned: bool = True
    call: str = ""
    tool: str = ""

    @property
    def text(self) -> str:
        """Content and context as one text, for templates that have no place for the latter."""
        return f"{self.content}\n{self.context}" if self.content and self.context else self.content or self.context


@dataclass(frozen=True)
class Conversation:
    """Turns, and the row (number and line, from 1; 0 = from no file) they were read from. tools: definitions of the
    tools on offer, JSON objects as in the OpenAI format ({"type": "function", "function": {"name", …}}). good: whether
    its answer is the better of two, or was judged good; None where nobody judged it."""

    turns: tuple[Turn, ...]
    number: int = 0
    line: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    good: bool | None = None
