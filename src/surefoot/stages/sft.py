"""Supervised fine-tuning as a stage, of answers and of plain texts: which loss, which batches."""

from __future__ import annotations

from surefoot.config.schema import RunConfig
from surefoot.data.loader import all_laid_out, laid_out
from surefoot.data.prepare import PreparedData
from surefoot.objectives.sft import sft_loss
from surefoot.planning.plan import RunPlan
from surefoot.stages.items import stage_of_items
from surefoot.stages.stage import Stage


def sft_stage(config: RunConfig, plan: RunPlan, data: PreparedData) -> Stage:
    """The data under a plan."""
    return stage_of_items(sft_loss, config, plan, data, laid_out, all_laid_out)
