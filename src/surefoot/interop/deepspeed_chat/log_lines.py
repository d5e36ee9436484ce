"""Print the lines that DeepSpeed-Chat's users search a training.log for.

Step 1: `ppl: x, loss: y` of an evaluation. Step 2: mean scores and accuracy on held-out pairs. Step 3: losses and
reward of every step, with the reward's moving average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.interop.deepspeed_chat.rows import Step
from surefoot.interop.tool_log import Lines, ToolLog
from surefoot.interop.translation import Translation

_DECAY = 0.9  # of the reward's moving average, as in DeepSpeed-Chat


def log_lines(step: Step, translation: Translation) -> ToolLog:
    rows: dict[Step, Callable[[Mapping[str, Any]], Lines]] = {"sft": _perplexity, "reward": _scores}
    return ToolLog(row=_rollouts() if step == "ppo" else rows.get(step, lambda row: ()))


def _perplexity(row: Mapping[str, Any]) -> Lines:
    loss = row.get("eval_loss")
    if loss is None:
        return ()
    return [f"ppl: {math.exp(min(loss, 100)):.10g}, loss: {loss:.10g}"]  # DeepSpeed-Chat caps the exponent as well


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
        average[:] = [reward if not average else _DECAY * average[0] + (1 - _DECAY) * reward]
        losses = f"Actor Loss: {actor} | Critic Loss: {critic} | Unsupervised Loss: {row.get('text_loss') or 0.0}"
        epoch = max(0, math.ceil(row["epoch"]) - 1)  # epoch of the step: the row counts epochs completed after it
        place = f"Epoch: {epoch} | Step: {row['current_steps']} | PPO Epoch: {row.get('ppo_epoch', 1)}"
        return [
            f"{place} | {losses}",
            f"Average reward score: {reward} | EMA reward score: {average[0]}",
        ]

    return lines
