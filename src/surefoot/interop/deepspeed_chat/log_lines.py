"""The lines that DeepSpeed-Chat's users search a training.log for, with the numbers of this run.

Step 1: `ppl: x, loss: y` of an evaluation. Step 2: mean scores and accuracy of the held-out pairs. Step 3: losses and
reward of every step, and the moving average of the reward that it prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.interop.deepspeed_chat.rows import Step
from surefoot.interop.tool_log import Lines, ToolLog
from surefoot.interop.translation import Translation

_KEPT = 0.9  # of the moving average of the reward, as there


def log_lines(step: Step, translation: Translation) -> ToolLog:
    rows: dict[Step, Callable[[Mapping[str, Any]], Lines]] = {"sft": _perplexity, "reward": _scores}
    return ToolLog(row=_rollouts() if step == "ppo" else rows.get(step, lambda row: ()))


def _perplexity(row: Mapping[str, Any]) -> Lines:
    loss = row.get("eval_loss")
    if loss is None:
        return ()
    return [f"ppl: {math.exp(min(loss, 100)):.10g}, loss: {loss:.10g}"]  # exp(100) is as bad as it gets, as there


def _scores(row: Mapping[str, Any]) -> Lines:
    names = ("eval_reward_chosen", "eval_reward_rejected", "eval_reward_accuracy")
    if any(row.get(name) is None for name in names):
        return ()
    chosen, rejected, accuracy = (row[name] for name in names)
    return [
        f"chosen_last_scores (higher is better) : {chosen}, "
        f"rejected_last_scores (lower is better) : {rejected}, acc (higher is better) : {accuracy}"
    ]


def _rollouts() -> Callable[[Mapping[str, Any]], Lines]:
    average: list[float] = []

    def lines(row: Mapping[str, Any]) -> Lines:
        names = ("policy_loss", "value_loss", "reward")
        if any(row.get(name) is None for name in names):
            return ()
        actor, critic, reward = (row[name] for name in names)
        average[:] = [reward if not average else _KEPT * average[0] + (1 - _KEPT) * reward]
        losses = f"Actor Loss: {actor} | Critic Loss: {critic} | Unsupervised Loss: {row.get('text_loss') or 0.0}"
        epoch = max(0, math.ceil(row["epoch"]) - 1)  # that the step belongs to: the row counts what is over after it
        place = f"Epoch: {epoch} | Step: {row['current_steps']} | PPO Epoch: {row.get('ppo_epoch', 1)}"
        return [
            f"{place} | {losses}",
            f"Average reward score: {reward} | EMA reward score: {average[0]}",
        ]

    return lines
