"""What of a long text a model with few positions is given, so that every sequence still begins as in training.

A model that was trained with BOS in front of everything gets it in front of everything: cutting takes the tokens behind
it. Otherwise the first token would be another one each time, and that is also the one that a scaled BOS multiplies.
BOS itself is never predicted: no training text asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator


def last_tokens(ids: list[int], room: int, bos_id: int | None) -> list[int]:
    """At most `room` tokens, the last ones; BOS stays in front where it is there. bos_id: None without one."""
    if len(ids) <= room:
        return ids
    front = ids[:1] if ids[0] == bos_id else []
    return [*front, *ids[len(ids) - room + len(front) :]]


def rolling_windows(
    ids: list[int], positions: int, *, prefix: int, bos_id: int | None
) -> Iterator[tuple[list[int], list[int]]]:
    """(context, continuation) after (context, continuation): each token is predicted once, from as many before it as
    fit into `positions`, which are at least 2.

    prefix: what the first token is predicted from. bos_id: in front of every window, and never predicted; None for a
    model without one, whose later windows begin in the middle of the text.
    """
    ids = ids[1:] if bos_id is not None and ids[:1] == [bos_id] else ids
    front = [] if bos_id is None else [bos_id]
    width = positions - len(front)  # tokens of the text that a later window puts in
    if ids:
        yield front or [prefix], ids[:positions]
    for done in range(positions, len(ids), width):
        end = min(done + width, len(ids))
        yield [*front, *ids[end - width - 1 : done]], ids[done:end]
