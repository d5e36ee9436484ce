"""Whether norms, rotary positions and, on a GPU, gated activations go through surefoot's own kernels.

They do where they were seen to be right on this machine and clearly faster at the model's width, forward and backward
together, so that the next start of the same run finds the same. On a CPU they go by blocks of rows, on a GPU by Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.fast_paths import CUTTING
from surefoot.planning.measurements import PointwiseTrial
from surefoot.planning.notes import Notes
from surefoot.planning.plan import PLAIN, Choice
from surefoot.system.hardware import Hardware

FUSED = "fused"
_CLEAR = 1.2  # how many times as fast
_SILU = ("silu", "swish")  # as config.json calls it


def plan_pointwise(
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    *,
    engine: str,
    trials: Sequence[PointwiseTrial],
    notes: Notes,
) -> Choice[str]:
    """plain or fused. engine: single, ddp, fsdp2 or deepspeed. trials: empty where nobody measured."""
    asked = config.kernels.pointwise
    if asked == PLAIN:
        return Choice(PLAIN, "asked for", "user")
    why = pointwise_obstacle(config, model, hardware)
    if engine in CUTTING:
        why = f"{engine} hands each module its weights only while the module's own forward runs"
    failed = "; ".join(f"{trial.part}: {trial.failure}" for trial in trials if trial.failure)
    if failed and not why:
        why = f"not right on this machine ({failed})"
    if asked == FUSED:
        if why:
            notes.refuse("kernels.pointwise", f"fused cannot run here: {why}", "set kernels.pointwise: auto")
        return Choice(FUSED, f"asked for; {_times(model, hardware, trials)}" if trials else "asked for", "user")
    if why:
        return Choice(PLAIN, why, "measured" if failed else "default")
    if not trials:
        return Choice(PLAIN, _unmeasured(model, hardware), "default")
    plain, fused = _layer_seconds(model, trials)
    if plain < _CLEAR * fused:
        return Choice(PLAIN, f"little to gain: {_times(model, hardware, trials)}", "measured")
    return Choice(FUSED, _times(model, hardware, trials), "measured")


def pointwise_obstacle(config: RunConfig, model: ModelFacts, hardware: Hardware) -> str:
    """Why they cannot run, whatever the probe would say; empty where they can."""
    if hardware.kind == "mps":
        return "there are kernels for CPUs and for GPUs that Triton knows"
    if hardware.kind == "cuda" and hardware.triton is False:
        return "on a GPU they need Triton, which is not installed (pip install triton)"
    if config.compile != "off":
        return "torch.compile writes kernels of its own for these operators"
    if model.layer_norm:
        return "this family has LayerNorm, which torch computes in one pass already"
    return ""


def gate_width(model: ModelFacts, kind: str) -> int | None:
    """Of the gated activations that go through our kernels, None where there are none: on a CPU the plain ones are as
    fast. kind: of device."""
    return model.intermediate if kind == "cuda" and model.gated and model.activation in _SILU else None


def _layer_seconds(model: ModelFacts, trials: Sequence[PointwiseTrial]) -> tuple[float, float]:
    """Of one decoder layer, plain and fused: of the norms as many as a layer has."""
    times = {"norm": len(model.norms)}
    return tuple(  # pyright: ignore[reportReturnType]
        sum(times.get(trial.part, 1) * seconds for trial, seconds in zip(trials, column, strict=True))
        for column in ([trial.plain for trial in trials], [trial.fused for trial in trials])
    )


def _times(model: ModelFacts, hardware: Hardware, trials: Sequence[PointwiseTrial]) -> str:
    plain, fused = (1000 * seconds for seconds in _layer_seconds(model, trials))
    found = f"milliseconds of {_parts(model, hardware)}, forward and backward here: plain {plain:.3g}"
    return f"{found}, fused {fused:.3g}{' by Triton' if hardware.kind == 'cuda' else ''}"


def _unmeasured(model: ModelFacts, hardware: Hardware) -> str:
    """Of another machine, what would happen there."""
    if not hardware.preset:
        return "nothing was measured"
    how = " by Triton" if hardware.kind == "cuda" else ""
    return f"there {_parts(model, hardware)} are timed plain and fused{how}; fused is taken where {_CLEAR:g} x as fast"


def _parts(model: ModelFacts, hardware: Hardware) -> str:
    gates = gate_width(model, hardware.kind) is not None
    return "a layer's norms, turns and gate" if gates else "a layer's norms and turns"
