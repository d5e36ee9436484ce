"""Conversations, the common form of all records: turns, tool definitions, tool calls, and their validation.

Fields are read strictly: a required field that is absent, null, empty or of the wrong type is a fault that names the
field. An optional field may be absent or null, because tables can only leave a field out by null.

Order of turns: an optional system turn; then user and assistant turns in alternation. Tool results (several for
parallel calls) and another answer may follow an answer. The last turn is an answer, because nothing can be learned from
turns after it. A result belongs to the call whose id it names or, if no result of an answer names an id, to the call at
the same position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from surefoot.data.sources.record_values import kind_of
from surefoot.data.sources.text import read_value
from surefoot.system.errors import InputError
from surefoot.system.messages import nearest_words


class RowFault(Exception):
    """A fault of one row. The caller adds the file and the row."""

    def __init__(self, what: str, fix: str = "", code: str = "SF-DATA-ROW"):
        super().__init__(what)
        self.what, self.fix, self.code = what, fix, code


def field(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a required field."""
    if name not in record:
        like = nearest_words(name, record, 1)
        hint = f", {like[0]!r} looks like it" if like else ""
        raise RowFault(f"has no {name!r} (it has {listed(record)}{hint})", "rename or add the field")
    return record[name]


def text(record: Mapping[str, Any], name: str) -> str:
    """Return a required text, which may be empty."""
    value = field(record, name)
    if not isinstance(value, str):
        raise RowFault(f"has {kind_of(value)} in {name!r}, where text is required")
    return value


def filled(record: Mapping[str, Any], name: str) -> str:
    """Return a required text that is not blank."""
    value = text(record, name)
    if not value.strip():
        raise RowFault(f"has an empty {name!r}", "remove the row or fill it in")
    return value


def optional(record: Mapping[str, Any], name: str) -> str:
    """Return an optional text; "" if it is absent, null or blank."""
    if record.get(name) is None:
        return ""
    value = text(record, name)
    return value if value.strip() else ""


def from_json(value: Any, name: str) -> Any:
    """Parse a value that may be written as JSON text, such as a call's arguments."""
    if not isinstance(value, str):
        return value
    try:
        return read_value(name, value)
    except InputError as error:
        fault = error.faults[0]
        raise RowFault(f"has text in {name!r} that is not JSON: {fault.what}", fault.fix) from None


def listed(names: Iterable[str]) -> str:
    """List quoted names for a message."""
    return ", ".join(repr(name) for name in names) or "nothing"


JUDGED = ("label", "kto_tag")  # fields of the judgement of an answer


def judgement_field(record: Mapping[str, Any]) -> str | None:
    """Return the name of the field with the judgement of the answer. Null counts as absent."""
    return next((name for name in JUDGED if record.get(name) is not None), None)


IMAGE = "\ufdd0"  # stands for a picture in a text; a Unicode noncharacter, which data cannot contain
MARK = "<image>"  # in the data's text: position of a picture of the record's `images`


class Picture(NamedTuple):
    """A picture file, as it was when the record was read.

    width, height: pixels, after EXIF rotation.
    tokens: number of feature tokens that stand for it in the text.
    size, changed: bytes and modification time (ns), to detect a changed file quickly.
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
    """A tool call of the assistant.

    arguments: a JSON object.
    id: id that results refer to; "" without one.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation, or a text.

    role: system | user | assistant | tool, "text" for a plain text without turns, or "tokens"
        for a record of token ids.
    context: alpaca's `input`, else empty.
    calls: tool calls of an assistant turn; its content may then be empty.
    learned: False for an answer that the data marks as not to be learned.
    call, tool: for a tool result, the id of its call and the tool's name, if the data has them.
    thought: reasoning before an answer, if the data has it in a separate field.
    images: path of the picture at each `IMAGE` in the content; "" if it comes from the record's `images`.
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
        """Content and context as one text, for templates without a slot for the context."""
        return f"{self.content}\n{self.context}" if self.content and self.context else self.content or self.context


class Tokens(NamedTuple):
    """A record that its author has tokenized.

    ids: token ids.
    learned: for each, whether it has a label.
    """

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


@dataclass(frozen=True)
class Conversation:
    """A conversation.

    number, line: the row it was read from, from 1; 0 if it comes from no file.
    tools: tool definitions in the OpenAI format ({"type": "function", "function": {"name", …}}).
    good: whether its answer is the better of a pair or was judged good; None for other data.
    images: the record's `images`: paths for the `<image>` marks in the texts, in order.
    pictures: the pictures of all `IMAGE`s in the texts, in order, after their files were opened.
    record: for a prompt, all fields of its record, which reward functions may use.
    tokens: the record's own token ids; its only turn is then empty.
    arguments: values of the template's variables, as JSON; "" for none.
    """

    turns: tuple[Turn, ...]
    number: int = 0
    line: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    good: bool | None = None
    images: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    record: Mapping[str, Any] | None = None
    tokens: Tokens | None = None
    arguments: str = ""


_FIRST = ("user",)
_NEXT = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def role_in(turn: Mapping[str, Any], name: str, roles: Mapping[str, str]) -> str:
    """Return the role that the turn's field `name` stands for. Raises RowFault for an unknown value.

    roles: value in the data -> role.
    """
    written = text(turn, name)
    if written not in roles:
        like = nearest_words(written.lower(), roles, 1)
        hint = f"; did you mean {like[0]!r}?" if like else ""
        raise RowFault(f"has the unknown role {written!r}{hint}", f"known roles: {listed(roles)}")
    return roles[written]


def read_dialogue(record: Mapping[str, Any], name: str, read_turn: Callable[[Mapping[str, Any]], Turn]) -> Conversation:
    """Read the conversation in the list `name`, with the record's optional `system` and `tools`. RowFaults name the
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
    """Read every item of the list as a turn, without checking their order."""
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
    """Check the order of turns and the tool results. Raises RowFault with the number of the first wrong turn.

    answered: the last turn must be an answer.
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


WEIGHTS = ("weight", "loss_weight", "loss_scale")  # of a turn: OpenAI's field, LLaMA-Factory's v1 trainer's, ms-swift's
TRAINED = ("train", "loss")  # the same as true or false: surefoot's field, ms-swift's


def is_learned(item: Mapping[str, Any], role: str) -> bool:
    """Read TRAINED (true or false) and WEIGHTS (0 or 1); True if none is given."""
    marks = {}
    for name in TRAINED:
        if (train := item.get(name)) is None:
            continue
        if not isinstance(train, bool):
            raise RowFault(f"has {kind_of(train)} in {name!r}, where true or false is required")
        marks[name] = train
    for name in WEIGHTS:
        if (weight := item.get(name)) is None:
            continue
        if isinstance(weight, bool) or weight not in (0, 1):
            raise RowFault(f"has a {name!r} that is neither 0 nor 1", "1: the answer is learned; 0: it is not")
        marks[name] = weight == 1
    if True in marks.values() and role != "assistant":
        raise RowFault(f"asks to learn a {role} turn", "only answers are learned; see data.train_on")
    if len(set(marks.values())) == 2:
        raise RowFault(f"has {' and '.join(map(repr, marks))} that contradict each other", "keep one of them")
    return False not in marks.values()


def read_tools(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Read the record's `tools`: a list, or a list as JSON text; absent, null, "" and [] mean none. Each entry is
    {"type": "function", "function": {"name", …}} or only the inner object."""
    written = record.get("tools")
    if written is None or (isinstance(written, str) and not written.strip()):
        return ()
    tools = from_json(written, "tools")
    if not isinstance(tools, list):
        raise RowFault(f"'tools' is {kind_of(tools)}, not a list of tools")
    return tuple(_numbered(_tool, tool, f"tool {number}") for number, tool in enumerate(tools, start=1))


def path_in(value: Any) -> Any:
    """Return the path of a Hugging Face image cell, {"bytes", "path"}; return anything else unchanged."""
    cell = isinstance(value, dict) and value and value.keys() <= {"bytes", "path"}
    return (value.get("path") or "picture") if cell else value


def read_images(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the record's `images`: a path or a list of paths; absent and null mean none."""
    written = record.get("images")
    paths = [path_in(one) for one in ([] if written is None else written if isinstance(written, list) else [written])]
    for number, path in enumerate(paths, start=1):
        if not isinstance(path, str) or not path:
            what = f"has {kind_of(path)} as picture {number} in 'images', where a path is required"
            raise RowFault(what, "write the path of the picture's file", "SF-DATA-PICTURE")
    return tuple(paths)


def read_calls(written: Any, name: str) -> tuple[ToolCall, ...]:
    """Read one call or a list of calls, as objects or as JSON text. Each is {"name", "arguments"}, optionally inside
    "function".

    name: the field that contains them.
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
        raise RowFault(f"has {kind_of(arguments)} in 'arguments', where an object is required")
    return ToolCall(filled(call, "name"), arguments, own)


_FIX = "each result names the id of one call of the answer before it"


def pair_results(turns: Sequence[Turn]) -> list[int | None]:
    """Match tool results with their calls: for each turn, the index of its call among those of the answer before it;
    None if there is no such call, or the turn is not a tool result."""
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
    """Raise RowFault if results cannot be matched unambiguously with their calls."""
    paired = pair_results(turns)
    for answer, results in _rounds(turns):
        ids = [call.id for call in turns[answer].calls if call.id]
        if len(set(ids)) < len(ids):
            raise RowFault(f"turn {answer + 1} has two calls with the same id", "give every call its own id")
        named = [turns[place].call for place in results]
        for place in results if any(named) else ():
            own, where = turns[place].call, f"turn {place + 1}"
            if not own:
                raise RowFault(f"{where} names no call, but another result of the same answer does", _FIX)
            if own not in ids:
                raise RowFault(f"{where} is the result of a call {own!r}, which turn {answer + 1} does not make", _FIX)
            if named.count(own) > 1:
                raise RowFault(f"the call {own!r} of turn {answer + 1} has two results", _FIX)
        for place in () if any(named) else results:
            call, tool = paired[place], turns[place].tool
            if call is not None and tool and tool != (other := turns[answer].calls[call].name):
                what = f"turn {place + 1} is a result of {tool!r}, but the call at its position is to {other!r}"
                raise RowFault(what, "put results in the order of their calls, or name the calls in tool_call_id")


def _rounds(turns: Sequence[Turn]) -> Iterator[tuple[int, list[int]]]:
    """Yield the index of each answer and the indices of the tool results that follow it."""
    for answer, turn in enumerate(turns):
        if turn.role == "assistant":
            end = answer + 1
            while end < len(turns) and turns[end].role == "tool":
                end += 1
            yield answer, list(range(answer + 1, end))
