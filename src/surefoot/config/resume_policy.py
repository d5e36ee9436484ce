"""Which keys of the config may change when a run is resumed, and why.

free: nothing about the training changes. warned: allowed, but the run is no longer the one that would have been.
refused: the checkpoint's state belongs to the old value. A key without a row takes the row of its group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from surefoot.system.locations import TEMPLATE_SUFFIX

Policy = Literal["free", "warned", "refused"]


class Rule(NamedTuple):
    policy: Policy
    why: str


@dataclass(frozen=True)
class Change:
    """A key whose value differs. old, new: plain values as in the saved config."""

    key: str
    old: Any
    new: Any
    policy: Policy
    why: str


_ORDER = "the saved position in the data belongs to the old examples and their order"

POLICIES: dict[str, Rule] = {
    "stage": Rule("refused", "another stage is another training method"),
    "model": Rule("refused", "the trained weights belong to the old base model"),
    "model.path": Rule("free", "the folder may have been moved; what is in it is compared"),
    "model.dropout": Rule("warned", "dropout draws other masks from here on; attention and packing may be others"),
    "model.router_aux_loss_coef": Rule("refused", "the weights so far were moved by the old loss"),
    "tokenizer": Rule("refused", "token ids would mean something else"),
    "adapter": Rule("refused", "the trained weights have the shape and scale of the old adapter"),
    "vision": Rule("refused", "the trained weights are those of the old parts"),
    "data": Rule("refused", _ORDER),
    "data.train.path": Rule("free", "the file may have been moved; its content is compared"),
    "data.template": Rule("refused", "the texts would be laid out otherwise; only a .jinja file may move"),
    "data.eval": Rule(
        "warned", "evaluation losses before and after cannot be compared, so neither can the best checkpoint"
    ),
    "data.packing": Rule("refused", "the numbers would come from other kernels"),
    "data.workers": Rule("free", "batches are the same, whoever prepares them"),
    "precision": Rule("refused", "the numbers would come from other arithmetic"),
    "attention": Rule("refused", "the numbers would come from other kernels"),
    "compile": Rule("refused", "the numbers would come from other kernels"),
    "kernels": Rule("refused", "the numbers would come from other kernels"),
    "gradient_checkpointing": Rule("warned", "recomputed activations may differ in the last bit"),
    "batch.size": Rule("refused", "steps, schedule and data position count batches of the old size"),
    "batch.micro": Rule("warned", "sums are rounded in another order, and dropout draws other masks"),
    "optim": Rule("refused", "the saved moments and the learning-rate curve belong to the old optimizer"),
    "duration": Rule("warned", "from here on the learning rate follows the curve of the new length"),
    "log_every": Rule("free", "only what is written down changes"),
    "eval_every": Rule("free", "evaluation does not touch the training"),
    "eval_at_start": Rule("free", "evaluation does not touch the training"),
    "checkpoint.every": Rule("free", "saving does not touch the training"),
    "checkpoint.keep": Rule("free", "saving does not touch the training"),
    "checkpoint.best": Rule("refused", "the best checkpoint so far was chosen by the old rule"),
    "early_stopping": Rule("warned", "the run may end at another step"),
    "guard": Rule("warned", "the run may stop at another step"),
    "guard.spikes": Rule("warned", "from here on steps may move the weights otherwise"),
    "bos": Rule("refused", "every example would start with other tokens"),
    "bos.scale": Rule("refused", "the weights were trained with the old factor"),
    "adapter.publish": Rule("free", "the checkpoints hold the adapter either way"),
    "reward": Rule("refused", "the scores learned so far belong to the old loss"),
    "alignment": Rule("refused", "the policy so far was moved by the old loss"),
    "ppo": Rule("refused", "the policy and the critic so far were moved under the old constants"),
    "ppo.reward": Rule("free", "the reward model may have been moved; what is in it is compared"),
    "ppo.critic": Rule("free", "only the first step starts from it, and what an adapter lies over is compared"),
    "ppo.critic_adapter": Rule("warned", "a critic that has begun trains what it began with"),
    "ppo.patience": Rule("warned", "the run may stop at another step"),
    "ppo.vllm_url": Rule("free", "the server may have been moved"),
    "grpo": Rule("refused", "the policy so far was moved under the old constants"),
    "grpo.rewards": Rule("free", "a file may have been moved; what scores is compared"),
    "grpo.patience": Rule("warned", "the run may stop at another step"),
    "grpo.mismatch": Rule("warned", "the run may stop at another step"),
    "grpo.mismatch_bound": Rule("warned", "the run may stop at another step"),
    "grpo.eval_answers": Rule("free", "evaluation does not touch the training"),
    "grpo.eval_passes": Rule("free", "evaluation does not touch the training"),
    "grpo.vllm_url": Rule("free", "the server may have been moved"),
    "parallel": Rule("warned", "sums over ranks are rounded in another order: equal, but not bit for bit"),
    "parallel.check_every": Rule("free", "weights are only compared"),
    "parallel.timeout": Rule("free", "waiting changes no number"),
    "samples": Rule("free", "sample answers do not touch the training"),
    "metrics": Rule("warned", "metrics before and after cannot be compared, so neither can the best checkpoint"),
    "functions": Rule("free", "the files may have been moved; the loss, and what became of records, is compared"),
    "functions.metrics": Rule("warned", "metrics before and after cannot be compared"),
    "report_to": Rule("free", "trackers only read"),
    "tracking": Rule("free", "trackers only read"),
    "output": Rule("free", "the run folder may have been moved"),
    "seed": Rule("refused", "data order and every random draw follow from it"),
}


def rule_for(key: str) -> Rule:
    """The rule of a key, or of the nearest group above it. Raises KeyError for a key that no rule covers."""
    name = key
    while name not in POLICIES:
        name, dot, _ = name.rpartition(".")
        if not dot:
            raise KeyError(key)
    return POLICIES[name]


def diff_configs(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """What differs between two configs in plain form (`plain_config`), in the order of the keys."""
    return _diff(old, new, "")


def _diff(old: dict[str, Any], new: dict[str, Any], group: str) -> list[Change]:
    changes: list[Change] = []
    for name in {**old, **new}:
        key = f"{group}.{name}" if group else name
        before, after = old.get(name), new.get(name)
        if key == "data.train" and before != after:
            changes += _diff_sources(before, after)
            continue
        if isinstance(before, dict) and isinstance(after, dict) and key != "data.eval":
            changes += _diff(before, after, key)
        elif before != after:
            special = _SPECIAL.get(key)
            rule = special(before, after) if special else rule_for(key)
            changes.append(Change(key, before, after, *rule))
    return changes


def _diff_sources(before: Any, after: Any) -> list[Change]:
    """Source by source; another number of them is one change."""
    old, new = ([_keys(one) for one in (value if isinstance(value, list) else [value])] for value in (before, after))
    if len(old) != len(new):
        return [Change("data.train", before, after, *rule_for("data.train"))]
    return [
        Change(
            f"data.train[{number}].{name}" if len(old) > 1 else f"data.train.{name}",
            one.get(name),
            other.get(name),
            *rule,
        )
        for number, (one, other) in enumerate(zip(old, new, strict=True))
        for name in one | other
        if one.get(name) != other.get(name) and (rule := rule_for(f"data.train.{name}"))
    ]


def _keys(source: Any) -> dict[str, Any]:
    return source if isinstance(source, dict) else {"path": source}


def _split_rule(before: Any, after: Any) -> Rule:
    """Evaluation sources stand beside the training examples; a share or a count is taken out of them."""
    if not isinstance(before, int | float) and not isinstance(after, int | float):
        return POLICIES["data.eval"]
    return Rule("refused", f"a share or a count is split off the training examples; {_ORDER}")


def _template_rule(before: Any, after: Any) -> Rule:
    """A file's name says nothing about the examples; every other name does."""
    if all(isinstance(name, str) and name.endswith(TEMPLATE_SUFFIX) for name in (before, after)):
        return Rule("free", "the file may have been moved; its content is compared")
    return POLICIES["data.template"]


# What depends on the values.
_SPECIAL: dict[str, Callable[[Any, Any], Rule]] = {"data.eval": _split_rule, "data.template": _template_rule}
