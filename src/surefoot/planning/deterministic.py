"""Choose whether attention gives the same gradients each time.

On a CPU it always does. On a GPU torch's fused kernels can, by a form of their backward pass that is measured beside
the usual one. Flash's costs nothing where a micro-batch has as many rows times heads as the GPU has multiprocessors,
and up to half where it has few; the memory-efficient kernel's up to twice as much again (decision 0039). cuDNN's has no
such form.
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.planning.measurements import AttentionTrial, times_of
from surefoot.planning.notes import Notes
from surefoot.planning.plan import NONE, Choice
from surefoot.system.hardware import ATTENTION_PACKAGES, Hardware

_SUFFIX = " deterministic"  # of the form's name in a trial
_ALWAYS = ("eager", "math")  # products and a softmax
_MAY = ("flash", "mem_efficient", "varlen", *ATTENTION_PACKAGES)
_COSTS = 1.1  # times as long, at most, for `auto`
_KEY = "attention.deterministic"


def with_deterministic(forms: Sequence[str]) -> list[str]:
    """Return the forms of attention to measure on a GPU, with the deterministic ones."""
    return [name for form in forms for name in ((form, form + _SUFFIX) if form in _MAY else (form,))]


def kernel_of(form: str) -> str:
    """Return a form's kernel: the form itself unless it is a deterministic one."""
    return form.removesuffix(_SUFFIX)


def plan_deterministic(
    request: str, kernel: str, hardware: Hardware, trials: Sequence[AttentionTrial], compiled: bool, notes: Notes
) -> Choice[bool]:
    """Choose whether attention gives the same gradients each time.

    request: auto | on | off.
    kernel: that of the run: of SDPA, of packed rows, or an implementation outside of SDPA.
    trials: of the kernel and of its deterministic form; empty if not measured.
    compiled: whether the decoder is compiled.
    """
    if hardware.kind == "cpu":
        return Choice(True, "a CPU's kernels always do", "hardware")
    if kernel == NONE:
        return Choice(True, "there is no attention", "family")
    if kernel in _ALWAYS:
        return Choice(True, f"{kernel} attention always does", "default")
    if request == "off":
        return Choice(False, "asked for", "user")
    plain, ordered = (next((one for one in trials if one.form == name), None) for name in (kernel, kernel + _SUFFIX))
    if why := _obstacle(kernel, hardware, ordered, compiled):
        if request == "on":
            notes.refuse(_KEY, f"is on, but {why}", "leave it out, or set attention: eager")
        return Choice(False, why, "hardware")
    timed = [one for one in (plain, ordered) if one is not None and one.passed]
    if request == "on":
        return Choice(True, f"asked for; milliseconds {times_of(timed)}" if timed else "asked for", "user")
    if plain is None or ordered is None or len(timed) < 2:
        return Choice(False, f"what it costs was not measured; set {_KEY}: on for it", "default")
    times = f"milliseconds {times_of(timed)}"
    if ordered.seconds <= _COSTS * plain.seconds:
        return Choice(True, f"it costs little: {times}", "measured")
    return Choice(False, f"it would cost more than {_COSTS:g} times as much: {times}; {_KEY}: on for it", "measured")


def _obstacle(kernel: str, hardware: Hardware, ordered: AttentionTrial | None, compiled: bool) -> str:
    if hardware.kind != "cuda":
        return f"whether kernels of {hardware.kind} do is not known"
    if kernel not in _MAY:
        return f"{kernel} has no such form here"
    if compiled:
        return "compiled code cannot switch it on for attention alone"
    return f"{kernel} {ordered.failure}" if ordered is not None and ordered.failure else ""
