"""Who plays what in PPO, and what it adds to the forecast."""

import dataclasses

import pytest

from helpers.model_layouts import LLAMA31_8B, model_facts, run_config
from helpers.plans import attention_plan, precision_plan
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


OTHER = SMALL | {"num_hidden_layers": 3}


def workload(folder, adapter):
    model = model_facts(folder, SMALL)
    plan = plan_adapter(run_config(adapter=adapter).adapter, model, 0, Notes()) if adapter else None
    trainable = plan.trainable if plan else model.parameters
    return Workload(model, precision_plan(), attention_plan(), plan, trainable, model.parameters, 8 * trainable)


def planned(tmp_path, *, adapter=None, roles=NOBODY, notes=None, **ppo):
    config = run_config(stage="ppo", adapter=adapter, ppo=ppo)
    notes = notes or Notes()
    plan, work = plan_ppo(config, roles, workload(tmp_path, adapter), notes)
    return plan, work


def saved(tmp_path, base: str, adapter: int | None) -> RoleFacts:
    """A reward model over a base of three layers, or the policy's own ("policy")."""
    shape = SMALL if base == "policy" else OTHER
    (tmp_path / base).mkdir(exist_ok=True)
    return RoleFacts("runs/reward", base, model_facts(tmp_path / base, shape), adapter)


def with_model(one: RoleFacts) -> Roles:
    return Roles("policy", one, one)


def values(plan) -> list[str]:
    return [getattr(plan, part).value for part in ("actor", "critic", "reference", "reward")]


def test_with_an_adapter_all_parts_share_one_trunk(tmp_path):
    plan, work = planned(tmp_path, adapter=LORA, reward="score.py:length")
    assert values(plan) == ["adapter", "adapter", "adapter-off", "score.py:length"]
    assert plan.critic_parameters == work.learning == work.trainable
    assert work.beside == work.under == 0


def test_in_full_fine_tuning_each_is_a_model_of_its_own(tmp_path):
    plan, work = planned(tmp_path, reward="score.py:length")
    assert values(plan)[:3] == ["model"] * 3
    head = 64 * 128  # a critic does not use its own
    assert work.learning == work.parameters - head
    assert work.beside == 4 * work.parameters + 4 * head  # the reference, and that head


def test_a_reward_model_plays_on_the_policys_trunk_where_it_has_its_base(tmp_path):
    plan, work = planned(
        tmp_path, adapter=LORA, roles=with_model(saved(tmp_path, "policy", 1000)), reward="runs/reward"
    )
    assert values(plan) == ["adapter", "adapter", "adapter-off", "adapter"]
    assert (work.learning, work.beside, work.under) == (1000, 4000, 0)  # fp32
    assert "runs/reward" in plan.reward.reason


@pytest.mark.parametrize(("adapter", "reward", "beside"), [(None, "adapter-off", 0), (1000, "adapter", 4000)])
def test_critic_and_reward_model_share_the_base_that_they_have(tmp_path, adapter, reward, beside):
    one = saved(tmp_path, "other", adapter)
    plan, work = planned(tmp_path, adapter=LORA, roles=with_model(one), reward="runs/reward")
    assert values(plan) == ["adapter", "adapter", "adapter-off", reward]
    assert work.under == 4 * one.model.parameters
    assert work.beside == beside
    fresh = plan_adapter(run_config(adapter=LORA).adapter, one.model, 0, Notes()).trainable
    assert work.learning == plan.critic_parameters == (fresh if adapter is None else 1000)


def test_twin_a_critic_that_trains_in_full_shares_nothing(tmp_path):
    one = saved(tmp_path, "other", None)
    plan, work = planned(tmp_path, adapter=LORA, roles=with_model(one), reward="runs/reward", critic_adapter="none")
    assert values(plan) == ["adapter", "model", "adapter-off", "model"]
    head = 64 * 128
    assert (work.learning, work.under) == (one.model.parameters - head, 0)
    assert work.beside == 4 * one.model.parameters + 4 * head


def test_a_critic_may_have_an_adapter_of_its_own(tmp_path):
    own = {"kind": "lora", "rank": 2, "targets": ["q_proj", "lm_head"]}
    plan, work = planned(tmp_path, adapter=LORA, reward="score.py:length", critic_adapter=own)
    assert plan.critic.value == "adapter"
    assert plan.critic_adapter.rank == 2
    assert {name.rpartition(".")[2] for name in plan.critic_adapter.targets.value} == {"q_proj"}  # values need no head
    assert work.learning == 2 * 2 * (128 + 128)
    full, alone = planned(tmp_path, reward="score.py:length", critic_adapter=own)
    assert values(full)[:3] == ["model", "adapter", "adapter-off"]  # the reference is the base under the critic
    assert alone.under == 4 * alone.parameters
    assert alone.beside == 0


@pytest.mark.parametrize(
    ("critic_adapter", "adapter", "where"),
    [
        ({"kind": "lora", "rank": 2}, 1000, "ppo.critic_adapter"),
        ("none", 1000, "ppo.critic_adapter"),
        ({"kind": "lora", "rank": 2, "targets": ["c_attn"]}, None, "ppo.critic_adapter.targets"),
    ],
)
def test_what_the_critic_cannot_have_is_refused(tmp_path, critic_adapter, adapter, where):
    notes = Notes()
    one = saved(tmp_path, "other", adapter)
    planned(tmp_path, adapter=LORA, roles=with_model(one), notes=notes, reward="r", critic_adapter=critic_adapter)
    assert [fault.where for fault in notes.faults] == [where]
    fine = Notes()
    planned(tmp_path, adapter=LORA, roles=with_model(one), notes=fine, reward="r")
    assert not fine.faults


def test_the_forecast_has_two_passes_and_what_the_critic_learns_with(tmp_path):
    alone = workload(tmp_path, LORA)
    _, work = planned(tmp_path, adapter=LORA, reward="score.py:length")

    def at(one):
        return forecast(one, examples=2, length=96, supervised=0.5, checkpointing=OFF, available=2**40)

    before, after = at(alone), at(work)
    assert after.activations == 2 * before.activations
    assert after.gradients == 2 * before.gradients
    assert after.weights == before.weights + 4 * work.learning
    under = at(dataclasses.replace(work, under=1000))
    assert under.weights == after.weights + 1000
    assert after.optimizer == before.optimizer + 8 * work.learning
    assert at(dataclasses.replace(work, passes=1, learning=0)).activations == before.activations  # the twin
