"""From text to token ids, with a say in which text may name control tokens.

A template's `<|eot_id|>` is a control token; the same characters in a user's text are text. tokenizers can read a
string either way as a whole, so text is handed over in pieces, each marked. Nothing is added to a piece: no BOS, and no
blank before a piece that continues a sequence (SentencePiece-like tokenizers put one before every text they are given).
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surefoot.system.errors import Fault, InputError, is_panic

_LEAD = "\n"  # never merges with what follows; takes the place of the text before a piece


class Piece(NamedTuple):
    """Text that is encoded at once. literal: names of control tokens in it are text. opening: nothing comes before."""

    text: str
    literal: bool
    opening: bool


@contextmanager
def panics_told(folder: str | Path) -> Iterator[None]:
    """InputError that names the tokenizer.json of `folder` where the library breaks off on what it says."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        what = f"makes the tokenizers library break off: {' '.join(str(error).split())}"
        raise InputError(
            Fault(str(Path(folder) / "tokenizer.json"), what, "take the model's own file", code="SF-TOKENIZER")
        ) from None


class TextEncoder:
    """A tokenizer reduced to what the data layer needs.

    control: id and text of the tokens that only templates use. swallows_blanks: those of them that take the white space
    behind them away. puts_blank: a text of its own begins with a blank that is not there (SentencePiece).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise InputError(
                Fault(
                    "tokenizer",
                    "has no fast form",
                    "a tokenizer.json must stand beside the weights",
                    code="SF-TOKENIZER",
                )
            )
        self.tokenizer = tokenizer
        self.control = {
            number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.swallows_blanks = tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.rstrip
        )
        self.bos_id = cast("int | None", tokenizer.bos_token_id)
        self.size = len(tokenizer)  # every id is below this
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        longest_first = sorted(self.control.values(), key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # `control_places` of a template's own words, which stand in every example
        self.words_places = functools.lru_cache(maxsize=256)(self.control_places)
        self._lead_ids = self._encode([_LEAD], literal=False)[0]
        alone, after_lead = self._encode(["a", _LEAD + "a"], literal=False)
        self.puts_blank = after_lead != self._lead_ids + alone

    def encode(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Ids of each piece, not to be changed: equal pieces share theirs. All pieces of one kind go to the tokenizer
        in one call, and each text once: both answers of a pair follow the same prompt."""
        ids: list[list[int]] = [[] for _ in pieces]
        for literal in (False, True):
            places = [place for place, piece in enumerate(pieces) if piece.literal == literal]
            texts = [self._with_lead(pieces[place]) for place in places]
            distinct = list(dict.fromkeys(texts))
            known = dict(zip(distinct, self._encode(distinct, literal) if distinct else [], strict=True))
            for place, text in zip(places, texts, strict=True):
                ids[place] = self._without_lead(pieces[place], known[text])
        return ids

    def spans(self, piece: Piece) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of one piece, and the characters (start, end) that each stands for."""
        text = self._with_lead(piece)
        with self._backend_for(piece.literal) as backend:
            found = backend.encode(text, add_special_tokens=False)
        ids = self._without_lead(piece, found.ids)
        if len(text) == len(piece.text):
            return ids, found.offsets
        if len(ids) == len(found.ids) - len(self._lead_ids):
            return ids, [(start - len(_LEAD), end - len(_LEAD)) for start, end in found.offsets[len(self._lead_ids) :]]
        return self.spans(Piece(piece.text, piece.literal, opening=True))

    def control_text(self, text: str) -> list[str]:
        """The names of control tokens that the text spells out."""
        return self._control_text.findall(text)

    def control_places(self, text: str) -> list[tuple[int, int]]:
        """From where to where in the text the names of control tokens stand."""
        return [found.span() for found in self._control_text.finditer(text)]

    def digest(self) -> str:
        """SHA-256 of everything that decides which ids a text gets."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def _with_lead(self, piece: Piece) -> str:
        return _LEAD + piece.text if self.puts_blank and not piece.opening else piece.text

    def _without_lead(self, piece: Piece, ids: list[int]) -> list[int]:
        if piece.opening or not self.puts_blank:
            return ids
        count = len(self._lead_ids)
        if ids[:count] == self._lead_ids:
            return ids[count:]
        return self._encode([piece.text], piece.literal)[0]

    def _encode(self, texts: Sequence[str], literal: bool) -> list[list[int]]:
        with self._backend_for(literal) as backend:
            return [found.ids for found in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    @contextmanager
    def _backend_for(self, literal: bool) -> Iterator[Tokenizer]:
        """The backend, for which names of control tokens are text while the block runs where `literal` says so."""
        self._backend.encode_special_tokens = literal
        try:
            with panics_told(self.tokenizer.name_or_path):
                yield self._backend
        finally:
            self._backend.encode_special_tokens = False
