"""Where the time of ten real steps went, and what would make it less: every remedy is tried before it is named."""

from __future__ import annotations

import statistics

from surefoot.commands.doctor.codes import BACKWARD, NEAR, WAIT
from surefoot.commands.doctor.findings import Finding, caution, ok
from surefoot.commands.doctor.passes import Observed, gain_of_eager, gain_of_kernel, gain_of_micro, gain_without_workers
from surefoot.commands.doctor.steps import Taken
from surefoot.planning.measurements import AttentionTrial, Measurements
from surefoot.planning.plan import RunPlan, SdpaKernel
from surefoot.runs.trial import Ready

_OWN_PRODUCTS = "matmul"  # the form of packed documents' attention that calls no kernel of torch
_STORING = ("math", "eager")  # forms of attention that keep every score
_FUSED: tuple[SdpaKernel, ...] = ("flash", "mem_efficient", "cudnn")
_WARM_UP = 3  # steps after which nothing new should have to be compiled


def attention_line(one: Ready, seen: Observed, measured: Measurements) -> Finding:
    """Which kernel runs, and whether one that keeps no score would be faster. Storing every score costs memory and
    traffic that grow with the square of the length. What the user asked for has to be clearly the faster one; what the
    plan took must not be clearly the slower one, because it had its reasons."""
    said = ", ".join(sorted(seen.kernels)) or "none"
    if one.plan.attention.implementation.source == "family":
        return ok("ATTN-MATH", f"{said}: no other form computes this model")
    if one.plan.kernels.documents.value == _OWN_PRODUCTS:
        return ok("ATTN-MATH", f"{said}: the measured choice for short documents in packed rows")
    best = _best_fused(measured)
    if not set(_STORING) & set(seen.kernels) or best is None:
        return ok("ATTN-MATH", said)
    asked = "user" in (one.plan.attention.implementation.source, one.plan.attention.kernels.source)
    mine = [trial.seconds for trial in measured.attention if trial.form in seen.kernels and trial.passed]
    if mine and min(mine) * (NEAR if asked else 1) < best.seconds * (1 if asked else NEAR):
        return ok("ATTN-MATH", f"{said}; {best.form} is no faster at these lengths")
    if one.plan.attention.implementation.value == "sdpa":
        gain = gain_of_kernel(one, best.form)  # type: ignore[arg-type]
    else:
        gain = min(mine) / best.seconds if mine else None
    slower = gain is not None and gain < NEAR
    if slower and not asked:  # the plan had the choice: dropout, say, rules the others out
        return ok("ATTN-MATH", f"{said}; {best.form} is no faster in this run")
    value = f"{said} runs and stores every score; {best.form}, which stores none, is right here"
    value += "" if slower else " and faster"
    return caution("ATTN-MATH", value, "set attention: auto", gain=gain)


def _best_fused(measured: Measurements) -> AttentionTrial | None:
    fused = [trial for trial in measured.attention if trial.passed and trial.form in _FUSED]
    return min(fused, key=lambda trial: trial.seconds, default=None)


def backward_line(one: Ready, taken: Taken, measured: Measurements) -> Finding:
    """Where the backward pass is slow, what has cured it for others is tried here, and the best of it is named."""
    watched = [report.profile for report in taken.reports[1:] if report.profile]
    forward = statistics.median(profile.forward_ms for profile in watched)
    backward = statistics.median(profile.backward_ms for profile in watched)
    ratio = backward / forward
    said = f"{ratio:.2f} ({forward:,.1f} ms forward, {backward:,.1f} ms backward for a micro-batch)"
    if ratio <= BACKWARD:
        return ok("BWD-RATIO", said)
    tried = _remedies(one, measured)
    best = max(tried, key=lambda fix: tried[fix], default=None)
    if best is None or tried[best] < NEAR:
        names = f" (tried: {', '.join(tried)})" if tried else ""
        return caution("BWD-RATIO", said, f"`surefoot train --profile 5` names the operators{names}")
    return caution("BWD-RATIO", said, f"set {best}", gain=tried[best])


def _remedies(one: Ready, measured: Measurements) -> dict[str, float]:
    """Keys with their values -> measured time without over time with them."""
    plan, best = one.plan, _best_fused(measured)
    tried: dict[str, float] = {}
    micro = plan.batch.micro.value
    while micro > 1:  # downward for as long as it helps: memory that swaps or thrashes needs more than one halving
        micro //= 2
        gain = gain_of_micro(one, micro)
        if tried and gain < NEAR * max(tried.values()):
            break
        tried[f"batch.micro: {micro}"] = gain
    if best is not None and plan.attention.implementation.value == "sdpa":
        tried["attention: auto"] = gain_of_kernel(one, best.form)  # type: ignore[arg-type]
    if plan.compile.value != "off":
        tried["compile: off"] = gain_of_eager(one)
    return tried


def waiting_line(taken: Taken, workers: int) -> Finding:
    """workers: threads that prepare batches."""
    said = f"{taken.waiting / (taken.waiting + taken.whole):.1%} of a step"
    if taken.waiting <= WAIT * (taken.waiting + taken.whole):
        return ok("DATA-WAIT", said)
    gain = (taken.waiting + taken.whole) / taken.whole
    fix = "data.workers: 1 prepares coming steps meanwhile" if not workers else "put the cache on a faster disk"
    return caution("DATA-WAIT", said, fix, gain=gain)


def workers_line(one: Ready, taken: Taken, workers: int) -> Finding:
    """workers: threads that prepare batches."""
    own = taken.preparing / (taken.preparing + taken.whole)
    if not workers or own > WAIT:
        return ok("WORKERS-USELESS", f"{workers}")
    said = f"{workers}, for batches that take {own:.1%} of a step"
    return caution("WORKERS-USELESS", said, "set data.workers: 0", gain=gain_without_workers(one, workers))


def compile_line(taken: Taken, plan: RunPlan, one: Ready) -> Finding:
    late = taken.compiled[-1] - taken.compiled[_WARM_UP - 1]
    if plan.compile.value == "off" and not late:
        return ok("COMPILE-RECOMPILES", "compile is off")
    said = f"{late} in steps {_WARM_UP + 1} to {len(taken.compiled)}"
    if not late:
        return ok("COMPILE-RECOMPILES", said)
    fix = "set compile: off: lengths differ from step to step"
    return caution("COMPILE-RECOMPILES", said, fix, gain=gain_of_eager(one))
