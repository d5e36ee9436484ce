"""Pictures in conversations: each mark in a text gets its picture, and each picture its mark.

A record names its pictures where they stand (parts of a message's content), or lists them beside texts in which
`<image>` marks their places, one mark for each, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from surefoot.data.formats.conversation import IMAGE, MARK, Conversation, Picture, Turn
from surefoot.data.formats.rows import RowFault

Look = Callable[[str], Picture]
_CODE = "SF-DATA-PICTURE"


def has_pictures(conversation: Conversation) -> bool:
    """Whether a place in its texts is a picture's."""
    turns = conversation.turns
    return any(turn.images for turn in turns) or (bool(conversation.images) and any(MARK in one.text for one in turns))


def refuse_pictures(conversation: Conversation, why: str, fix: str) -> Conversation:
    """The conversation, which has none. Raises RowFault where it has."""
    if has_pictures(conversation):
        raise RowFault(f"has a picture, and {why}", fix, _CODE)
    return conversation


def with_pictures(conversation: Conversation, look: Look) -> Conversation:
    """The conversation with its pictures, and `IMAGE` for each in its texts.

    look: the picture of a path; raises RowFault for one that cannot be learned.
    """
    if not conversation.images and not any(turn.images for turn in conversation.turns):
        return conversation
    listed = list(conversation.images)
    turns, paths = [], []
    for number, turn in enumerate(conversation.turns, start=1):
        turn, found = _in_turn(turn, listed, number)
        turns.append(turn)
        paths += [(number, path) for path in found]
    if listed:
        what = f"lists {len(listed)} more of its {len(conversation.images)} pictures than its texts have places for"
        raise RowFault(what, f"write {MARK} where each stands", _CODE)
    return replace(conversation, turns=tuple(turns), pictures=tuple(_looked(look, *one) for one in paths))


def _in_turn(turn: Turn, listed: list[str], number: int) -> tuple[Turn, list[str]]:
    """The turn with `IMAGE` at each place, and the paths. listed: pictures without a place yet; those found are taken.

    A mark in a message of parts is text: its places are parts.
    """
    own = list(turn.images)
    if not own and listed:
        turn = replace(turn, content=turn.content.replace(MARK, IMAGE), context=turn.context.replace(MARK, IMAGE))
    places = turn.text.count(IMAGE)
    if own and len(own) != places:
        raise RowFault(f"turn {number} holds U+FDD0, which stands for pictures", "remove the character", _CODE)
    if places and turn.role not in ("user", "tool", "system"):
        raise RowFault(
            f"turn {number} is an answer with a picture", "a model that writes text learns no pictures", _CODE
        )
    paths = []
    for path in own or [""] * places:
        if not path and not listed:
            what = f"turn {number} has a place for a picture, and no picture for it is left in 'images'"
            raise RowFault(what, "list a path for each", _CODE)
        paths.append(path or listed.pop(0))
    return turn, paths


def _looked(look: Look, number: int, path: str) -> Picture:
    try:
        return look(path)
    except RowFault as fault:
        raise RowFault(f"turn {number}, picture {path!r}: {fault.what}", fault.fix, _CODE) from None
