"""Choose the chat template, and the special tokens that end a turn in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from surefoot.families.family import Family
from surefoot.families.files import read_text
from surefoot.families.model_facts import ModelFacts
from surefoot.families.template_row import Dialogue
from surefoot.families.templates import ANYWHERE, OWN, OWN_OR, find_row, is_jinja, is_users_own, named_row
from surefoot.families.tokenizer_facts import TokenizerFacts
from surefoot.planning.notes import Notes
from surefoot.planning.plan import Choice
from surefoot.system.errors import Fault, InputError


def plan_template(
    request: str,
    model: ModelFacts,
    tokenizer: TokenizerFacts,
    notes: Notes,
    arguments: Mapping[str, bool | float | str] = MappingProxyType({}),
) -> Choice[str]:
    """Choose the template. request: auto, a template name, `tokenizer-or-NAME`, a .jinja file, or Jinja. arguments:
    values of its variables, with which it becomes another Jinja text. Faults go to notes."""
    if request == "auto":
        choice = _auto(tokenizer)
    elif request.startswith(OWN_OR):
        name = OWN if tokenizer.chat_template is not None else request.removeprefix(OWN_OR)
        _check_named(name, tokenizer, notes)
        has = "a" if name == OWN else "no"
        choice = Choice(name, f"asked for, and the tokenizer has {has} chat template", "user")
    else:
        _check_named(request, tokenizer, notes)
        choice = Choice(request, "asked for", "user")
    _warn_of_untrained_tokens(choice.value, model, tokenizer, notes)
    return _with_arguments(choice, arguments, tokenizer, notes) if arguments else choice


_OURS = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "continue_final_message")
_ARGUMENTS = "data.template_arguments"


def _with_arguments(
    choice: Choice[str], arguments: Mapping[str, bool | float | str], tokenizer: TokenizerFacts, notes: Notes
) -> Choice[str]:
    """Return the template with lines in front that set its variables, so that it is one text in training, generation
    and export. Faults go to notes: templates without variables, and names that the template does not read."""
    source = template_source(choice.value, tokenizer)
    if not source:
        fix = "leave it out, or use data.template: tokenizer or a .jinja file"
        notes.refuse(_ARGUMENTS, f"the template {choice.value} has no variables", fix, "SF-DATA-TEMPLATE")
        return choice
    for name in arguments:
        if name in _OURS or not re.fullmatch(r"[A-Za-z_]\w*", name):
            what = f"{name} is set by surefoot" if name in _OURS else f"{name!r} is no name of a variable"
            notes.refuse(_ARGUMENTS, what, "leave it out", "SF-DATA-TEMPLATE")
        elif not re.search(rf"\b{name}\b", source):
            notes.refuse(_ARGUMENTS, f"the template does not read {name}", "leave it out", "SF-DATA-TEMPLATE")
    lines = "".join(
        f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n" for name, value in arguments.items()
    )
    shown = ", ".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return Choice(lines + source, f"{choice.reason}, with {shown}", "user")


def fallback_templates(choice: Choice[str], family: Family | None, tokenizer: TokenizerFacts) -> tuple[str, ...]:
    """Templates that `auto` tries in this order if its choice cannot render a record (with tools, or a system message).

    A requested template has none. For the tokenizer's own template they are the family's templates that fit this
    tokenizer: by their special tokens or, without any, by the text before a user turn in the tokenizer's template.
    """
    if choice.source == "user":
        return ()
    if choice.value != OWN:
        return ("vicuna",)
    rows = [row for name in (family.templates if family else ()) if isinstance(row := find_row(name), Dialogue)]
    return tuple(row.name for row in rows if _is_known(row, tokenizer))


def _is_known(row: Dialogue, tokenizer: TokenizerFacts) -> bool:
    if row.control:
        return all(map(tokenizer.is_special, row.control))
    return row.user.partition("{content}")[0].strip() in (tokenizer.chat_template or "")


def turn_ends(template: str, family: Family | None, tokenizer: TokenizerFacts) -> list[str]:
    """Special tokens other than EOS that end a turn in this template."""
    row = find_row(template)
    if row is not None:
        return [token for token in row.stops if tokenizer.is_special(token)]
    text = template_source(template, tokenizer)
    return [token for token in (family.turn_ends if family else ()) if token in text and tokenizer.is_special(token)]


def template_source(template: str, tokenizer: TokenizerFacts) -> str:
    """Jinja source of the tokenizer's template, of a file or of the config; empty if there is none."""
    if template == OWN:
        return tokenizer.chat_template or ""
    if is_jinja(template):
        return template
    if is_users_own(template) and Path(template).is_file():
        return read_text(Path(template))
    return ""


def writes_bos(source: str, tokenizer: TokenizerFacts) -> bool:
    """Whether this Jinja source mentions BOS (templates do so to put it first): as `bos_token`, or as text unless BOS
    and EOS are the same token."""
    code = re.sub(r"\{#.*?#\}", "", source, flags=re.DOTALL)
    as_text = tokenizer.bos is not None and tokenizer.bos != tokenizer.eos and tokenizer.bos.text in code
    return as_text or re.search(r"\bbos_token\b", code) is not None


def _auto(tokenizer: TokenizerFacts) -> Choice[str]:
    if tokenizer.chat_template is not None:
        return Choice(OWN, "the tokenizer has a chat template", "default")
    reason = "the tokenizer has no chat template; alpaca needs no special tokens (dialogues take vicuna)"
    return Choice("alpaca", reason, "default")


def _check_named(name: str, tokenizer: TokenizerFacts, notes: Notes) -> None:
    if is_jinja(name):
        return  # its faults are found when examples are rendered
    if is_users_own(name):
        try:
            read_text(Path(name))
        except InputError as error:
            for fault in error.faults:
                notes.refuse("data.template", f"{fault.where}: {fault.what}", fault.fix, fault.code)
    elif name == OWN:
        if tokenizer.chat_template is None:
            fix = f"use data.template: auto, {ANYWHERE}"
            notes.refuse("data.template", "the tokenizer has no chat template", fix, "SF-DATA-TEMPLATE")
    elif isinstance(fault := named_row(name, tokenizer.is_special), Fault):
        notes.refuse(fault.where, fault.what, fault.fix, fault.code)


def _warn_of_untrained_tokens(template: str, model: ModelFacts, tokenizer: TokenizerFacts, notes: Notes) -> None:
    """Caution about chat tokens that a base model has never seen. Its EOS distinguishes it from a chat model."""
    turns = model.family.untrained_turns if model.family else None
    if turns is None or turns.vocab != model.vocab or (tokenizer.eos and tokenizer.eos.text in turns.told_by):
        return
    row = find_row(template)
    text = "".join(row.control) if row is not None else template_source(template, tokenizer)
    if any(token in text for token in turns.tokens):
        notes.caution(turns.warning)
