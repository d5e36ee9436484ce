"""Choose added tokens, PAD, BOS, stop tokens, template, and the maximum length of an example.

PAD is never a token that text can contain: padding with id 0 would pad Llama 3 with "!". It may equal EOS, because
padding is masked by position and not by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from surefoot.config.schema import RunConfig
from surefoot.families.bos_zero import BOS_FILE
from surefoot.families.family import Family
from surefoot.families.model_facts import ModelFacts
from surefoot.families.templates import find_row
from surefoot.families.tokenizer_facts import Token, TokenizerFacts
from surefoot.planning.notes import Notes
from surefoot.planning.plan import NONE_ADDED, Choice, Source, TokenizerPlan
from surefoot.planning.templates import fallback_templates, plan_template, template_source, turn_ends, writes_bos
from surefoot.system.messages import counted, nearest_word

_CODE = "SF-TOKENIZER"  # a tokenizer lacks a token, or belongs to another model
ADDED_PAD = "<|pad|>"
# Instruction examples are rarely longer; without a limit a single long example would decide the run's memory.
USUAL_LENGTH = 2048
_CHATML = "<|im_start|>"


@dataclass(frozen=True)
class _Pad:
    token: Choice[str]
    id: int
    added_rows: int = 0


def plan_tokenizer(config: RunConfig, model: ModelFacts, tokenizer: TokenizerFacts, notes: Notes) -> TokenizerPlan:
    """Plan the tokenizer from files and config, without measurements, so that data can be tokenized before the rest."""
    _check_rows(model, tokenizer, notes)
    _check_own(config, tokenizer, notes)
    added = dict.fromkeys((*config.tokenizer.add, *config.tokenizer.add_special))
    tokenizer = tokenizer_of(config, tokenizer)
    if config.method.plain_texts:
        template = Choice("plain", f"stage {config.stage} trains on texts, which have no turns", "default")
        fallbacks: tuple[str, ...] = ()
    else:
        template = plan_template(config.data.template, model, tokenizer, notes, config.data.template_arguments)
        fallbacks = fallback_templates(template, model.family, tokenizer)
    pad = _pad(config.tokenizer.pad, model, tokenizer, notes)
    ids = tuple(tokenizer.ids[text] for text in added)
    rows = max(model.vocab, pad.id + 1 if pad.added_rows else 0, *(number + 1 for number in ids)) - model.vocab
    if rows and model.spare_rows:
        what = f"the embedding has {model.spare_rows} rows more than the output head, so no row can be appended to both"
        notes.refuse("tokenizer.add" if config.tokenizer.add else "tokenizer.add_special", what, "leave it out")
    bos = _bos(config, template.value, model.family, tokenizer, notes)
    return TokenizerPlan(
        pad_token=pad.token,
        pad_id=pad.id,
        added_rows=rows,
        bos=bos,
        bos_id=_bos_id(bos, tokenizer),
        stop=_stop(template.value, model.family, tokenizer, notes),
        template=template,
        max_length=plan_max_length(config.data.max_length, model, notes),
        fallbacks=fallbacks,
        bos_scale=_bos_scale(config.bos.scale, model, notes),
        added=Choice(tuple(added), _where_added(ids, model), "user") if added else NONE_ADDED,
        added_ids=ids,
        added_special=tuple(dict.fromkeys(config.tokenizer.add_special)),
    )


def tokenizer_of(config: RunConfig, own: TokenizerFacts) -> TokenizerFacts:
    """Return the facts of the run's tokenizer: the model's own, with the tokens that the config adds."""
    asked = config.tokenizer
    eos = asked.eos if asked.eos in asked.add_special else None
    return own.with_added(asked.add, asked.add_special, eos)


def _where_added(ids: Sequence[int], model: ModelFacts) -> str:
    inside = sum(number < model.vocab for number in ids)
    if inside == len(ids):
        return f"asked for; all in rows that the embedding of {model.vocab} has"
    beside = f", {counted(inside, 'other')} in rows that it has" if inside else ""
    return f"asked for; {counted(len(ids) - inside, 'row')} appended to the embedding of {model.vocab}{beside}"


def plan_max_length(request: int | Literal["auto", "model"], model: ModelFacts, notes: Notes) -> Choice[int]:
    """Choose the maximum tokens per example; attention is measured at this length while the data is unknown."""
    positions = model.max_positions
    if request == "auto":
        if positions < USUAL_LENGTH:
            return Choice(positions, "all positions of the model", "default")
        return Choice(USUAL_LENGTH, f"the usual limit; the model has {positions} positions", "default")
    if request == "model":
        return Choice(positions, "asked for: all positions of the model", "user")
    if request > positions:
        what = f"is {request}, but the model has {positions} positions"
        notes.refuse("data.max_length", what, f"use at most {positions}", "SF-DATA-LENGTH")
    return Choice(request, "asked for", "user")


def _check_own(config: RunConfig, tokenizer: TokenizerFacts, notes: Notes) -> None:
    """Refuse tokens of the config that are not the tokenizer's own: another EOS would end answers with it."""
    asked = {"bos": config.tokenizer.bos, "eos": config.tokenizer.eos, "unk": config.tokenizer.unk}
    if config.tokenizer.eos in config.tokenizer.add_special:
        del asked["eos"]
    for role, token in asked.items():
        own: Token | None = getattr(tokenizer, role)
        if token is not None and (own is None or own.text != token):
            what = f"is {token}, but the tokenizer's own is {own.text if own else 'none'}"
            fix = "leave it out, or change the tokenizer's own files"
            fix = "leave it out, or also name it in tokenizer.add_special" if role == "eos" else fix
            notes.refuse(f"tokenizer.{role}", what, fix, _CODE)


def _check_rows(model: ModelFacts, tokenizer: TokenizerFacts, notes: Notes) -> None:
    """Refuse tokens without an embedding row, which would index past the end."""
    rows = model.embedding_rows
    if tokenizer.ordinary_size > rows:
        what = f"the tokenizer has ids up to {tokenizer.ordinary_size - 1}, the model only {rows} embedding rows"
        notes.refuse("model", what, "use the tokenizer that belongs to the model", _CODE)
    elif tokenizer.size > rows:
        beyond = [text for number, text in sorted(tokenizer.special.items()) if number >= rows]
        notes.caution(f"special tokens without an embedding row are never used: {', '.join(beyond)}")


def _pad(request: str, model: ModelFacts, tokenizer: TokenizerFacts, notes: Notes) -> _Pad:
    if request == "add":
        return _added_pad(model, tokenizer, notes)
    if request != "auto":
        return _named_pad(request, model, tokenizer, notes)
    own = tokenizer.pad
    why_not = None if own is None else _why_not_own(own, model, tokenizer)
    if own is not None and not why_not:
        return _Pad(Choice(own.text, "the tokenizer's own", "default"), own.id)
    found = _reserved_pad(model, tokenizer) or _spare_row(model, tokenizer) or _end_as_pad(tokenizer)
    if own is not None and own.id != found.id:
        notes.caution(
            f"the tokenizer names {own.text!r} (id {own.id}) as PAD, {why_not}; {found.token.value!r} is used instead"
        )
    return found


def _added_pad(model: ModelFacts, tokenizer: TokenizerFacts, notes: Notes) -> _Pad:
    """Use <|pad|>. If the tokenizer has it already (saved by such a run), its id stays: a text has only one id."""
    there = ADDED_PAD in tokenizer.ids
    number = tokenizer.ids.get(ADDED_PAD, tokenizer.size)
    rows = max(0, number + 1 - model.embedding_rows)
    where = "appended" if rows else f"in a spare row: the embedding has {model.embedding_rows}"
    reason = f"its row {number} is {where}"
    if there:
        reason = f"the tokenizer has it already; {reason}" if rows else "the tokenizer has it already, with a row"
        if not tokenizer.is_special(ADDED_PAD):
            what = f"add would use {ADDED_PAD!r}, which is an ordinary token here (id {number}): text can contain it"
            notes.refuse("tokenizer.pad", what, "use auto, or a special token")
    return _Pad(Choice(ADDED_PAD, f"asked for; {reason}", "user"), number, rows)


def _named_pad(token: str, model: ModelFacts, tokenizer: TokenizerFacts, notes: Notes) -> _Pad:
    choice = _Pad(Choice(token, "asked for", "user"), tokenizer.ids.get(token, 0))
    if token not in tokenizer.ids:
        near = nearest_word(token, list(tokenizer.special.values()))
        fix = f"did you mean {near}?" if near else "use auto, add, or a special token of this tokenizer"
        notes.refuse("tokenizer.pad", f"the tokenizer has no token {token!r}", fix, _CODE)
    elif not tokenizer.is_special(token):
        what = f"{token!r} is an ordinary token (id {choice.id}): text can contain it"
        notes.refuse("tokenizer.pad", what, "use auto, add, or a special token")
    elif choice.id >= model.embedding_rows:
        what = f"{token!r} has id {choice.id}, but the model has {model.embedding_rows} rows"
        notes.refuse("tokenizer.pad", what, "use auto")
    elif forbidden := _forbidden(token, model):
        notes.refuse("tokenizer.pad", f"{token!r} {forbidden}", "use auto or add")
    return choice


def _why_not_own(pad: Token, model: ModelFacts, tokenizer: TokenizerFacts) -> str:
    """Why the tokenizer's PAD cannot be used; empty if it can."""
    if not tokenizer.is_special(pad.text):
        return "which is an ordinary token that text can contain"
    if pad.id >= model.embedding_rows:
        return f"whose id is beyond the model's {model.embedding_rows} rows"
    forbidden = _forbidden(pad.text, model)
    return f"which {forbidden}" if forbidden else ""


def _forbidden(token: str, model: ModelFacts) -> str:
    """Why this token must not be PAD in this family; empty if it may."""
    pads = model.family.forbidden_pads if model.family else ()
    return next((pad.reason for pad in pads if pad.token == token), "")


def _reserved_pad(model: ModelFacts, tokenizer: TokenizerFacts) -> _Pad | None:
    """The first token reserved by the family that the chat template does not use."""
    for reserved in model.family.reserved_pads if model.family else ():
        number = tokenizer.ids.get(reserved.token, model.embedding_rows)
        written = reserved.token in (tokenizer.chat_template or "")
        if (
            tokenizer.is_special(reserved.token)
            and number < model.embedding_rows
            and number not in _ends(tokenizer)
            and not written
        ):
            return _Pad(Choice(reserved.token, f"the tokenizer has none; {reserved.reason}", "family"), number)
    return None


def _ends(tokenizer: TokenizerFacts) -> set[int]:
    """Ids in use: BOS, EOS and everything that ends generation."""
    return {token.id for token in (tokenizer.bos, tokenizer.eos) if token} | set(tokenizer.stops)


def _spare_row(model: ModelFacts, tokenizer: TokenizerFacts) -> _Pad | None:
    if tokenizer.size >= model.embedding_rows or ADDED_PAD in tokenizer.ids:  # a text has only one id
        return None
    reason = f"rows {tokenizer.size} to {model.embedding_rows - 1} of the embedding have no token"
    return _Pad(Choice(ADDED_PAD, reason, "default"), tokenizer.size)


def _end_as_pad(tokenizer: TokenizerFacts) -> _Pad:
    """Use EOS. Without EOS the run is refused elsewhere; 0 is then only a placeholder."""
    text, number = (tokenizer.eos.text, tokenizer.eos.id) if tokenizer.eos else ("", 0)
    return _Pad(
        Choice(text, "EOS, because there is no free token; padding is masked by position, not by id", "default"), number
    )


def _bos(
    config: RunConfig, template: str, family: Family | None, tokenizer: TokenizerFacts, notes: Notes
) -> Choice[bool]:
    """Decide by the request, else the family's pretraining, else the chat template, else the tokenizer."""
    scaled = config.bos.scale != 1
    if config.bos.prepend == "on" or (config.bos.prepend in ("auto", "tokenizer") and scaled):
        requested = "asked for" if config.bos.prepend == "on" else f"bos.scale {config.bos.scale:g} needs it"
        if tokenizer.bos is None and tokenizer.eos is not None:
            notes.caution(
                f"the tokenizer has no BOS: its EOS {tokenizer.eos.text} is used instead at the start of every example"
            )
            requested += "; the tokenizer has none, so EOS begins every example"
        return Choice(True, requested, "user")
    if config.bos.prepend == "off":
        return Choice(False, "asked for", "user")
    if tokenizer.bos is None:
        return Choice(False, "the tokenizer has none", "default")
    if config.bos.prepend == "tokenizer":
        return _as_the_tokenizer(template, tokenizer, "asked for", "user")
    if tokenizer.bos.text == _CHATML and not tokenizer.adds_bos:  # SmolLM2, whose config.json says llama
        return Choice(False, f"the tokenizer names {_CHATML} as BOS, which begins turns, not texts", "family")
    adds = "the tokenizer adds it too" if tokenizer.adds_bos else "although the tokenizer adds none"
    if family is None or family.uses_bos is None:
        who = "unknown family" if family is None else f"{family.name} models differ"
        return _as_the_tokenizer(template, tokenizer, who, "default")
    if family.uses_bos:
        return Choice(True, f"{family.name} was trained with {tokenizer.bos.text} in front; {adds}", "family")
    return Choice(False, f"{family.name} was trained without BOS", "family")


def _as_the_tokenizer(template: str, tokenizer: TokenizerFacts, why: str, source: Source) -> Choice[bool]:
    if text := template_source(template, tokenizer):
        writes = writes_bos(text, tokenizer)
        return Choice(writes, f"{why}; the chat template writes {'it' if writes else 'none'}", source)
    row = find_row(template)
    if row is not None and _CHATML in row.control:
        return Choice(False, f"{why}; ChatML has no BOS", source)
    begins = "begins" if tokenizer.adds_bos else "does not begin"
    return Choice(tokenizer.adds_bos, f"{why}; its tokenizer {begins} a text with it", source)


def _bos_id(bos: Choice[bool], tokenizer: TokenizerFacts) -> int | None:
    """Id of BOS; EOS replaces it only if a BOS is requested."""
    first = tokenizer.bos or (tokenizer.eos if bos.value else None)
    return first.id if first else None


def _bos_scale(scale: float, model: ModelFacts, notes: Notes) -> Choice[float]:
    before = model.bos_scale
    if before is not None and before != scale:
        what = f"is {scale:g}, but the model was trained with {before:g} ({BOS_FILE} beside it)"
        if scale == 1:
            notes.refuse("bos.scale", what, f"set it to {before:g}, or remove that file to train without scaling")
        notes.caution(f"bos.scale {what}")
    if scale == 1:
        return Choice(1.0, "unchanged", "default")
    if scale > 1:
        notes.caution(f"bos.scale {scale:g} makes the embedding of the first token larger; below 1 it is made smaller")
    return Choice(scale, "asked for: the embedding of the first token of every sequence times this", "user")


def _stop(template: str, family: Family | None, tokenizer: TokenizerFacts, notes: Notes) -> Choice[tuple[int, ...]]:
    """Stop tokens: EOS, then tokens that end a turn in this template, then those of generation_config.json."""
    if tokenizer.eos is None:
        missing = tokenizer.missing.get("eos")
        what = f"its EOS {missing!r} is not in the vocabulary" if missing else "names no EOS token"
        fix = "set eos_token in the model's tokenizer_config.json"
        notes.refuse("tokenizer", f"{what}: answers could not end", fix, _CODE)
        return Choice((), "none", "default")
    ends = turn_ends(template, family, tokenizer)
    found = [tokenizer.eos.id, *(tokenizer.ids[text] for text in ends), *tokenizer.stops]
    stop = tuple(dict.fromkeys(number for number in found if number in tokenizer.special))
    names = ", ".join(tokenizer.special[number] for number in stop)
    unlisted = [text for text in ends if tokenizer.stops and tokenizer.ids[text] not in tokenizer.stops]
    if unlisted:
        notes.caution(
            f"{', '.join(unlisted)} ends a turn in this template, but the model's generation_config.json does not stop "
            "at it; generation here stops at either"
        )
    return Choice(stop, names, "family" if ends else "default")
