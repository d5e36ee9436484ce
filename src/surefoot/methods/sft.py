"""Supervised fine-tuning and pretraining as a task: loss and batches."""

from __future__ import annotations

from surefoot.config.schema import RunConfig
from surefoot.data.batching.loader import all_example_batches, example_batches
from surefoot.data.prepare import PreparedData
from surefoot.methods.examples import task_of_items
from surefoot.methods.losses.sft import sft_loss
from surefoot.methods.method import Task
from surefoot.planning.plan import RunPlan


def sft_task(config: RunConfig, plan: RunPlan, data: PreparedData) -> Task:
    """Make the task of the data under a plan."""
    return task_of_items(sft_loss, config, plan, data, example_batches, all_example_batches)
