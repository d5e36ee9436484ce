"""Which of surefoot's own kernels a run uses. Whether they compute the same is looked at before step 1."""

from __future__ import annotations

from surefoot.config.schema import KernelsConfig
from surefoot.planning.notes import Notes
from surefoot.planning.plan import AdapterPlan, Choice, KernelsPlan


def plan_kernels(
    request: KernelsConfig, adapter: AdapterPlan | None, *, packed: bool, engine: str, compiled: bool, notes: Notes
) -> KernelsPlan:
    """packed: the base is held in nf4. engine: single, ddp, fsdp2 or deepspeed. compiled: torch.compile is on."""
    obstacle = adapter_obstacle(adapter, packed=packed, engine=engine, compiled=compiled)
    return KernelsPlan(adapter=_choice("adapter", request.adapter, "fast", obstacle, notes))


def adapter_obstacle(adapter: AdapterPlan | None, *, packed: bool, engine: str, compiled: bool) -> str:
    """Why the adapter's own kernels cannot run; empty where they can."""
    if adapter is None:
        return "full fine-tuning has no adapter"
    if packed:
        return "a base in nf4 is unpacked by bitsandbytes' own layers"
    if engine in ("fsdp2", "deepspeed"):
        return f"{engine} hands each module its weights only while PEFT's own forward runs"
    return "torch.compile cannot trace it" if compiled else ""


def _choice(key: str, asked: str, fast: str, obstacle: str, notes: Notes) -> Choice[str]:
    """The plain path where it is asked for or there is an obstacle, else the fast one."""
    if asked == "plain":
        return Choice("plain", "asked for", "user")
    if asked != "auto" and obstacle:
        notes.refuse(f"kernels.{key}", f"{asked} cannot run here: {obstacle}", f"set kernels.{key}: auto")
    if obstacle:
        return Choice("plain", obstacle, "default")
    if asked == "auto":
        return Choice(fast, "the same up to rounding, which is checked before step 1", "default")
    return Choice(asked, "asked for", "user")
