"""Who takes part in `benchmarks/peers.py`, by league and device.

    defaults  what a new user gets: each side's own settings, examples in random order
    tuned     the peers at their best here: no checkpointing, examples of a step grouped by length, two sizes of
              micro-batches, and bf16 autocast over a base in fp32 or in bf16; the fastest of these is the peer that
              counts
    equal     every example has the same length and all its tokens are learned: no padding to save, no head to skip

On a GPU the tuned and equal leagues also have Liger's kernels, where liger-kernel is installed beside HF or in an
environment of its own; FlashAttention over rows without padding, where flash-attn is; `torch.compile`, where all
examples have one length; and Unsloth, which has an environment of its own. Micro-batches are as large there as a model
of that size has room for; one that does not fit is told as a side that broke off.

LLaMA-Factory chooses the type of the weights itself: bf16 under an adapter, fp32 where they train. bf16 weights that
train are left out everywhere: they lose small updates, which is another method.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from bases import SIZES
from peer_world import PLAIN, is_fixed

OWN = "surefoot"
Kinds = dict[str, dict[str, Any]]  # settings by what a side's name says of them
_MICRO = (8, 4)  # 8 first: it is faster where nothing is padded
# Tokens of a micro-batch of the longest examples, on a GPU of 140 GB without checkpointing. For a token of 8 B
# parameters eager PEFT keeps some 8.5 MiB, and 1.8 MB of logits. A side that keeps no logits and fewer activations is
# tried with twice as many tokens too, which may not fit.
_GPU_TOKENS = {"8b": (8192,), "1b": (16_384,)}
_LEAN_TOKENS = {"8b": (16_384, 8192), "1b": (32_768, 16_384)}
_OTHER_TOKENS = (65_536,)


@dataclass(frozen=True)
class Side:
    """name: as printed. arm: of peer_arms.py. python: its interpreter. settings: what the arm is asked."""

    name: str
    arm: str
    python: str
    settings: dict[str, Any]


REFERENCE = Side("plain fp32", "ours", sys.executable, {"overrides": list(PLAIN)})
# Of a large model: one example at a time, whose activations are computed twice; the numbers are the same.
_LARGE = ("gradient_checkpointing=on", "batch.micro=1")


def reference_of(size: str) -> Side:
    return replace(REFERENCE, settings={"overrides": [*PLAIN, *_LARGE]}) if SIZES[size].large else REFERENCE


@cache
def has(python: str, package: str) -> bool:
    """Whether that interpreter finds a package. Nothing of it is imported."""
    looks = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", looks], capture_output=True).returncode == 0


@dataclass(frozen=True)
class _Call:
    """asked: of the program. longest: tokens of the longest example. has: (interpreter, package) -> whether it is
    there. say: is told who is left out."""

    asked: Namespace
    longest: int
    has: Callable[[str, str], bool]
    say: Callable[[str], object]

    @property
    def on_gpu(self) -> bool:
        return self.asked.device == "cuda"

    @property
    def untuned(self) -> bool:
        return self.asked.league == "defaults"


def sides(
    asked: Namespace,
    longest: int,
    *,
    has: Callable[[str, str], bool] = has,
    say: Callable[[str], object] = print,
) -> list[Side]:
    """Those whose name contains one of the words of `asked.sides`; surefoot always. The rest as in `_Call`."""
    call = _Call(asked, longest, has, say)
    found = [*_trainer(call), *_liger(call), *_unsloth(call), *_trl(call), *_llamafactory(call)]
    found += [*_compiled(call), *_flattened(call, found)]
    if asked.sides:
        found = [side for side in found if any(word.lower() in side.name.lower() for word in asked.sides)]
    own = {"overrides": [] if asked.micro is None else [f"batch.micro={asked.micro}"], "from_python": asked.from_python}
    return [Side(OWN, "ours", sys.executable, own), *found]


def _micros(call: _Call, *, lean: bool = False) -> list[int]:
    """Examples of a micro-batch, of which a step has a whole number. lean: of a side that keeps little."""
    asked = call.asked
    if asked.micro is not None:
        return [asked.micro]
    if not call.on_gpu:
        return [micro for micro in _MICRO if micro <= asked.batch]
    tokens = (_LEAN_TOKENS if lean else _GPU_TOKENS).get(asked.size, _OTHER_TOKENS)
    return sorted({_whole(asked.batch, limit // call.longest) for limit in tokens}, reverse=True)


def _whole(batch: int, most: int) -> int:
    """The largest part of a step that goes into it without a rest."""
    return max(micro for micro in range(1, batch + 1) if batch % micro == 0 and micro <= max(1, most))


def _tuned(call: _Call, *, lean: bool = False, **own: Any) -> Kinds:
    asked = call.asked
    weights = ("fp32",) if asked.adapter == "full" else ("bf16",) if SIZES[asked.size].large else ("fp32", "bf16")
    return {
        f"{'bf16 weights' if held == 'bf16' else 'autocast'}, micro {micro}": {
            "checkpointing": False,
            "grouped": True,
            "weights": held,
            "autocast": True,
            "micro": micro,
            **own,
        }
        for held in weights
        for micro in _micros(call, lean=lean)
    }


def _untuned(call: _Call, **own: Any) -> Kinds:
    micro = call.asked.micro or min(8, call.asked.batch)
    return {"defaults": {"grouped": False, "weights": "fp32", "micro": micro, **own}}


def _own_weights(call: _Call, *, lean: bool = False) -> Kinds:
    """Of a side that chooses the type of the weights itself."""
    if call.untuned:  # as its own examples have it: bf16, and checkpointing, which is on unless forbidden
        return _untuned(call, autocast=True, checkpointing=True)
    return {
        f"micro {micro}": {"checkpointing": False, "grouped": True, "autocast": True, "micro": micro}
        for micro in _micros(call, lean=lean)
    }


def _named(name: str, arm: str, python: str, kinds: Kinds) -> list[Side]:
    return [Side(f"{name}, {kind}", arm, python, settings) for kind, settings in kinds.items()]


def _trainer(call: _Call) -> list[Side]:
    if call.untuned:
        kinds = _untuned(call, autocast=False, checkpointing=False)
    else:
        kinds = _tuned(call)
    return _named("HF + PEFT", "trainer", sys.executable, kinds)


def _liger(call: _Call) -> list[Side]:
    if not call.on_gpu or call.untuned:
        return []
    python = call.asked.liger or sys.executable
    if not call.has(python, "liger_kernel"):
        call.say(f"HF + Liger is left out: {python} has no liger-kernel; install it there, or name one with --liger")
        return []
    return _named("HF + Liger", "trainer", python, _tuned(call, lean=True, liger=True))


def _compiled(call: _Call) -> list[Side]:
    """Where all examples have one length, as each other one would be compiled anew, and the model is not so large that
    its products hide the rest: for 8 B parameters it was published as slower than without."""
    if not call.on_gpu or not is_fixed(call.asked) or call.asked.size == "8b":
        return []
    return _named("HF + PEFT compiled", "trainer", sys.executable, _with(_tuned(call), compiled=True))


def _flattened(call: _Call, others: list[Side]) -> list[Side]:
    """Those of the others that HF's Trainer runs, on rows without padding, for which it needs flash-attn."""
    if not call.on_gpu or call.untuned:
        return []
    found = []
    for python in dict.fromkeys(side.python for side in others if side.arm == "trainer"):
        if not call.has(python, "flash_attn"):
            call.say(f"HF with FlashAttention is left out: {python} has no flash-attn")
            continue
        found += [
            Side(
                side.name.replace(",", " + FlashAttention,", 1), side.arm, python, {**side.settings, "flattened": True}
            )
            for side in others
            if side.arm == "trainer" and side.python == python
        ]
    return found


def _with(kinds: Kinds, **own: Any) -> Kinds:
    return {kind: {**settings, **own} for kind, settings in kinds.items()}


def _unsloth(call: _Call) -> list[Side]:
    if not call.on_gpu:
        return []
    python = call.asked.unsloth or sys.executable
    if not call.has(python, "unsloth"):
        call.say(f"Unsloth is left out: {python} has no unsloth; name an interpreter that has it with --unsloth")
        return []
    if call.asked.adapter == "full":
        call.say("Unsloth is left out: its kernels are for adapters")
        return []
    return _named("Unsloth", "unsloth", python, _own_weights(call, lean=True))


def _trl(call: _Call) -> list[Side]:
    if not call.asked.trl:
        return []
    kinds = _untuned(call, autocast=True, checkpointing=True) if call.untuned else _tuned(call)
    return _named("TRL", "trl", call.asked.trl, kinds)


def _llamafactory(call: _Call) -> list[Side]:
    if not call.asked.llamafactory:
        return []
    return _named("LLaMA-Factory", "llamafactory", call.asked.llamafactory, _own_weights(call))
