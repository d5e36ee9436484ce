"""Whether an adapter's token ids mean the same in the base that it is put over.

Weights may be others, which is an experiment and a caution (`provenance`). With another vocabulary every id is another
text: answers are noise, and whatever is done to one token's row is done to another one's. How a text is split into
tokens does not matter: the adapter's own tokenizer does that.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from surefoot.methods.provenance import saved_plan
from surefoot.models.load import load_tokenizer
from surefoot.models.saved_adapter import SavedAdapter
from surefoot.planning.plan import RunPlan
from surefoot.system.errors import Fault, InputError

_FILE = "tokenizer.json"


def require_same_tokens(saved: SavedAdapter, base: Path, rows: int) -> None:
    """Raises InputError where the adapter brings a tokenizer, and the base's ids stand for other tokens. Reserved ones
    that training did not write may have other names, as Llama 3's have in Llama 3.1.

    rows: of the base's embedding; further ones come with the adapter.
    """
    files = saved.folder / _FILE, base / _FILE
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    own = load_tokenizer(saved.folder)
    there = {number: text for text, number in load_tokenizer(base).get_vocab().items()}
    brought = range(rows, saved.rows or 0)
    for text, number in _written(own, saved_plan(saved.folder)):
        if there.get(number) != text and number not in brought:
            named = f"is {there[number]!r}" if number in there else "does not exist"
            what = f"was trained with another tokenizer: its token {number}, {text!r}, {named} in {base}"
            raise InputError(Fault(str(saved.folder), what, "put it over the model that it was trained over"))


def _written(own: PreTrainedTokenizerBase, plan: RunPlan | None) -> list[tuple[str, int]]:
    """The tokens that training may have written, with their ids: of texts, and the special ones that begin and end
    texts or stand in the chat template."""
    added = own.added_tokens_decoder
    named = [own.bos_token, own.eos_token]
    marks = {number for number, token in added.items() if token.content in str(own.chat_template)}
    marks |= set(plan.tokenizer.stop.value) if plan else set()
    marks |= {plan.tokenizer.bos_id} if plan and plan.tokenizer.bos_id is not None else set()
    return [
        (text, number)
        for text, number in own.get_vocab().items()
        if number not in added or number in marks or text in named
    ]
