"""Supervised fine-tuning as a task, of answers and of plain texts: which loss, which batches."""

from __future__ import annotations

from surefoot.config.schema import RunConfig
from surefoot.data.batching.loader import all_example_batches, example_batches
from surefoot.data.prepare import PreparedData
from surefoot.methods.examples import task_of_items
from surefoot.methods.losses.sft import sft_loss
from surefoot.methods.method import Task
from surefoot.planning.plan import RunPlan


def sft_task(config: RunConfig, plan: RunPlan, data: PreparedData) -> Task:
    """The data under a plan."""
    return task_of_items(sft_loss, config, plan, data, example_batches, all_example_batches)
