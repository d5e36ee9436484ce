"""Every key has a rule for resumed runs, and changes are found with it."""

from typing import Any

import pytest
from hypothesis import given

from helpers.configs import valid_configs
from surefoot.config import resume_policy
from surefoot.config.dump import plain_config
from surefoot.config.keys import all_keys
from surefoot.config.resume_policy import POLICIES, diff_configs, rule_for
from surefoot.config.schema import RunConfig

BASE = {"stage": "sft", "model": "a/b", "data": {"train": "x.json"}, "output": "runs/x"}
FREE = {
    "model.path",
    "data.train.path",
    "data.workers",
    "output",
    "report_to",
    "tracking.project",
    "tracking.name",
    "tracking.offline",
    "log_every",
    "eval_every",
    "eval_at_start",
    "checkpoint.every",
    "checkpoint.keep",
    "samples.count",
    "samples.max_new_tokens",
    "adapter.publish",
    "adapter.initial",
    "adapter.initial_revision",
    "ppo.reward",
    "ppo.critic",
    "ppo.vllm_url",
    "distill.teacher",
    "grpo.environment.name",
    "distill.vllm_url",
    "grpo.vllm_url",
    "grpo.eval_answers",
    "grpo.eval_passes",
    "parallel.check_every",
    "parallel.timeout",
    "functions.loss",
    "functions.record",
} | {key for key in all_keys() if key.startswith("grpo.rewards.")}
WARNED = {
    "functions.metrics",
    "grpo.environment.seconds",
    "batch.micro",
    "model.dropout",
    "duration",
    "gradient_checkpointing",
    "early_stopping.patience",
    "early_stopping.min_delta",
    "guard.max_consecutive",
    "guard.max_recent",
    "guard.spikes",
    "guard.rollback",
    "metrics.names",
    "metrics.examples",
    "ppo.critic_adapter.kind",
    "ppo.critic_adapter.rank",
    "ppo.critic_adapter.alpha",
    "ppo.critic_adapter.dropout",
    "ppo.critic_adapter.targets",
    "ppo.critic_adapter.rslora",
    "ppo.critic_adapter.experts",
    "ppo.critic_adapter.router",
    "ppo.critic_adapter.modules_to_save",
    "metrics.max_new_tokens",
    "ppo.patience",
    "grpo.patience",
    "grpo.mismatch",
    "grpo.mismatch_bound",
    "parallel.engine",
    "parallel.nproc",
    "parallel.machines",
    "parallel.zero_stage",
    "parallel.offload",
} | {key for key, row in all_keys().items() if key.startswith("data.eval.") and not row.children}


def plain(**changes: Any) -> dict[str, Any]:
    return plain_config(RunConfig.model_validate(BASE | changes))


def changed(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str]]:
    return [(change.key, change.policy) for change in diff_configs(old, new)]


def check_every_key_has_its_rule() -> None:
    leaves = {path for path, key in all_keys().items() if not key.children}
    assert {path for path in leaves if rule_for(path).policy == "free"} == FREE
    assert {path for path in leaves if rule_for(path).policy == "warned"} == WARNED


def test_every_key_has_its_rule() -> None:
    check_every_key_has_its_rule()
    assert set(POLICIES) <= set(all_keys())
    assert all(rule.why for rule in POLICIES.values())


def test_twin_a_lost_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_policy, "POLICIES", {key: POLICIES[key] for key in POLICIES if key != "bos"})
    with pytest.raises(KeyError):
        check_every_key_has_its_rule()


def test_changes_by_key() -> None:
    new = plain(seed=1, output="b", batch={"size": 16, "micro": 2}, optim={"lr": 1e-5})
    assert changed(plain(), new) == [
        ("batch.micro", "warned"),
        ("optim.lr", "refused"),
        ("output", "free"),
        ("seed", "refused"),
    ]
    change = diff_configs(plain(), plain(duration="2 epochs"))[0]
    assert (change.old, change.new, change.policy) == ("3 epochs", "2 epochs", "warned")


def test_groups_that_come_and_go() -> None:
    assert changed(plain(), plain(adapter={"kind": "lora"})) == [("adapter", "refused")]
    assert changed(plain(early_stopping={}), plain()) == [("early_stopping", "warned")]


@pytest.mark.parametrize(
    ("old", "new", "policy"),
    [
        ("none", "a.json", "warned"),
        ("a.json", "b.json", "warned"),
        ("none", 0.1, "refused"),
        (0.1, "none", "refused"),
        (100, 50, "refused"),
    ],
)
def test_an_evaluation_split_changes_the_training_examples(old: Any, new: Any, policy: str) -> None:
    before = plain(data={"train": "x.json", "eval": old})
    assert changed(before, plain(data={"train": "x.json", "eval": new})) == [("data.eval", policy)]


@pytest.mark.parametrize(
    ("old", "new", "policy"),
    [
        ("a.jinja", "b/a.jinja", "free"),
        ("a.jinja", "chatml", "refused"),
        ("auto", "a.jinja", "refused"),
        ("vicuna", "chatml", "refused"),
    ],
)
def test_a_template_file_may_move(old: str, new: str, policy: str) -> None:
    before = plain(data={"train": "x.json", "template": old})
    assert changed(before, plain(data={"train": "x.json", "template": new})) == [("data.template", policy)]


@given(valid_configs())
def test_equal_configs_do_not_differ(data: dict[str, Any]) -> None:
    config = plain_config(RunConfig.model_validate(data))
    assert diff_configs(config, config) == []
