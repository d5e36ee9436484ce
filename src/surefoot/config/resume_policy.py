"""Define which config keys may change when a run is resumed, and why.

free: training does not change. warned: allowed, but the run differs from an uninterrupted one. refused: the
checkpoint's state belongs to the old value. A key without a row uses the row of its group.
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
    "stage": Rule("refused", "another stage is a different training method"),
    "model": Rule("refused", "the trained weights belong to the old base model"),
    "model.path": Rule("free", "the folder may have been moved; its content is compared"),
    "model.dropout": Rule("warned", "dropout masks differ from here on; attention and packing may change"),
    "model.router_aux_loss_coef": Rule("refused", "the weights so far were trained with the old loss"),
    "tokenizer": Rule("refused", "token ids would have other meanings"),
    "adapter": Rule("refused", "the trained weights have the shape and scale of the old adapter"),
    "vision": Rule("refused", "the trained weights belong to the old parts"),
    "data": Rule("refused", _ORDER),
    "data.train.path": Rule("free", "the file may have been moved; its content is compared"),
    "data.template": Rule("refused", "the texts would be formatted differently; only a .jinja file may be moved"),
    "data.eval": Rule(
        "warned", "evaluation losses before and after cannot be compared, so neither can the best checkpoint"
    ),
    "data.packing": Rule("refused", "other kernels would change the results"),
    "data.workers": Rule("free", "batches do not depend on the workers"),
    "precision": Rule("refused", "another precision would change the results"),
    "attention": Rule("refused", "other kernels would change the results"),
    "compile": Rule("refused", "other kernels would change the results"),
    "kernels": Rule("refused", "other kernels would change the results"),
    "gradient_checkpointing": Rule("warned", "recomputed activations may differ in the last bit"),
    "batch.size": Rule("refused", "steps, schedule and data position count batches of the old size"),
    "batch.row_tokens": Rule("refused", "steps, schedule and data position count the old rows"),
    "batch.micro": Rule("warned", "sums are rounded in another order, and dropout masks differ"),
    "optim": Rule("refused", "the saved optimizer state and learning-rate schedule belong to the old optimizer"),
    "duration": Rule("warned", "from here on the learning rate follows the schedule of the new length"),
    "log_every": Rule("free", "only logging changes"),
    "eval_every": Rule("free", "evaluation does not affect training"),
    "eval_at_start": Rule("free", "evaluation does not affect training"),
    "checkpoint.every": Rule("free", "saving does not affect training"),
    "checkpoint.keep": Rule("free", "saving does not affect training"),
    "checkpoint.best": Rule("refused", "the best checkpoint so far was selected by the old rule"),
    "early_stopping": Rule("warned", "the run may end at another step"),
    "guard": Rule("warned", "the run may stop at another step"),
    "guard.spikes": Rule("warned", "from here on steps may update the weights differently"),
    "bos": Rule("refused", "every example would start with other tokens"),
    "bos.scale": Rule("refused", "the weights were trained with the old factor"),
    "adapter.publish": Rule("free", "checkpoints always contain the adapter"),
    "adapter.initial": Rule("free", "checkpoints always contain the adapter"),
    "adapter.initial_revision": Rule("free", "checkpoints always contain the adapter"),
    "sft": Rule("refused", "the weights so far were trained with the old loss"),
    "reward": Rule("refused", "the reward model so far was trained with the old loss"),
    "alignment": Rule("refused", "the policy so far was trained with the old loss"),
    "ppo": Rule("refused", "policy and critic so far were trained with the old settings"),
    "ppo.reward": Rule("free", "the reward model may have been moved; its content is compared"),
    "ppo.critic": Rule("free", "it only initializes the critic; the base of an adapter is compared"),
    "ppo.critic_adapter": Rule("warned", "a critic continues to train what it started with"),
    "ppo.patience": Rule("warned", "the run may stop at another step"),
    "ppo.vllm_url": Rule("free", "the server may have been moved"),
    "grpo": Rule("refused", "the policy so far was trained with the old settings"),
    "grpo.rewards": Rule("free", "a file may have been moved; the reward function is compared"),
    "grpo.environment.name": Rule("free", "a file may have been moved; the environment is compared"),
    "grpo.environment.seconds": Rule("warned", "other answers of the environment may be too late"),
    "grpo.patience": Rule("warned", "the run may stop at another step"),
    "grpo.mismatch": Rule("warned", "the run may stop at another step"),
    "grpo.mismatch_bound": Rule("warned", "the run may stop at another step"),
    "grpo.eval_answers": Rule("free", "evaluation does not affect training"),
    "grpo.eval_passes": Rule("free", "evaluation does not affect training"),
    "grpo.vllm_url": Rule("free", "the server may have been moved"),
    "distill": Rule("refused", "the student so far was trained with the old loss"),
    "distill.vllm_url": Rule("free", "the server may have been moved"),
    "distill.teacher": Rule("free", "the teacher may have been moved; its content is compared"),
    "parallel": Rule("warned", "sums over ranks are rounded in another order: equal up to rounding"),
    "parallel.check_every": Rule("free", "weights are only compared"),
    "parallel.timeout": Rule("free", "waiting does not affect results"),
    "samples": Rule("free", "sample answers do not affect training"),
    "metrics": Rule("warned", "metrics before and after cannot be compared, so neither can the best checkpoint"),
    "functions": Rule("free", "the files may have been moved; the loss and the converted records are compared"),
    "functions.metrics": Rule("warned", "metrics before and after cannot be compared"),
    "report_to": Rule("free", "trackers only read"),
    "tracking": Rule("free", "trackers only read"),
    "output": Rule("free", "the run folder may have been moved"),
    "seed": Rule("refused", "data order and every random draw depend on it"),
}


def rule_for(key: str) -> Rule:
    """Return the rule of a key or of the nearest group above it. Raises KeyError if there is none."""
    name = key
    while name not in POLICIES:
        name, dot, _ = name.rpartition(".")
        if not dot:
            raise KeyError(key)
    return POLICIES[name]


def diff_configs(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Return the differences between two plain configs (`plain_config`), in the order of the keys."""
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
    """Compare sources one by one; a different number of sources is one change."""
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
    """Return the rule for data.eval: a fraction or count is taken out of the training examples, a source is not."""
    if not isinstance(before, int | float) and not isinstance(after, int | float):
        return POLICIES["data.eval"]
    return Rule("refused", f"a fraction or count is split off the training examples; {_ORDER}")


def _template_rule(before: Any, after: Any) -> Rule:
    """Return the rule for data.template: a file may be renamed, a template name may not change."""
    if all(isinstance(name, str) and name.endswith(TEMPLATE_SUFFIX) for name in (before, after)):
        return Rule("free", "the file may have been moved; its content is compared")
    return POLICIES["data.template"]


# Keys whose rule depends on the values.
_SPECIAL: dict[str, Callable[[Any, Any], Rule]] = {"data.eval": _split_rule, "data.template": _template_rule}
