"""Convert a named template to a Jinja chat template for transformers, TRL and vLLM.

Both render a conversation to the same text; tests compare them token for token. A prompt's input (alpaca's context) is
read from the message's field `input`. BOS, EOS and everything else is literal text in the template.
"""

from __future__ import annotations

import json

from surefoot.families.template_row import Dialogue, Prompt, ToolLayout

# Reasoning in a separate field, as in `surefoot.data.chat.builtin_template`.
_THOUGHT = "('<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' if message.reasoning_content else '')"
_ROLE = "{{- raise_exception('this template does not support the role ' ~ message.role) -}}"


def write_dialogue(row: Dialogue, bos: str) -> str:
    """Return the Jinja source.

    row: with {bos} and {eos} filled in.
    bos: text to put at the start; "" for none.
    """
    layout = row.tools
    lines = [
        *_print(bos),
        "{%- set turns = messages -%}",
        f"{{%- set ns = namespace(head={_quote(row.default_system)}, before='') -%}}",
        "{%- if messages[0].role == 'system' -%}",
        f"{{%- set turns = messages[1:] -%}}{{%- set ns.head = {_text('messages[0]', 'system', row)} -%}}",
        "{%- endif -%}",
        *_offer(layout),
        "{%- if ns.head -%}",
        f"{{%- set ns.head = {_fill(row.system, 'ns.head')} -%}}",
        *([] if row.merged else ["{{- ns.head -}}", "{%- set ns.head = '' -%}"]),
        "{%- endif -%}",
        "{%- for message in turns -%}",
        "{%- if message.role == 'user' -%}",
        *_user(row, layout),
        "{%- elif message.role == 'assistant' -%}",
        *_assistant(row, layout),
        *_result(row, layout),
        "{%- else -%}",
        _ROLE,
        "{%- endif -%}",
        "{%- endfor -%}",
    ]
    if row.opening:
        lines += ["{%- if add_generation_prompt -%}", *_print(row.opening), "{%- endif -%}"]
    return "\n".join(lines) + "\n"


def write_prompt(row: Prompt, bos: str, eos: str) -> str:
    """Return the Jinja source for one prompt and one answer."""
    header = f"({_quote(row.header_input)} if message.input else {_quote(row.header)})"
    lines = [
        *_print(bos),
        "{%- set ns = namespace(system='', prompts=0) -%}",
        "{%- for message in messages -%}",
        "{%- if message.role == 'system' and loop.first -%}" if row.system_as_header else "",
        "{%- set ns.system = message.content -%}" if row.system_as_header else "",
        "{%- elif message.role == 'user' and not ns.prompts -%}"
        if row.system_as_header
        else "{%- if message.role == 'user' and not ns.prompts -%}",
        "{%- set ns.prompts = 1 -%}",
        f"{{{{- ns.system or {header} -}}}}",
        f"{{{{- {_fill(row.instruction, 'message.content')} -}}}}",
        f"{{%- if message.input -%}}{{{{- {_fill(row.input, 'message.input')} -}}}}{{%- endif -%}}",
        *_heading(row),
        "{%- elif message.role == 'assistant' and loop.last -%}",
        f"{{{{- {_quote(row.lead)} ~ {_THOUGHT} ~ message.content ~ {_quote(eos)} -}}}}",
        "{%- else -%}",
        f"{{{{- raise_exception('the {row.name} template supports only one prompt and one answer') -}}}}",
        "{%- endif -%}",
        "{%- endfor -%}",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _heading(row: Prompt) -> list[str]:
    if row.after_input == row.response:
        return _print(row.response)
    return [f"{{{{- ({_quote(row.after_input)} if message.input else {_quote(row.response)}) -}}}}"]


def _offer(layout: ToolLayout | None) -> list[str]:
    """Add the tool definitions to ns.head or ns.before."""
    if layout is None:
        return ["{%- if tools -%}{{- raise_exception('this template supports no tools') -}}{%- endif -%}"]
    goal = "ns.head" if layout.place == "system" else "ns.before"
    start = f"(ns.head ~ '\\n\\n' if ns.head else '') ~ {_quote(layout.intro)}"
    dump = "tool | tojson" if layout.indent is None else f"tool | tojson(indent={layout.indent})"
    separator = f"('' if loop.first else {_quote(layout.separator)}) ~ " if layout.separator else ""
    return [
        "{%- if tools -%}",
        f"{{%- set {goal} = {start if goal == 'ns.head' else _quote(layout.intro)} -%}}",
        "{%- for tool in tools -%}",
        f"{{%- set {goal} = {goal} ~ {separator}{_fill(layout.definition, f'({dump})', 'json')} -%}}",
        "{%- endfor -%}",
        f"{{%- set {goal} = {goal} ~ {_quote(layout.outro)} -%}}",
        "{%- endif -%}",
    ]


def _user(row: Dialogue, layout: ToolLayout | None) -> list[str]:
    text = _text("message", "user", row)
    between = ["{%- if not loop.first -%}", *_print(row.between), "{%- endif -%}"] if row.between else []
    if layout is not None and layout.place == "before user":
        shown = ["{{- ns.before -}}", f"{{{{- {_fill(row.user, f'ns.head ~ {text}')} -}}}}"]
    else:
        shown = [f"{{{{- {_fill(row.user, f'ns.before ~ ns.head ~ {text}')} -}}}}"]
    return [*between, *shown, "{%- set ns.head = '' -%}", "{%- set ns.before = '' -%}"]


def _assistant(row: Dialogue, layout: ToolLayout | None) -> list[str]:
    lead = _quote(row.lead)
    if row.own_lead:
        lead = f"('' if {_quote(row.own_lead)} in text else {lead})"
    if row.lead and layout is not None and not layout.keeps_lead:
        lead = f"('' if message.tool_calls else {lead})"
    opening = _print(row.opening)
    if row.own_lead and row.own_lead in row.opening:
        opening = [f"{{%- if {_quote(row.own_lead)} not in text -%}}", *opening, "{%- endif -%}"]
    lines = [
        f"{{%- set text = {_THOUGHT} ~ {_text('message', 'assistant', row, optional=True)} -%}}",
        *opening,
        f"{{{{- {lead} ~ text -}}}}",
        *(_calls(layout) if layout is not None else []),
        *_print(row.close + row.after),
    ]
    if row.finish:
        lines += ["{%- if loop.last and not add_generation_prompt -%}", *_print(row.finish), "{%- endif -%}"]
    return lines


def _calls(layout: ToolLayout) -> list[str]:
    name, rest = layout.call.split("{name}")
    middle, end = rest.split("{arguments}")
    arguments = "(call.arguments if call.arguments is string else call.arguments | tojson)"
    closing = " ~ item.id ~ ".join(_quote(part) for part in end.split("{id}"))
    one = (
        "{%- if message.tool_calls | length > 1 or text -%}"
        "{{- raise_exception('this template supports one call per turn, and no text with it') -}}{%- endif -%}"
    )
    no_text = "{%- if text -%}{{- raise_exception('this template supports no text with calls') -}}{%- endif -%}"
    return [
        "{%- if message.tool_calls -%}",
        *([one] if layout.one_call else [] if layout.text_and_calls else [no_text]),
        *_print(layout.opening),
        "{%- for item in message.tool_calls -%}",
        "{%- set call = item.function -%}",
        f"{{{{- '' if loop.first and not text else {_quote(layout.between)} -}}}}",
        f"{{{{- {_quote(name)} ~ call.name ~ {_quote(middle)} ~ {arguments} ~ {closing} -}}}}",
        "{%- endfor -%}",
        *_print(layout.closing),
        "{%- endif -%}",
    ]


def _result(row: Dialogue, layout: ToolLayout | None) -> list[str]:
    if layout is None:
        return []
    content = "(message.content | tojson)" if layout.result_json else "message.content"
    left, right = layout.result.split("{content}")
    end = " ~ message.tool_call_id ~ ".join(_quote(part) for part in right.split("{id}"))
    lines = ["{%- elif message.role == 'tool' -%}", f"{{{{- {_quote(left)} ~ {content} ~ {end} -}}}}"]
    if layout.in_user_turn:
        before, after = (row.between + row.user).split("{content}")
        lines.insert(
            1, f"{{{{- '\\n' if loop.previtem is defined and loop.previtem.role == 'tool' else {_quote(before)} -}}}}"
        )
        lines.append(
            f"{{{{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else {_quote(after)} -}}}}"
        )
    return lines


def _text(message: str, role: str, row: Dialogue, optional: bool = False) -> str:
    content = f"({message}.content or '')" if optional else f"{message}.content"
    return f"({content} | trim)" if role in row.trimmed else content


def _fill(slot: str, value: str, name: str = "content") -> str:
    left, right = slot.split(f"{{{name}}}")
    return " ~ ".join(part for part in (_quote(left) if left else "", value, _quote(right) if right else "") if part)


def _print(text: str) -> list[str]:
    return [f"{{{{- {_quote(text)} -}}}}"] if text else []


def _quote(text: str) -> str:
    """Return a Jinja string literal. Jinja reads JSON's escapes except \\u for ASCII, which does not occur here."""
    return json.dumps(text, ensure_ascii=False)
