"""Define named chat templates: the strings around every text of a conversation, and the format of tools.

Rows are plain text, so that planning, encoding and the docs use one table. Slots: {content} is the text; {bos} and
{eos} are the tokenizer's tokens; {alone} writes nothing, but the text after it is tokenized separately. For tools:
{json} is a definition, {name} {arguments} {id} belong to a call, {content} {id} to a result. Whether an example starts
with BOS is decided by the plan, not by the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal


@dataclass(frozen=True)
class ToolLayout:
    """How a template writes tool definitions, calls and results.

    place: position of the definitions: after the system text, in the first user turn before its text, or before that
        turn.
    indent: indentation of their JSON.
    separator: text between definitions.

    A turn with calls is its text, then opening, the calls, closing.

    text_and_calls: whether a turn may have text and calls; `between` precedes each call unless it starts the turn.
    one_call: whether a turn has at most one call.
    keeps_lead: whether the text before an answer also precedes calls.
    result: text around a tool's result.
    in_user_turn: whether results are written as a user turn; consecutive results share one.
    result_json: whether a result is quoted as JSON text.
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


# Stanford Alpaca's sentence, without and with an input. Publishers and tools put it into prompts of their own.
_TASK = "Below is an instruction that describes a task{} Write a response that appropriately completes the request."
TASK = _TASK.format(".")
TASK_WITH_INPUT = _TASK.format(", paired with an input that provides further context.")

ALONE = "{alone}"


@dataclass(frozen=True)
class Dialogue:
    """A template for any number of turns.

    user, system: text around a user or system text.
    merged: whether the system text is inside the first user turn, before its text.
    prefix: {bos} if the published template writes it as text: some tokenizers add a blank before a text, but not
        after BOS.
    opening: generation prompt, written before an answer without loss.
    lead: what the model writes before its text.
    own_lead: an answer that contains it has no lead, and no opening that contains it.
    close: end of an answer; carries loss.
    after, between, finish: text without loss after an answer, before every user turn except the first, after the last
        answer.
    trimmed: roles whose texts are stripped.
    control: tokens that must be special tokens of the tokenizer.
    stops: those of them that end an answer, in addition to EOS.
    tools: format of tools; None if not supported.
    takes_text: whether a text without turns is trained on unchanged.
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
    """A template for one prompt and one answer, which EOS ends.

    header: text at the beginning, replaced by a system text where that is allowed.
    header_input: the same for records with an input (context).
    lead: written before the answer, with loss; with {alone} the tokenizer starts a new text there.
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

    @property
    def after_input(self) -> str:
        """The response's heading behind an input."""
        return self.response


@dataclass(frozen=True)
class PromptByInput(Prompt):
    """A prompt whose heading of the response is another behind an input: `heading`."""

    heading: str = ""

    @property
    def after_input(self) -> str:
        return self.heading


@dataclass(frozen=True)
class PromptInTurn(Prompt):
    """A prompt that is the text of a turn. close: the turn's end, in place of EOS; "" for EOS."""

    close: str = ""


Row = Dialogue | Prompt


def in_turn(name: str, about: str, prompt: Prompt, turns: Dialogue) -> PromptInTurn:
    """Return the row that writes `prompt` into a user turn of `turns`, and the answer into the next turn."""
    before, after = turns.user.split("{content}")
    end = prompt.response.rstrip() if "user" in turns.trimmed else prompt.response
    return PromptInTurn(
        name,
        about,
        header=before + prompt.header,
        header_input=before + prompt.header_input,
        instruction=prompt.instruction,
        input=prompt.input,
        response=end + after + turns.opening,
        lead=turns.lead,
        control=turns.control,
        stops=turns.stops,
        close="" if turns.close == "{eos}" else turns.close,
    )


def filled_row(row: Dialogue, slots: Mapping[str, str]) -> Dialogue:
    """Return the row with these texts in its slots."""
    texts = {field.name: getattr(row, field.name) for field in fields(row)}
    changed = {name: text for name, text in texts.items() if isinstance(text, str)}
    for slot, text in slots.items():
        changed = {name: words.replace(slot, text) for name, words in changed.items()}
    return replace(row, **changed)


def as_one_text(row: Dialogue) -> Dialogue:
    """Return the row without {alone}, for programs that tokenize one rendered text as a whole."""
    return filled_row(row, {ALONE: ""})
