"""Whether norms and rotary positions go through surefoot's own kernels, on a CPU.

They do where they were seen to be right on this machine and clearly faster at the model's width, forward and backward
together, so that the next start of the same run finds the same.
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
_PARTS = "a layer's norms and rotations"


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
        return Choice(FUSED, f"asked for; {_times(model, trials)}" if trials else "asked for", "user")
    if why:
        return Choice(PLAIN, why, "measured" if failed else "default")
    if not trials:
        return Choice(PLAIN, _unmeasured(hardware), "default")
    plain, fused = _layer_seconds(model, trials)
    if plain < _CLEAR * fused:
        return Choice(PLAIN, f"little to gain: {_times(model, trials)}", "measured")
    return Choice(FUSED, _times(model, trials), "measured")


def pointwise_obstacle(config: RunConfig, model: ModelFacts, hardware: Hardware) -> str:
    """Why they cannot run, whatever the probe would say; empty where they can."""
    if hardware.kind != "cpu":
        return "surefoot's own norms and rotations run on a CPU"
    if config.compile != "off":
        return "torch.compile writes kernels of its own for these operators"
    if model.layer_norm:
        return "this family has LayerNorm, which torch computes in one pass already"
    return ""


def _layer_seconds(model: ModelFacts, trials: Sequence[PointwiseTrial]) -> tuple[float, float]:
    """Of one decoder layer, plain and fused: of the norms as many as a layer has."""
    times = {"norm": len(model.norms)}
    return tuple(  # pyright: ignore[reportReturnType]
        sum(times.get(trial.part, 1) * seconds for trial, seconds in zip(trials, column, strict=True))
        for column in ([trial.plain for trial in trials], [trial.fused for trial in trials])
    )


def _times(model: ModelFacts, trials: Sequence[PointwiseTrial]) -> str:
    plain, fused = (1000 * seconds for seconds in _layer_seconds(model, trials))
    return f"milliseconds of {_PARTS}, forward and backward here: plain {plain:.3g}, fused {fused:.3g}"


def _unmeasured(hardware: Hardware) -> str:
    """Of another machine, what would happen there."""
    if not hardware.preset:
        return "nothing was measured"
    return f"there {_PARTS} are timed plain and fused; fused is taken where {_CLEAR:g} x as fast"
