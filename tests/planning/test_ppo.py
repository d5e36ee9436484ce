"""Who plays what in PPO, and what it adds to the forecast."""

from __future__ import annotations

import dataclasses

import pytest

from layouts import LLAMA31_8B, model_facts, run_config
from plans import attention_plan, precision_plan
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.memory import forecast
from surefoot.planning.notes import Notes
from surefoot.planning.plan import Choice
from surefoot.planning.ppo import RoleFacts, Roles, plan_ppo
from surefoot.planning.workload import Workload

OFF = Choice(False, "", "default")
NOBODY = Roles()
LORA = {"kind": "lora", "rank": 4}


SMALL = LLAMA31_8B | {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 64}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def workload(folder, adapter):
    model = model_facts(folder, SMALL)
    plan = plan_adapter(run_config(adapter=adapter).adapter, model, 0, Notes()) if adapter else None
    trainable = plan.trainable if plan else model.parameters
    return Workload(model, precision_plan(), attention_plan(), plan, trainable, model.parameters, 8 * trainable)


def planned(tmp_path, *, adapter=None, roles=NOBODY, **ppo):
    config = run_config(stage="ppo", adapter=adapter, ppo=ppo)
    return plan_ppo(config, roles, workload(tmp_path, adapter))


def test_with_an_adapter_all_parts_share_one_trunk(tmp_path):
    plan, work = planned(tmp_path, adapter=LORA, reward="score.py:length")
    values = [getattr(plan, part).value for part in ("actor", "critic", "reference", "reward")]
    assert values == ["adapter", "adapter", "adapter-off", "score.py:length"]
    assert plan.critic_parameters == work.learning == work.trainable
    assert work.beside == 0


def test_in_full_fine_tuning_each_is_a_model_of_its_own(tmp_path):
    plan, work = planned(tmp_path, reward="score.py:length")
    assert [getattr(plan, part).value for part in ("actor", "critic", "reference")] == ["model"] * 3
    assert work.learning == work.parameters
    assert work.beside == 4 * work.parameters  # the reference


@pytest.mark.parametrize(("on_trunk", "critic", "reward"), [(True, "adapter", "adapter"), (False, "model", "model")])
def test_a_reward_model_plays_on_the_trunk_where_it_can(tmp_path, on_trunk, critic, reward):
    facts = RoleFacts("runs/reward", on_trunk, 1000)
    plan, work = planned(tmp_path, adapter=LORA, roles=Roles(facts, facts), reward="runs/reward")
    assert (plan.critic.value, plan.reward.value) == (critic, reward)
    assert work.learning == 1000
    assert work.beside == 4000  # fp32 either way here
    assert "runs/reward" in plan.reward.reason


def test_the_forecast_has_two_passes_and_what_the_critic_learns_with(tmp_path):
    alone = workload(tmp_path, LORA)
    _, work = planned(tmp_path, adapter=LORA, reward="score.py:length")

    def at(one):
        return forecast(one, examples=2, length=96, supervised=0.5, checkpointing=OFF, available=2**40)

    before, after = at(alone), at(work)
    assert after.activations == 2 * before.activations
    assert after.gradients == 2 * before.gradients
    assert after.weights == before.weights + 4 * work.learning
    assert after.optimizer == before.optimizer + 8 * work.learning
    assert at(dataclasses.replace(work, passes=1, learning=0)).activations == before.activations  # the twin
