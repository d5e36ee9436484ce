"""From pairs, judged answers and prompts to token ids.

Both rows of a pair begin with the same tokens. Where a pair is too long, both lose the same part of the prompt: its
texts give way first, as in any example (see `cut`), so far that the longer answer fits or a quarter of the room is
left; then answers lose their ends. What a template writes behind an answer's stop token is left out: nothing learns it,
and a reward model scores an answer at its last token, which is the one that a policy ends with.

A prompt is never cut: a policy would answer something that nobody asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surefoot.data.cut import Kept, keep
from surefoot.data.encode import Encoded, Row, cut_to, rows_in_parts
from surefoot.data.formats import Conversation
from surefoot.data.segments import Template
from surefoot.data.text_encoder import TextEncoder
from surefoot.system.errors import Fault, InputError


def encode_pairs(
    conversations: Sequence[Conversation],
    template: Template,
    encoder: TextEncoder,
    *,
    bos_id: int | None,
    max_length: int,
    name: str,
) -> Iterator[Encoded]:
    """Better, worse, better, worse …, as the conversations come; arguments as in `encode`. InputError where a template
    lays a prompt out differently before the two answers. A pair of which one answer is lost whole has lost both."""
    rows = rows_in_parts(conversations, template, encoder, bos_id=bos_id, train_on="responses", name=name)
    for better, worse in zip(rows, rows, strict=True):
        prompt = _begin(better)
        if not np.array_equal(better.whole.ids[:prompt], worse.whole.ids[: _begin(worse)]):
            what = f"row {better.conversation.number}: the template writes another prompt before the worse answer"
            raise InputError(
                Fault(
                    f"{name}:{better.conversation.line}", what, "choose another data.template", code="SF-DATA-TEMPLATE"
                )
            )
        found = _pair(better, worse, prompt, encoder, max_length, template.stop_ids)
        if not all(one.usable for one in found):
            found = [one._replace(supervised=np.zeros_like(one.supervised)) for one in found]
        yield from found


def encode_judged(
    conversations: Sequence[Conversation],
    template: Template,
    encoder: TextEncoder,
    *,
    bos_id: int | None,
    max_length: int,
    name: str,
) -> Iterator[Encoded]:
    """One `Encoded` per conversation; arguments as in `encode`."""
    for row in rows_in_parts(conversations, template, encoder, bos_id=bos_id, train_on="responses", name=name):
        if _end(row) <= max_length:
            yield _first(row, _end(row))
        else:
            yield cut_to(row, _keep(row, encoder, max_length), template.stop_ids)


def encode_prompts(
    conversations: Sequence[Conversation],
    template: Template,
    encoder: TextEncoder,
    *,
    bos_id: int | None,
    max_length: int,
    name: str,
) -> Iterator[Encoded]:
    """The ids of `segments.prompt_ids` for each conversation, nothing of them learned; arguments as in `encode`. One
    with more than max_length tokens does not fit and is whole."""
    for row in rows_in_parts(conversations, template, encoder, bos_id=bos_id, train_on="responses", name=name):
        nothing = np.zeros(len(row.whole.ids), dtype=bool)
        yield row.whole._replace(supervised=nothing, fits=len(row.whole.ids) <= max_length)


def _pair(
    better: Row, worse: Row, prompt: int, encoder: TextEncoder, max_length: int, stop_ids: Sequence[int]
) -> list[Encoded]:
    """prompt: tokens of it, the same in both."""
    rows, ends = (better, worse), (_end(better), _end(worse))
    if max(ends) <= max_length:
        return [_first(row, end) for row, end in zip(rows, ends, strict=True)]
    cut = _keep(rows[int(np.argmax(ends))], encoder, max_length)
    kept = cut.positions[cut.positions < prompt]
    found = []
    for row, end in zip(rows, ends, strict=True):
        answer = np.arange(prompt, end)[: max_length - len(kept)]
        whole = len(kept) == prompt and prompt + len(answer) == end
        own = cut._replace(positions=np.append(kept, answer))
        found.append(_first(row, end) if whole else cut_to(row, own, stop_ids))
    return found


def _keep(row: Row, encoder: TextEncoder, max_length: int) -> Kept:
    return keep(row.runs, row.learned, row.conversation, row.whole.supervised, encoder, max_length)


def _begin(row: Row) -> int:
    """Where the first token stands that is learned: at the end, where there is none."""
    return int(np.argmax(row.whole.supervised)) if row.whole.usable else len(row.whole.ids)


def _end(row: Row) -> int:
    """Behind the last token that is learned."""
    places = np.flatnonzero(row.whole.supervised)
    return int(places[-1]) + 1 if len(places) else len(row.whole.ids)


def _first(row: Row, end: int) -> Encoded:
    return row.whole._replace(ids=row.whole.ids[:end], supervised=row.whole.supervised[:end])
