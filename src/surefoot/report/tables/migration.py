"""What a migration changed, and its checklist, as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from surefoot.config.dump import shown
from surefoot.planning.migration import Move
from surefoot.report.console import Hanging

_MARKS = {"done": ("[x]", "green"), "open": ("[ ]", ""), "unasked": ("[-]", ""), "failed": ("[!]", "yellow")}


def migration_report(moves: Sequence[Move], checks: Sequence[tuple[str, str, str]]) -> RenderableType:
    """checks: what, state (done | open | unasked | failed), sentence."""
    parts: list[RenderableType] = [Text("changed", "bold")]
    width = max(len(move.key) for move in moves)
    parts += [Hanging(Text(f"  {move.key:<{width}}  "), Text(f"{_change(move)} ({move.why})")) for move in moves]
    parts += [Text(), Text("checklist", "bold")]
    width = max(len(what) for what, _, _ in checks)
    for what, state, said in checks:
        mark, style = _MARKS[state]
        parts.append(Hanging(Text(f"  {mark} {what:<{width}}  ", style), Text(said)))
    return Group(*parts)


def _change(move: Move) -> str:
    if move.new is None:
        return f"{shown(move.old)} goes"
    return shown(move.new) if move.old is None else f"{shown(move.old)} -> {shown(move.new)}"
