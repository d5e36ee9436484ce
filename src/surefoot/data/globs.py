"""Which paths a pattern of a data set's README means, in time that no pattern makes grow by the power.

A regular expression would try all ways of sharing a path among the stars. Here the places of the path that the pattern
has reached so far are one set, so each piece of a pattern costs at most the length of the path.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from surefoot.system.errors import Fault, InputError

MOST_WORK = 10**9  # characters of all patterns times characters of all paths: minutes at the very worst
_PIECE = re.compile(r"\*\*/|\*\*|\*|\?|[^*?]+")


def matching(name: str, globs: Iterable[str], paths: Collection[str]) -> list[str]:
    """The paths that one of the patterns means, in their order. `**/` is any number of folders, `*` and `?` any text
    and any character within one name. name: of the repository. Raises InputError where there are too many of both."""
    exact, wild = set[str](), list[list[str]]()
    for glob in dict.fromkeys(one.removeprefix("./") for one in globs):
        if "*" in glob or "?" in glob:
            wild.append(_PIECE.findall(glob))
        else:
            exact.add(glob)
    work = sum(len(piece) for pieces in wild for piece in pieces) * sum(map(len, paths))
    if work > MOST_WORK:
        what = f"its README names {len(wild):,} patterns for {len(paths):,} files, which takes too long"
        raise InputError(Fault(name, what, "name the files another way", code="SF-DATA-HUB"))
    return [path for path in paths if path in exact or any(matches(pieces, path) for pieces in wild)]


def matches(pieces: Iterable[str], path: str) -> bool:
    """Whether the whole path fits the pieces of one pattern."""
    reached = {0}
    for piece in pieces:
        reached = _reach(piece, path, reached)
        if not reached:
            return False
    return len(path) in reached


def _reach(piece: str, path: str, reached: set[int]) -> set[int]:
    """The places of the path behind the piece, from those before it."""
    if piece == "*":
        ends = set[int]()
        for place in reached:
            if place not in ends:  # else its name's rest is there already
                end = path.find("/", place)
                ends.update(range(place, (len(path) if end < 0 else end) + 1))
        return ends
    if piece == "**":
        return set(range(min(reached), len(path) + 1))
    if piece == "**/":
        return reached | {place + 1 for place in range(min(reached), len(path)) if path[place] == "/"}
    if piece == "?":
        return {place + 1 for place in reached if path[place : place + 1] not in ("", "/")}
    return {place + len(piece) for place in reached if path.startswith(piece, place)}
