"""Which chat template writes the examples, and which of its tokens end a turn."""

from __future__ import annotations

from surefoot.config.nearest import nearest_word
from surefoot.families.family import Family
from surefoot.families.model_facts import ModelFacts
from surefoot.families.tokenizer_facts import TokenizerFacts
from surefoot.planning.notes import Notes
from surefoot.planning.plan import Choice

NAMES = ("tokenizer", "llama3", "alpaca", "plain")
# What the template `llama3` writes; each must be a single special token of the tokenizer.
LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def plan_template(request: str, model: ModelFacts, tokenizer: TokenizerFacts, notes: Notes) -> Choice[str]:
    if request == "auto":
        choice = _auto(tokenizer)
    else:
        _check_named(request, tokenizer, notes)
        choice = Choice(request, "asked for", "user")
    _warn_of_untrained_tokens(choice.value, model, tokenizer, notes)
    return choice


def turn_ends(template: str, family: Family | None, tokenizer: TokenizerFacts) -> list[str]:
    """Special tokens that end a turn in the text that this template writes; EOS is not among them."""
    if template == "llama3":
        return ["<|eot_id|>"] if tokenizer.is_special("<|eot_id|>") else []
    if template != "tokenizer" or tokenizer.chat_template is None or family is None:
        return []
    text = tokenizer.chat_template
    return [token for token in family.turn_ends if token in text and tokenizer.is_special(token)]


def _auto(tokenizer: TokenizerFacts) -> Choice[str]:
    if tokenizer.chat_template is not None:
        return Choice("tokenizer", "the tokenizer brings a chat template", "default")
    return Choice("alpaca", "the tokenizer brings no chat template; alpaca needs no special tokens", "default")


def _check_named(name: str, tokenizer: TokenizerFacts, notes: Notes) -> None:
    if name not in NAMES:
        near = nearest_word(name, NAMES)
        fix = f"did you mean {near}?" if near else f"use auto, {', '.join(NAMES)}"
        notes.refuse("data.template", f"unknown template {name!r}", fix)
    elif name == "tokenizer" and tokenizer.chat_template is None:
        notes.refuse("data.template", "the tokenizer brings no chat template", "use auto, alpaca or plain")
    elif name == "llama3":
        missing = [token for token in LLAMA3_TOKENS if not tokenizer.is_special(token)]
        if missing:
            notes.refuse(
                "data.template", f"llama3 needs tokens that this tokenizer lacks: {', '.join(missing)}", "use alpaca"
            )


def _warn_of_untrained_tokens(template: str, model: ModelFacts, tokenizer: TokenizerFacts, notes: Notes) -> None:
    """A base model meets chat tokens that it never saw. Its EOS tells it from a model trained on chats."""
    turns = model.family.untrained_turns if model.family else None
    if turns is None or turns.vocab != model.vocab or (tokenizer.eos and tokenizer.eos.text in turns.told_by):
        return
    written = LLAMA3_TOKENS if template == "llama3" else ()
    if template == "tokenizer":
        written = tuple(token for token in turns.tokens if token in (tokenizer.chat_template or ""))
    if any(token in turns.tokens for token in written):
        notes.caution(turns.warning)
