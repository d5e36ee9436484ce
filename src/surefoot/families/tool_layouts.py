"""How tools, calls and results are written: three layouts that models were trained on, as text with slots.

Slots: {json} a definition, {name} {arguments} {id} of a call, {content} {id} of a result. Sources: the chat templates
of Qwen2.5 and Hermes, Llama 3.1, and Mistral 7B v0.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ToolLayout:
    """place: where the definitions stand: behind the system text, in the first user turn before its text, or before
    that turn. indent: of their JSON. separator: between definitions.

    A turn with calls is its text, then opening, the calls, closing. text_and_calls: both may stand in one turn, with
    `between` before each call but the very first thing of a turn. one_call: no more than one in a turn.
    keeps_lead: what the template puts before an answer stands before calls too.
    result: around a tool's answer. in_user_turn: results are written as a user turn, neighbours share one.
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
