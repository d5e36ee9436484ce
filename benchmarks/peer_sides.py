"""Who takes part in `benchmarks/peers.py`, by league.

    defaults  what a new user gets: each side's own settings, examples in random order
    tuned     the peers at their best here: no checkpointing, examples of a step grouped by length, micro-batches of 4
              or of 8, and bf16 autocast over a base in fp32 or in bf16; the fastest of these is the peer that counts
    equal     every example has the same length and all its tokens are learned: no padding to save, no head to skip

LLaMA-Factory chooses the type of the weights itself: bf16 under an adapter, fp32 where they train. bf16 weights that
train are left out everywhere: they lose small updates, which is another method.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from peer_world import PLAIN

OWN = "surefoot"
_MICRO = (8, 4)  # 8 first: it is faster where nothing is padded


@dataclass(frozen=True)
class Side:
    """name: as printed. arm: of peer_arms.py. python: its interpreter. settings: what the arm is asked."""

    name: str
    arm: str
    python: str
    settings: dict[str, Any]


REFERENCE = Side("plain fp32", "ours", sys.executable, {"overrides": PLAIN})


def sides(asked: Namespace) -> list[Side]:
    """Those whose name contains one of the words of `asked.sides`; surefoot always."""
    found = [*_trainer(asked), *_trl(asked), *_llamafactory(asked)]
    if asked.sides:
        found = [side for side in found if any(word.lower() in side.name.lower() for word in asked.sides)]
    return [Side(OWN, "ours", sys.executable, {"overrides": []}), *found]


def _tuned(asked: Namespace) -> dict[str, dict[str, Any]]:
    """Settings by what a side's name says of them."""
    weights = ("fp32",) if asked.adapter == "full" else ("fp32", "bf16")
    return {
        f"{'bf16 weights' if held == 'bf16' else 'autocast'}, micro {micro}": {
            "checkpointing": False,
            "grouped": True,
            "weights": held,
            "autocast": True,
            "micro": micro,
        }
        for held in weights
        for micro in _MICRO
        if micro <= asked.batch
    }


def _untuned(asked: Namespace, **own: Any) -> dict[str, dict[str, Any]]:
    return {"defaults": {"grouped": False, "weights": "fp32", "micro": min(8, asked.batch), **own}}


def _trainer(asked: Namespace) -> list[Side]:
    plain = asked.league == "defaults"
    kinds = _untuned(asked, autocast=False, checkpointing=False) if plain else _tuned(asked)
    return [Side(f"HF + PEFT, {name}", "trainer", sys.executable, kind) for name, kind in kinds.items()]


def _trl(asked: Namespace) -> list[Side]:
    if not asked.trl:
        return []
    plain = asked.league == "defaults"
    kinds = _untuned(asked, autocast=True, checkpointing=True) if plain else _tuned(asked)
    return [Side(f"TRL, {name}", "trl", asked.trl, kind) for name, kind in kinds.items()]


def _llamafactory(asked: Namespace) -> list[Side]:
    if not asked.llamafactory:
        return []
    if asked.league == "defaults":  # as its own examples have it: bf16, and checkpointing, which is on unless forbidden
        kinds = _untuned(asked, autocast=True, checkpointing=True)
    else:
        kinds = {
            f"micro {micro}": {"checkpointing": False, "grouped": True, "autocast": True, "micro": micro}
            for micro in _MICRO
            if micro <= asked.batch
        }
    return [Side(f"LLaMA-Factory, {name}", "llamafactory", asked.llamafactory, kind) for name, kind in kinds.items()]
