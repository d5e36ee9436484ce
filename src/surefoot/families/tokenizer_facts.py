"""Read facts from a tokenizer's files without transformers: vocabulary, special tokens, chat template, stop tokens.

The files are tokenizer.json, tokenizer_config.json, special_tokens_map.json (for what tokenizer_config.json does not
set), chat_template.jinja and generation_config.json.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from surefoot.families.files import read_json, read_json_if_there, read_text
from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class Token:
    text: str
    id: int


@dataclass(frozen=True)
class TokenizerFacts:
    """Facts about a tokenizer, for planning.

    ids: token -> id.
    special: id -> token, for tokens that ordinary text cannot produce.
    bos, eos, pad, unk: tokens of these roles, None if not set.
    missing: role (bos, eos, pad, unk) -> token, if the token is not in the vocabulary.
    stops: ids of generation_config's end tokens.
    chat_template: Jinja text, None if there is none.
    adds_bos: whether its post-processor prepends BOS.
    size: highest id + 1.
    ordinary_size: highest id that text can produce + 1.
    """

    ids: Mapping[str, int] = field(repr=False)
    special: Mapping[int, str] = field(repr=False)
    bos: Token | None
    eos: Token | None
    pad: Token | None
    unk: Token | None
    missing: Mapping[str, str]
    stops: tuple[int, ...]
    chat_template: str | None
    adds_bos: bool
    size: int
    ordinary_size: int

    def is_special(self, token: str) -> bool:
        return token in self.ids and self.ids[token] in self.special

    def with_added(self, ordinary: Sequence[str], special: Sequence[str], eos: str | None = None) -> TokenizerFacts:
        """Return the facts after tokens are added as transformers does: a new one gets the next free id, one that is
        there keeps its own.

        eos: the added special token that becomes EOS; None keeps the tokenizer's.
        """
        ids, names = dict(self.ids), dict(self.special)
        free = itertools.count(self.size)
        for text in (*ordinary, *special):
            if text not in ids:
                ids[text] = next(free)
        names |= {ids[text]: text for text in special}
        end = self.eos if eos is None else Token(eos, ids[eos])
        return replace(self, ids=ids, special=names, eos=end, size=next(free))


def read_tokenizer_facts(folder: Path) -> TokenizerFacts:
    """Read facts from the tokenizer files in `folder`. Raises InputError that names the file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        fix = "save it once with transformers: AutoTokenizer.from_pretrained(model).save_pretrained(folder)"
        raise InputError(Fault(str(path), "file does not exist", fix, code="SF-FILE-MISSING"))
    stored = read_json(path)
    config = read_json_if_there(folder / "tokenizer_config.json")
    named = read_json_if_there(folder / "special_tokens_map.json") | _without_nulls(config)
    try:
        return _facts(folder, stored, config, named)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            Fault(str(folder), f"its tokenizer files have an unknown format: {error!r}", code="SF-TOKENIZER")
        ) from error


def _facts(
    folder: Path, stored: Mapping[str, Any], config: Mapping[str, Any], named: Mapping[str, Any]
) -> TokenizerFacts:
    ids = _vocabulary(stored, str(folder / "tokenizer.json"))
    special = _special(stored, config, ids)
    roles = {role: _content(named.get(f"{role}_token")) for role in ("bos", "eos", "pad", "unk")}
    found = {role: Token(text, ids[text]) for role, text in roles.items() if text in ids}
    # Not PAD: an ordinary token named as PAD can still come from text, so it must not count as unused.
    special |= {token.id: token.text for role, token in found.items() if role != "pad"}
    return TokenizerFacts(
        ids=ids,
        special=special,
        bos=found.get("bos"),
        eos=found.get("eos"),
        pad=found.get("pad"),
        unk=found.get("unk"),
        missing={role: text for role, text in roles.items() if text and text not in ids},
        stops=_stops(folder),
        chat_template=_chat_template(folder, config),
        adds_bos=_adds(stored.get("post_processor"), roles["bos"]),
        size=max(ids.values()) + 1,
        ordinary_size=max(set(ids.values()) - special.keys(), default=-1) + 1,
    )


def _vocabulary(stored: Mapping[str, Any], where: str) -> dict[str, int]:
    model = stored.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise InputError(
            Fault(
                where,
                "model.vocab is not a table of tokens",
                "only BPE and WordPiece tokenizers are supported",
                code="SF-TOKENIZER",
            )
        )
    return vocabulary | {token["content"]: token["id"] for token in stored.get("added_tokens") or ()}


def _special(stored: Mapping[str, Any], config: Mapping[str, Any], ids: dict[str, int]) -> dict[int, str]:
    """Return special tokens by id. Tokens that only tokenizer_config.json lists are added to `ids`."""
    listed = config.get("added_tokens_decoder") or {}
    for number, token in listed.items():
        ids.setdefault(token["content"], int(number))
    added = [*(stored.get("added_tokens") or ()), *listed.values()]
    return {ids[token["content"]]: token["content"] for token in added if token.get("special")}


def _content(token: object) -> str | None:
    """Return the text of a token, which is stored as text or as an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template: chat_template.jinja first, as in transformers; of a list of templates the "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _stops(folder: Path) -> tuple[int, ...]:
    value = read_json_if_there(folder / "generation_config.json").get("eos_token_id")
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def _adds(processor: object, bos: str | None) -> bool:
    """Return whether a post-processor, or one in a sequence, prepends BOS to a single text."""
    if not isinstance(processor, dict) or bos is None:
        return False
    if processor.get("type") == "Sequence":
        return any(_adds(part, bos) for part in processor.get("processors", ()))
    first = next(iter(processor.get("single") or ()), {})
    return isinstance(first, dict) and first.get("SpecialToken", {}).get("id") == bos


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
