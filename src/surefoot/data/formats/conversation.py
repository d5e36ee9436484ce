"""Conversations, which every record becomes: turns, tool definitions, tool calls, and the rules that they obey.

Fields are read strictly: what is absent, null, of another type or empty is a fault with the field's name. A field that
may be absent may be null as well: tables have no other way to leave one out.

Order: a system turn at most first; then a user turn, an answer, and so on. Results of tools (several, for calls made at
once) and another answer may follow an answer. The last turn is an answer: what follows it would teach nothing. A result
belongs to the call whose id it names or, where no result of an answer names one, to the call in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from surefoot.data.formats.rows import RowFault
from surefoot.data.sources.records import kind_of
from surefoot.data.sources.text import read_value
from surefoot.system.errors import InputError
from surefoot.system.messages import nearest_words


def field(record: Mapping[str, Any], name: str) -> Any:
    """The value of a field that must be there."""
    if name not in record:
        like = nearest_words(name, record, 1)
        hint = f", {like[0]!r} looks like it" if like else ""
        raise RowFault(f"has no {name!r} (it has {listed(record)}{hint})", "rename or add the field")
    return record[name]


def text(record: Mapping[str, Any], name: str) -> str:
    """A text that must be there and may be empty."""
    value = field(record, name)
    if not isinstance(value, str):
        raise RowFault(f"has {kind_of(value)} in {name!r}, where text belongs")
    return value


def filled(record: Mapping[str, Any], name: str) -> str:
    """A text that must be there and hold more than blanks."""
    value = text(record, name)
    if not value.strip():
        raise RowFault(f"has an empty {name!r}", "remove the row or fill it in")
    return value


def optional(record: Mapping[str, Any], name: str) -> str:
    """Absent, null and blank all mean: none."""
    if record.get(name) is None:
        return ""
    value = text(record, name)
    return value if value.strip() else ""


def from_json(value: Any, name: str) -> Any:
    """A value that may be written as JSON text, such as a call's arguments, as what it stands for."""
    if not isinstance(value, str):
        return value
    try:
        return read_value(name, value)
    except InputError as error:
        fault = error.faults[0]
        raise RowFault(f"has text in {name!r} that is not JSON: {fault.what}", fault.fix) from None


def listed(names: Iterable[str]) -> str:
    """Names in quotes, for a sentence."""
    return ", ".join(repr(name) for name in names) or "nothing"


IMAGE = "\ufdd0"  # stands for a picture in a text; Unicode gives the character to nobody
MARK = "<image>"  # in a text: where a picture of the record's own list stands


class Picture(NamedTuple):
    """A picture's file, as it was when the record was read.

    width, height: in pixels, as it is looked at.
    tokens: features that stand for it in the text.
    size, changed: bytes, and when the file was written (nanoseconds): by these another file is told at once.
    """

    path: str
    sha256: str
    width: int
    height: int
    tokens: int
    size: int
    changed: int


@dataclass(frozen=True)
class ToolCall:
    """What an assistant asks a tool to do.

    arguments: a JSON object.
    id: by which a result names it, "" without one.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation, or a text.

    role: system | user | assistant | tool, or "text" for a text without turns.
    context: alpaca's `input`, else empty.
    calls: of an assistant turn, whose content may then be empty.
    learned: False for an answer that the data marks as not to be learned.
    call, tool: of a result, the id of its call and the tool's name, where the data gives them.
    thought: what was thought before an answer, where the data has it in a field of its own.
    images: for each `IMAGE` in the content the path of the picture that stands there, "" where the record's own list
        has it.
    """

    role: str
    content: str
    context: str = ""
    calls: tuple[ToolCall, ...] = ()
    learned: bool = True
    call: str = ""
    tool: str = ""
    thought: str = ""
    images: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Content and context as one text, for templates that have no place for the latter."""
        return f"{self.content}\n{self.context}" if self.content and self.context else self.content or self.context


@dataclass(frozen=True)
class Conversation:
    """Turns, and the row (number and line, from 1; 0 = from no file) they were read from.

    tools: definitions of the tools on offer, JSON objects as in the OpenAI format ({"type": "function", "function":
        {"name", …}}).
    good: whether its answer is the better of two, or was judged good; None where nobody judged it.
    images: the record's own list of paths, for the marks in the texts in their order.
    pictures: those of the `IMAGE`s in the texts, in order, once they were looked at.
    record: of a prompt, all fields of its record: what scores its answers may ask for them.
    """

    turns: tuple[Turn, ...]
    number: int = 0
    line: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    good: bool | None = None
    images: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    record: Mapping[str, Any] | None = None


_FIRST = ("user",)
_NEXT = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def role_in(turn: Mapping[str, Any], name: str, roles: Mapping[str, str]) -> str:
    """What the turn's field `name` stands for; RowFault for a word that is none of these.

    roles: word -> role.
    """
    written = text(turn, name)
    if written not in roles:
        like = nearest_words(written.lower(), roles, 1)
        hint = f"; did you mean {like[0]!r}?" if like else ""
        raise RowFault(f"has the unknown role {written!r}{hint}", f"known roles: {listed(roles)}")
    return roles[written]


def read_dialogue(record: Mapping[str, Any], name: str, read_turn: Callable[[Mapping[str, Any]], Turn]) -> Conversation:
    """The conversation in the list `name`, with the record's `system` and `tools` where it has them. RowFaults name the
    turn, counted from 1."""
    turns = read_turns(record, name, read_turn)
    check_order(turns)
    system = optional(record, "system")
    if turns[0].role == "system":
        if system and turns[0].content.strip():
            raise RowFault("has a 'system' field and a system turn", "keep one of them")
        system, turns = system or turns[0].content, turns[1:]
    if not any(turn.learned for turn in turns if turn.role == "assistant"):
        raise RowFault("marks every answer as not to be learned", "remove the row, or mark one with train: true")
    opening = (Turn("system", system),) if system.strip() else ()
    return Conversation((*opening, *turns), tools=read_tools(record))


def read_turns(record: Mapping[str, Any], name: str, read_turn: Callable[[Mapping[str, Any]], Turn]) -> list[Turn]:
    """Every item of the list as a turn, in whatever order."""
    items = field(record, name)
    if not isinstance(items, list) or not items:
        raise RowFault(f"{name!r} is {kind_of(items)}, not a list of turns")
    turns = []
    for number, item in enumerate(items, start=1):
        try:
            if not isinstance(item, dict):
                raise RowFault(f"is {kind_of(item)}, not an object with role and content")
            turns.append(read_turn(item))
        except RowFault as fault:
            raise RowFault(f"turn {number} {fault.what}", fault.fix) from None
    return turns


def check_order(turns: Sequence[Turn], *, answered: bool = True) -> None:
    """RowFault, with the number of the first turn that stands where it cannot, or of a result without its call.

    answered: the last turn has to be an answer.
    """
    expected = _FIRST
    for number, turn in enumerate(turns, start=1):
        if turn.role not in expected and not (turn.role == "system" and number == 1):
            raise RowFault(
                f"turn {number} is {turn.role}, but {' or '.join(expected)} was expected",
                "turns are: system (optional), then user and assistant alternating, tool results after an answer",
            )
        expected = _NEXT[turn.role]
    if answered and turns[-1].role != "assistant":
        raise RowFault(
            f"the last turn is {turns[-1].role}: there is no answer to learn",
            "end with an assistant turn, or leave out what follows the last one",
        )
    check_results(turns)


def is_learned(item: Mapping[str, Any], role: str) -> bool:
    """What `train: true/false` or `weight: 0/1` say; True where neither is given."""
    marks = []
    if (train := item.get("train")) is not None:
        if not isinstance(train, bool):
            raise RowFault(f"has {kind_of(train)} in 'train', where true or false belongs")
        marks.append(train)
    if (weight := item.get("weight")) is not None:
        if isinstance(weight, bool) or weight not in (0, 1):
            raise RowFault("has a 'weight' that is neither 0 nor 1", "1: the answer is learned; 0: it is not")
        marks.append(weight == 1)
    if True in marks and role != "assistant":
        raise RowFault(f"asks to learn a {role} turn", "only answers are learned; see data.train_on")
    if len(set(marks)) == 2:
        raise RowFault("has 'train' and 'weight' that contradict each other", "keep one of them")
    return False not in marks


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


def path_in(value: Any) -> Any:
    """Of a cell of Hugging Face's data sets, {"bytes", "path"}, the path; anything else as it is."""
    cell = isinstance(value, dict) and value and value.keys() <= {"bytes", "path"}
    return (value.get("path") or "picture") if cell else value


def read_images(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The record's `images`: a path, or a list of paths; absent and null mean none."""
    written = record.get("images")
    paths = [path_in(one) for one in ([] if written is None else written if isinstance(written, list) else [written])]
    for number, path in enumerate(paths, start=1):
        if not isinstance(path, str) or not path:
            what = f"has {kind_of(path)} as picture {number} in 'images', where a path belongs"
            raise RowFault(what, "name the picture's file", "SF-DATA-PICTURE")
    return tuple(paths)


def read_calls(written: Any, name: str) -> tuple[ToolCall, ...]:
    """One call or a list of them, as objects or as JSON text. Each is {"name", "arguments"}, or that under "function".

    name: the field it stands in.
    """
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


_FIX = "each result names the id of one call of the answer before it"


def pair_results(turns: Sequence[Turn]) -> list[int | None]:
    """For each turn the place, among the calls of the answer before it, of the call that it is the result of. None
    where there is no such call, and for turns that are no results."""
    found: list[int | None] = [None] * len(turns)
    for answer, results in _rounds(turns):
        ids = [call.id for call in turns[answer].calls]
        named = any(turns[place].call for place in results)
        for number, place in enumerate(results):
            if named:
                own = turns[place].call
                found[place] = ids.index(own) if own in ids else None
            elif number < len(ids):
                found[place] = number
    return found


def check_results(turns: Sequence[Turn]) -> None:
    """RowFault for results that leave open which calls they belong to."""
    paired = pair_results(turns)
    for answer, results in _rounds(turns):
        ids = [call.id for call in turns[answer].calls if call.id]
        if len(set(ids)) < len(ids):
            raise RowFault(f"turn {answer + 1} has two calls with one id", "give every call an id of its own")
        named = [turns[place].call for place in results]
        for place in results if any(named) else ():
            own, where = turns[place].call, f"turn {place + 1}"
            if not own:
                raise RowFault(f"{where} names no call, and another result of the same answer does", _FIX)
            if own not in ids:
                raise RowFault(f"{where} is the result of a call {own!r}, which turn {answer + 1} does not make", _FIX)
            if named.count(own) > 1:
                raise RowFault(f"the call {own!r} of turn {answer + 1} has two results", _FIX)
        for place in () if any(named) else results:
            call, tool = paired[place], turns[place].tool
            if call is not None and tool and tool != (other := turns[answer].calls[call].name):
                what = f"turn {place + 1} is a result of {tool!r}, and the call in its place is to {other!r}"
                raise RowFault(what, "put results in the order of their calls, or name the calls in tool_call_id")


def _rounds(turns: Sequence[Turn]) -> Iterator[tuple[int, list[int]]]:
    """The place of each answer, and those of the results that follow it."""
    for answer, turn in enumerate(turns):
        if turn.role == "assistant":
            end = answer + 1
            while end < len(turns) and turns[end].role == "tool":
                end += 1
            yield answer, list(range(answer + 1, end))
