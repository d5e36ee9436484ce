"""Learning rates of parts of the weights (`optim.rates`) in other tools: LoRA+, which gives B another rate than A."""

from __future__ import annotations

from typing import Any

from surefoot.config.schema import OptimConfig
from surefoot.interop.backward import Ours
from surefoot.interop.draft import Draft

LORA_B = "lora_B|lora_magnitude"  # the tools treat every vector as B; an adapter's are DoRA's magnitudes


def rate_of(draft: Draft) -> float:
    """Return the rate of all other weights. Runs after optim.lr is set."""
    return draft.written("optim.lr") or OptimConfig().lr


def set_loraplus(ratio: str, *beside: str) -> Any:
    """Return a rule for LoRA+. ratio: the setting with B's rate as a multiple of A's. beside: settings of embeddings
    with LoRA, which surefoot does not have."""

    def rule(draft: Draft) -> None:
        draft.drop("is for LoRA on embeddings", *beside)
        if draft[ratio] and not draft.written("adapter.kind"):
            draft.refuse(ratio, "is for LoRA", "leave it out")
        elif draft[ratio]:
            vectors = "vectors of modules that train in full have it too there"
            why = vectors if draft.written("adapter.modules_to_save") else ""
            draft.set("optim.rates", [{"of": LORA_B, "lr": rounded(rate_of(draft) * draft[ratio])}], ratio, why=why)

    return rule


def ratio_back(ours: Ours) -> float | None:
    """Return LoRA+'s ratio of a surefoot config; None without."""
    rates = ours["optim.rates"]
    return rounded(rates[0]["lr"] / ours["optim.lr"]) if [one["of"] for one in rates] == [LORA_B] else None


def rounded(number: float) -> float:
    """Return a computed number without its last bits, which would fill a config."""
    return float(f"{number:.12g}")
