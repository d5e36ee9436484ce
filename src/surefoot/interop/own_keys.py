"""Keys of surefoot's own beside another tool's command: `surefoot run log_every=1 -- finetune.py …`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.config.overrides import Sources, apply_override, expand_short_forms
from surefoot.config.yaml_reader import Document
from surefoot.interop.draft import in_order
from surefoot.interop.translation import Note, Translation
from surefoot.system.errors import Fault, InputError


def with_own_keys(found: Translation, texts: Sequence[str]) -> Translation:
    """With `key=value` words written over what the tool's own words came to. Raises InputError."""
    if not texts:
        return found
    if found.command != "train":
        what = f"is a key of a training, and the command is for {found.command}"
        raise InputError(Fault(texts[0], what, "leave it out", code="SF-TRANSLATE-SETTING"))
    config, sources = expand_short_forms(dict(found.config)), Sources(Document({}, {}, {}, ""))
    for text in texts:
        config = apply_override(config, text, sources)
    set_here = tuple(Note(text, "carried", (key,), "", text) for key, text in sources.overrides.items())
    notes = (_without(note, sources.overrides) for note in found.notes)
    return replace(found, config=in_order(config), notes=(*(note for note in notes if note), *set_here))


def _without(note: Note, overrides: dict[str, str]) -> Note | None:
    """What is left of it: a default that is written over is none, and a word that is says so."""
    gone = {key: text for key in note.keys for name, text in overrides.items() if f"{key}.".startswith(f"{name}.")}
    if not gone:
        return note
    keys = tuple(key for key in note.keys if key not in gone)
    if note.fate == "assumed":
        return replace(note, keys=keys) if keys else None
    why = "; ".join(part for part in (note.why, f"{', '.join(gone.values())} goes before it") if part)
    return replace(note, fate="changed" if keys else "listed", keys=keys, why=why)
