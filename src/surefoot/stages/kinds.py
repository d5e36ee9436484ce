"""The stages by the name that the config gives them."""

from __future__ import annotations

from surefoot.stages.sft import prepare_sft, sft_stage
from surefoot.stages.stage import StageKind

KINDS: dict[str, StageKind] = {
    "pretrain": StageKind(prepare_sft, sft_stage),
    "sft": StageKind(prepare_sft, sft_stage),
}
