"""Record formats of supervised data: messages, prompt-completion, sharegpt, cauldron, alpaca, commonsense.

    messages           {"messages": [{"role", "content"}, …]} as in the OpenAI API, with tools and calls
    prompt-completion  {"prompt", "completion"} as in TRL: texts, or lists of messages
    sharegpt           {"conversations": [{"from", "value"}, …]}, with tools in roles of their own
    cauldron           {"images", "texts": [{"user", "assistant"}, …]} as in The Cauldron
    alpaca             {"instruction", "input", "output"}, optionally with "system" and "history"
    commonsense        alpaca with "answer", the short form of "output"
    tokens             {"input_ids", "labels"}: token ids, as transformers' Trainer takes them

`retag` renames the turns of files whose dataset_info.json has other names for roles (`tags`) to those of sharegpt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from surefoot.data.formats.conversation import (
    IMAGE,
    MARK,
    Conversation,
    RowFault,
    Tokens,
    Turn,
    check_order,
    field,
    filled,
    is_learned,
    optional,
    path_in,
    read_calls,
    read_dialogue,
    read_images,
    read_tools,
    read_turns,
    role_in,
    text,
)
from surefoot.data.sources.record_values import kind_of
from surefoot.data.sources.records import Row

THOUGHTS = ("reasoning_content", "thinking")  # reasoning field of Qwen, DeepSeek and GLM; of gpt-oss
_MESSAGE_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(record: Mapping[str, Any]) -> Conversation:
    """Read {"messages": [{"role", "content"}, …]}, optionally with "tools" and "system". Without `messages`, the field
    `conversations` is read."""
    name = "conversations" if "messages" not in record and "conversations" in record else "messages"
    return read_dialogue(record, name, read_message)


def read_prompt_completion(record: Mapping[str, Any]) -> Conversation:
    """Read {"prompt", "completion"}: two texts, or two lists of messages. Only the completion is learned."""
    if isinstance(field(record, "prompt"), str):
        return Conversation((Turn("user", filled(record, "prompt")), Turn("assistant", filled(record, "completion"))))
    prompt = [replace(turn, learned=False) for turn in read_turns(record, "prompt", read_message)]
    completion = read_turns(record, "completion", read_message)
    check_order([*prompt, *completion])
    if completion[0].role != "assistant":
        raise RowFault(f"turn 1 of 'completion' is {completion[0].role}, but assistant was expected")
    return Conversation((*prompt, *completion), tools=read_tools(record))


def read_message(message: Mapping[str, Any]) -> Turn:
    """Read {"role", "content"} as a turn."""
    role = role_in(message, "role", _MESSAGE_ROLES)
    calls = read_calls(message["tool_calls"], "tool_calls") if message.get("tool_calls") else ()
    if calls and role != "assistant":
        raise RowFault(f"has tool calls, but its role is {message['role']}", "only the assistant can make calls")
    may_be_empty = calls or role in ("system", "tool")
    content, images = ("", ()) if calls and message.get("content") is None else _content(message)
    if not content.strip() and not may_be_empty:
        raise RowFault("has an empty 'content'", "remove the row or fill it in")
    call, tool = (optional(message, name) if role == "tool" else "" for name in ("tool_call_id", "name"))
    thought = next(filter(None, (optional(message, name) for name in THOUGHTS)), "") if role == "assistant" else ""
    learned = is_learned(message, role)
    return Turn(role, content, calls=calls, learned=learned, call=call, tool=tool, thought=thought, images=images)


def _content(message: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Read a content, which is a text or a list of text and picture parts. Returns the text, with `IMAGE` for each
    picture, and the pictures' paths."""
    parts = field(message, "content")
    if not isinstance(parts, list):
        return text(message, "content"), ()
    texts, images = [], []
    for number, part in enumerate(parts, start=1):
        part, kind = (part, part.get("type")) if isinstance(part, dict) else ({}, kind_of(part))
        words = part.get("text", part.get(_VALUE))
        if kind == "text" and isinstance(words, str):
            texts.append(words)
        elif kind == "image" or (kind == "image_url" and (kind in part or _VALUE in part)):
            texts.append(IMAGE)
            images.append(_path(part, number))
        else:
            what = f"has a part {number} in 'content' that is not text ({kind})"
            raise RowFault(what, "only texts and pictures are supported")
    return "".join(texts), tuple(images)


_PICTURES = ("image", "image_url")  # types of picture parts, and fields with the path
_VALUE = "value"  # a part's text or path in LLaMA-Factory's v1 trainer


def _path(part: Mapping[str, Any], number: int) -> str:
    """Return the picture's path; "" if the part has none, as in TRL's format, where the record lists the pictures."""
    found = [part[name] for name in (*_PICTURES, "url", "path", _VALUE) if part.get(name) is not None]
    path = found[0] if found else ""
    path = path.get("url") if isinstance(path, dict) and "url" in path else path_in(path)
    if not isinstance(path, str) or len(found) > 1:
        what = f"has a picture as part {number} of 'content' that is not one path ({kind_of(path)})"
        raise RowFault(what, "write the path of its file", "SF-DATA-PICTURE")
    return path


ARGUMENTS = "chat_template_kwargs"  # TRL's field for values of the chat template's variables


def template_arguments(record: Mapping[str, Any]) -> str:
    """Return the values that the record gives the template's variables, as JSON; "" for none."""
    found = record.get(ARGUMENTS)
    if found is not None and not isinstance(found, dict):
        raise RowFault(f"has {kind_of(found)} in {ARGUMENTS!r}, where an object is required")
    return json.dumps(found, sort_keys=True, ensure_ascii=False) if found else ""


_CALL = "call"
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "function_call": _CALL,
    "observation": "tool",
    "user": "user",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool_call": _CALL,
    "tool": "tool",
    "tool_response": "tool",
}


def read_sharegpt(record: Mapping[str, Any]) -> Conversation:
    """Read {"conversations": [{"from", "value"}, …]}, optionally with "tools" and "system". Without `conversations`,
    the field `messages` is read."""
    name = "messages" if "conversations" not in record and "messages" in record else "conversations"
    return read_dialogue(record, name, read_sharegpt_turn)


def read_sharegpt_turn(item: Mapping[str, Any]) -> Turn:
    """Read {"from", "value"} as a turn."""
    role = role_in(item, "from", _SHAREGPT_ROLES)
    if role == _CALL:
        calls = read_calls(field(item, "value"), "value")
        return Turn("assistant", "", calls=calls, learned=is_learned(item, "assistant"))
    content = text(item, "value") if role in ("system", "tool") else filled(item, "value")
    call, tool = (optional(item, name) if role == "tool" else "" for name in ("tool_call_id", "name"))
    return Turn(role, content, learned=is_learned(item, role), call=call, tool=tool)


def read_cauldron(record: Mapping[str, Any]) -> Conversation:
    """Read {"images", "texts": [{"user", "assistant"}, …]}. The pictures come before the first question, unless marks
    say where."""
    pairs = field(record, "texts")
    if not isinstance(pairs, list) or not pairs or not all(isinstance(pair, dict) for pair in pairs):
        raise RowFault(f"'texts' is {kind_of(pairs)}, not a list of questions with answers")
    turns: list[Turn] = []
    for pair in pairs:
        turns += [Turn("user", filled(pair, "user")), Turn("assistant", filled(pair, "assistant"))]
    if not any(MARK in turn.content for turn in turns):
        turns[0] = replace(turns[0], content=MARK * len(read_images(record)) + turns[0].content)
    return Conversation(tuple(turns))


_TAG_FIELDS = {"role_tag": "from", "content_tag": "value"}
_TAG_ROLES = {
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


def retag(rows: Iterable[Row], tags: Mapping[str, str]) -> Iterator[Row]:
    """Rename the fields and roles of turns to those of sharegpt.

    tags: role_tag, content_tag, user_tag, … -> the file's name. Other names stay unchanged, and the reader of the
        format checks them.
    """
    fields = {tags[tag]: ours for tag, ours in _TAG_FIELDS.items() if tag in tags}
    roles = {tags[tag]: ours for tag, ours in _TAG_ROLES.items() if tag in tags}
    for row in rows:
        if tags:
            row = replace(row, value={name: _turns(value, fields, roles) for name, value in row.value.items()})
        yield row


def _turns(value: Any, fields: Mapping[str, str], roles: Mapping[str, str]) -> Any:
    """Rename a turn or a list of turns; return any other value unchanged."""
    if isinstance(value, dict):
        return _turns([value], fields, roles)[0]
    if not isinstance(value, list) or not all(
        isinstance(item, dict) and fields.keys() <= item.keys() for item in value
    ):
        return value
    renamed = [{fields.get(name, name): part for name, part in item.items()} for item in value]
    return [item | {"from": roles.get(str(item["from"]), item["from"])} if "from" in item else item for item in renamed]


def read_alpaca(record: Mapping[str, Any]) -> Conversation:
    """Read {"instruction", "output"}, optionally with "input", "system" and "history": [[prompt, answer], …], the
    earlier turns, whose answers are learned as well."""
    opening = read_instruction(record)
    return Conversation((*opening, Turn("assistant", filled(record, "output"))))


def read_instruction(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Read the turns of an alpaca record before its answer."""
    prompt, context = text(record, "instruction"), optional(record, "input")
    if not prompt.strip() and not context:
        raise RowFault("'instruction' and 'input' are both empty: there is no prompt")
    return (*_before(record), Turn("user", prompt, context))


def read_query(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Read the turns of a query-response record (ms-swift) before its answer."""
    return (*_before(record), Turn("user", filled(record, "query")))


def _before(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Return the turns of `system` and `history`."""
    system = optional(record, "system")
    return (*((Turn("system", system),) if system else ()), *_history(record))


def read_commonsense(record: Mapping[str, Any]) -> Conversation:
    """Read an alpaca record with "answer", a text or number, the short form of "output". Training uses only the output;
    evaluation compares with the answer."""
    answer = field(record, "answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise RowFault(f"has {kind_of(answer)} in 'answer', where text or a number is required")
    return read_alpaca(record)


def _history(record: Mapping[str, Any]) -> list[Turn]:
    pairs = record.get("history")
    if pairs is None:
        return []
    if not isinstance(pairs, list):
        raise RowFault(f"'history' is {kind_of(pairs)}, not a list of [prompt, answer]")
    turns = []
    for number, pair in enumerate(pairs, start=1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise RowFault(f"pair {number} of 'history' is not [prompt, answer], two texts")
        if not all(part.strip() for part in pair):
            raise RowFault(f"pair {number} of 'history' holds an empty text", "remove the pair or fill it in")
        turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
    return turns


_NO_LABEL = -100  # transformers' mark for a token that is not learned
TOKENS = "input_ids"  # field of a record of token ids
TOKEN_FIELDS = ("labels", "attention_mask", "completion_mask", "assistant_masks")  # beside it
_MASKS = ("completion_mask", "assistant_masks")  # TRL's marks of learned tokens


def read_tokens(record: Mapping[str, Any]) -> Conversation:
    """Read {"input_ids"} with the optional fields of transformers' Trainer: "labels" (-100: not learned),
    "attention_mask" (0: padding, which is dropped), and TRL's "completion_mask" and "assistant_masks". Without labels
    and masks every token is learned."""
    ids = _numbers(record, TOKENS)
    columns = {
        name: _numbers(record, name) for name in ("labels", "attention_mask", *_MASKS) if record.get(name) is not None
    }
    for name, values in columns.items():
        if len(values) != len(ids):
            raise RowFault(f"has {len(ids)} input_ids, but {len(values)} {name}")
    kept = columns.get("attention_mask", [1] * len(ids))
    labels = columns.get("labels", ids)
    learned = [
        label != _NO_LABEL and all(columns[name][place] for name in _MASKS if name in columns)
        for place, label in enumerate(labels)
    ]
    for place, (number, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (_NO_LABEL, number):
            what = f"has the label {label} at token {place + 1}, whose id is {number}"
            raise RowFault(what, "labels are the token's own id or -100; the shift by one is made in training")
    tokens = [(number, mark) for number, mark, keep in zip(ids, learned, kept, strict=True) if keep]
    if len(tokens) < 2 or not any(mark for _, mark in tokens[1:]):
        raise RowFault("has no token to learn", "remove the row")
    return Conversation((Turn("tokens", ""),), tokens=Tokens(*map(tuple, zip(*tokens, strict=True))))


def _numbers(record: Mapping[str, Any], name: str) -> list[int]:
    """Return a required list of whole numbers."""
    values = field(record, name)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise RowFault(f"has {kind_of(values)} in {name!r}, where a list of whole numbers is required")
    return values
