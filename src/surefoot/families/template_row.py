"""What a named template consists of: the words around every text of a conversation, and how tools are written.

Plain text, so that planning, encoding and the docs read one table. Slots: {content} is the text; {bos} and {eos} are
the tokenizer's own tokens; {alone} writes nothing: what follows is tokenised as a text of its own. Of tools: {json} a
definition, {name} {arguments} {id} of a call, {content} {id} of a result. Whether BOS stands at the very start is the
plan's choice, not the row's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal


@dataclass(frozen=True)
class ToolLayout:
    """How a template writes tools, calls and results.

    place: where the definitions stand: behind the system text, in the first user turn before its text, or before that
        turn.
    indent: of their JSON.
    separator: between definitions.

    A turn with calls is its text, then opening, the calls, closing.

    text_and_calls: both may stand in one turn, with `between` before each call but the very first thing of a turn.
    one_call: no more than one in a turn.
    keeps_lead: what the template puts before an answer stands before calls too.
    result: around a tool's answer.
    in_user_turn: results are written as a user turn, neighbours share one.
    result_json: a result is quoted as JSON text.
    """

    name: str
    place: Literal["system", "user", "before user"]
    intro: str
    definition: str
    outro: str
    call: str
    result: str
    separator: str = ""
    indent: int | None = None
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    text_and_calls: bool = False
    one_call: bool = False
    keeps_lead: bool = True
    in_user_turn: bool = False
    result_json: bool = False


# Layouts that models were trained on, from the chat templates of Qwen2.5 and Hermes, Llama 3.1, Mistral 7B v0.3.
HERMES = ToolLayout(
    name="hermes",
    place="system",
    intro="# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    definition="\n{json}",
    outro="\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>",
    call='<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
    result="<tool_response>\n{content}\n</tool_response>",
    text_and_calls=True,
    in_user_turn=True,
)
LLAMA31 = ToolLayout(
    name="llama3.1",
    place="user",
    intro="Given the following functions, please respond with a JSON for a function call with its proper arguments "
    'that best answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of '
    "argument name and its value}.Do not use variables.\n\n",
    definition="{json}\n\n",
    outro="",
    indent=4,
    call='{"name": "{name}", "parameters": {arguments}}',
    one_call=True,
    result="<|start_header_id|>ipython<|end_header_id|>\n\n{content}<|eot_id|>",
    result_json=True,
)
MISTRAL = ToolLayout(
    name="mistral",
    place="before user",
    intro="[AVAILABLE_TOOLS] [",
    definition="{json}",
    separator=", ",
    outro="][/AVAILABLE_TOOLS]",
    opening="[TOOL_CALLS] [",
    call='{"name": "{name}", "arguments": {arguments}, "id": "{id}"}',
    between=", ",
    closing="]",
    keeps_lead=False,
    result='[TOOL_RESULTS] {"content": {content}, "call_id": "{id}"}[/TOOL_RESULTS]',
)


ALONE = "{alone}"


@dataclass(frozen=True)
class Dialogue:
    """A template for any number of turns.

    user, system: around the text.
    merged: the system text stands inside the first user turn, before its text.
    prefix: {bos} where the published template writes it as text: some tokenizers put a blank before a text, but none
        behind BOS.
    opening: what the program writes before an answer.
    lead: what the model writes before its text, left out where the text holds `own_lead`.
    close: ends an answer, and is learned.
    after, between, finish: written by the program behind an answer, before every user turn but the first, behind the
        last answer.
    trimmed: roles whose texts lose blanks around them.
    control: tokens that the tokenizer must have as special ones.
    stops: those of them that end an answer, besides EOS.
    tools: None where it has no place for them.
    takes_text: a text without turns is learned as it is.
    """

    name: str
    about: str
    user: str
    opening: str
    close: str
    system: str
    merged: bool = False
    default_system: str = ""
    prefix: str = ""
    lead: str = ""
    own_lead: str = ""
    after: str = ""
    between: str = ""
    finish: str = ""
    trimmed: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    tools: ToolLayout | None = HERMES
    takes_text: bool = False


@dataclass(frozen=True)
class Prompt:
    """A template for one prompt and one answer.

    header: what it begins with.
    header_input: where there is an input (context) as well. A system text takes the header's place where that is
        allowed. EOS ends the answer.
    """

    name: str
    about: str
    header: str
    header_input: str
    instruction: str
    input: str
    response: str
    system_as_header: bool = False
    lead: str = ""
    control: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()


Row = Dialogue | Prompt


def filled_row(row: Dialogue, slots: Mapping[str, str]) -> Dialogue:
    """The row with these texts in its slots."""
    texts = {field.name: getattr(row, field.name) for field in fields(row)}
    changed = {name: text for name, text in texts.items() if isinstance(text, str)}
    for slot, text in slots.items():
        changed = {name: words.replace(slot, text) for name, words in changed.items()}
    return replace(row, **changed)


def as_one_text(row: Dialogue) -> Dialogue:
    """For programs that render one text and tokenise it: where it is cut for the tokenizer cannot be said there."""
    return filled_row(row, {ALONE: ""})
