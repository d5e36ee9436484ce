"""What a plan says of a reward model: where pairs end, what trains, and whether prompts are computed once."""

import pytest

from helpers import zoo
from helpers.faults import gives
from helpers.model_layouts import run_config
from surefoot.planning import memory
from surefoot.planning.plan import RunPlan, plan_from_json, plan_to_json
from surefoot.report.tables.plan import choice_rows
from surefoot.runs.make_plan import make_plan
from surefoot.system.errors import InputError
from surefoot.system.hardware import preset

LORA = {"kind": "lora", "rank": 4}
DIVERGENCE = {"loss": "divergence"}
CPU = preset("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    return {name: zoo.ZOO[name](folder / name) for name in ("llama3", "opt", "gpt2", "mistral", "qwen2")}


def planned(models, name: str, *, hardware=CPU, **changes) -> RunPlan:
    given = {"stage": "reward", "model": str(models[name]), "adapter": LORA, "data": {"train": "none"}} | changes
    return make_plan(run_config(**given), hardware=hardware, measure=False)


def test_padding_in_front_is_inferred_and_explained(models):
    for name, front in [("opt", 1), ("llama3", 0), ("gpt2", 0), ("mistral", 0), ("qwen2", 0)]:
        reward = planned(models, name, reward=DIVERGENCE).reward
        assert reward is not None
        assert (reward.num_padding_at_beginning.value, reward.surplus) == (front, 0)
        assert gives(reward.num_padding_at_beginning.reason, "EOS") == bool(front)


def test_a_number_that_is_asked_for_is_honoured_or_refused(models):
    right = planned(models, "opt", reward=DIVERGENCE | {"num_padding_at_beginning": 1})
    assert right.cautions == planned(models, "opt", reward=DIVERGENCE).cautions
    more = planned(models, "llama3", reward=DIVERGENCE | {"num_padding_at_beginning": 1})  # DeepSpeed-Chat's default
    assert more.reward is not None
    assert more.reward.surplus == 1
    (caution,) = [one for one in more.cautions if "num_padding" in one]
    assert [gives(caution, one) for one in (1, "auto", 0)] == [True] * 3  # positions behind the end; auto takes none
    for wrong in (DIVERGENCE | {"num_padding_at_beginning": 0}, {"num_padding_at_beginning": 1}):
        with pytest.raises(InputError) as caught:
            planned(models, "opt", reward=wrong)
        (fault,) = caught.value.faults
        assert (fault.where, fault.code) == ("reward.num_padding_at_beginning", "SF-CONFIG-CONFLICT")


def test_the_output_head_does_not_train_and_is_not_to_be_named(models):
    full = planned(models, "llama3", adapter=None)
    assert full.reward is not None
    assert full.reward.frozen == full.parameters - full.trainable > 0
    tied = planned(models, "opt", adapter=None)
    assert tied.reward is not None
    assert (tied.reward.frozen, tied.trainable) == (0, tied.parameters)
    for key, names in {"modules_to_save": ["lm_head"], "targets": ["q_proj", "lm_head"]}.items():
        with pytest.raises(InputError) as caught:
            planned(models, "llama3", adapter=LORA | {key: names})
        assert [fault.where for fault in caught.value.faults] == [f"adapter.{key}"]


def test_a_pair_is_two_rows_and_makes_no_logits(models):
    reward, answers = planned(models, "llama3"), planned(models, "llama3", stage="sft")
    assert (reward.memory.logits, answers.memory.logits > 0) == (0, True)
    assert reward.memory.activations == pytest.approx(2 * answers.memory.activations, rel=0.01)
    assert memory.fits(reward.memory)


def test_rows_stay_whole_with_a_reason(models):
    for name, changes, why in [
        ("mistral", {}, "window"),
        ("gpt2", {"model": {"dropout": "own"}}, "dropout"),
        ("llama3", {"adapter": LORA | {"dropout": 0.1}}, "dropout"),
        ("llama3", {"model": {"dropout": 0.1}}, "dropout"),
        ("llama3", {"bos": {"scale": 0.5}}, "BOS"),
        ("llama3", {"gradient_checkpointing": "on"}, "checkpointing"),
        ("llama3", {"compile": "default"}, "compiled"),
    ]:
        if "model" in changes:
            changes = {"model": {"path": str(models[name]), **changes["model"]}}
        plan = planned(models, name, **changes)
        assert plan.reward is not None
        assert not plan.reward.shared_prompts.value
        assert why in plan.reward.shared_prompts.reason


def test_prompts_are_computed_once_elsewhere_and_on_no_gpu(models):
    for name, changes in (
        ("llama3", {}),
        ("qwen2", {}),
        ("gpt2", {}),
    ):
        plan = planned(models, name, **changes)
        assert plan.reward is not None
        assert plan.reward.shared_prompts.value, plan.reward.shared_prompts.reason
    gpu = planned(models, "llama3", hardware=preset("h100"))
    assert gpu.reward is not None
    assert gpu.reward.shared_prompts.value is False
    assert gives(gpu.reward.shared_prompts.reason, "cuda")


def test_it_stands_in_the_table_and_comes_back_from_json(models):
    plan = planned(models, "opt", reward=DIVERGENCE | {"center": 0.01}, adapter=None)
    said = {row[0]: row[1] for row in choice_rows(plan)}
    assert said["reward.loss"] == "divergence"
    assert said["reward.num_padding_at_beginning"] == "1"
    assert said["reward.center"] == "0.01"
    assert plan_from_json(plan_to_json(plan)) == plan
    assert not any(row[0].startswith("reward") for row in choice_rows(planned(models, "opt", stage="sft")))
