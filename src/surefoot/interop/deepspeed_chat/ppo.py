"""Step 3: what its flags say together, and the constants that stand in its code."""

from __future__ import annotations

from surefoot.interop.arithmetic import counted, switch
from surefoot.interop.deepspeed_chat import rules
from surefoot.interop.draft import Draft

EMA = 0.992
_CONSTANTS = "kl_ctl 0.1, clip_reward 5, cliprange 0.2, cliprange_value 0.2, gamma 1, lam 0.95"
_GREEDY = (
    "drawn at temperature 1; the original asks for no sampling, and then the model's generation_config.json decides"
)
_LONG = "a longer prompt is left out, as by the original; none is cut"


def set_rollouts(draft: Draft) -> None:
    """Steps of training batch x accumulation answers, out of rollouts of generation batch x generation batches.

    A step of several rollouts is one rollout: no weight moves between them.
    """
    names = (
        "per_device_training_batch_size", "gradient_accumulation_steps", "per_device_generation_batch_size",
        "generation_batches",
    )  # fmt: skip
    for name in names:
        if draft[name] < 1:
            draft.refuse(name, f"expected a number from 1, got {draft[name]}")
            return
    micro, passes, answered, batches = (draft[name] for name in names)
    step, rollout = micro * passes, answered * batches
    count = rules.processes(draft)
    if rollout % step and (step % rollout or draft["ppo_epochs"] > 1):
        what = f"{rollout} answers of a rollout make no whole number of steps of {step}"
        given = next((name for name in reversed(names) if draft.given(name)), names[2])
        draft.refuse(given, what, "give as many answers as steps take, or a multiple")
        return
    several = f"times {count} processes" if count > 1 else ""
    draft.set("batch.size", step * count, *names[:2], why=several)
    draft.set("batch.micro", micro, names[0])
    draft.set("ppo.rollout_batches", max(1, rollout // step), *names[2:])


def set_lengths(draft: Draft) -> None:
    prompt, answer = draft["max_prompt_seq_len"], draft["max_answer_seq_len"]
    for name in ("max_prompt_seq_len", "max_answer_seq_len"):
        if draft[name] < 1:
            draft.refuse(name, f"expected a number from 1, got {draft[name]}")
            return
    draft.set("data.max_length", prompt + answer, "max_prompt_seq_len", "max_answer_seq_len", why="")
    draft.set("ppo.max_new_tokens", answer, "max_answer_seq_len")
    draft.assume(f"prompts above {prompt} tokens", _LONG, "data.max_length")
    draft.assume("do_sample", _GREEDY, "ppo.temperature")
    draft.assume(_CONSTANTS, "fixed there, and surefoot's own defaults", "ppo.kl", "ppo.reward_clip", "ppo.ratio_clip",
                 "ppo.value_clip", "ppo.gamma", "ppo.gae_lambda")  # fmt: skip


def set_actor_adapter(draft: Draft) -> None:
    rules.set_lora(draft, "actor_")
    actor = draft["actor_lora_dim"] > 0
    name = "actor_lora_learning_rate" if actor else "actor_learning_rate"
    draft.set("optim.lr", draft[name], name)
    draft.drop("actor_lora_learning_rate is LoRA's", *(["actor_learning_rate"] if actor else []))
    _set_critic(draft, actor)


def _set_critic(draft: Draft, actor: bool) -> None:
    """Its adapter, which is as the actor's where that is not said otherwise."""
    words = rank, place, rate = "critic_lora_dim", "critic_lora_module_name", "critic_lora_learning_rate"
    key, alone = "ppo.critic_adapter", "only_optimize_lora"
    if draft[rank] < 0:
        draft.refuse(rank, f"expected a number from 0, got {draft[rank]}")
        return
    if draft[rank] == 0:
        draft.drop(f"{rank} is 0: all of the critic trains", *words)
        draft.set("ppo.critic_lr", draft["critic_learning_rate"], "critic_learning_rate")
        if actor:
            draft.set(key, "none", rank, why="all of the critic trains where it has no LoRA, as there")
        return
    draft.set("ppo.critic_lr", draft[rate], rate)
    draft.drop(f"{rate} is LoRA's", "critic_learning_rate")
    if actor and all(draft[f"actor_{word}"] == draft[f"critic_{word}"] for word in ("lora_dim", "lora_module_name")):
        draft.note(rank, "carried", "", key)
        draft.note(place, "carried", "", key)
        return
    if not draft[alone]:
        draft.refuse(rank, rules.ONE_OR_THE_OTHER, f"add --{alone}, or leave out --{rank} to train all weights")
        return
    draft.set(f"{key}.kind", "lora", rank, alone)
    draft.set(f"{key}.rank", draft[rank], rank)
    draft.set(f"{key}.alpha", 1.0, rank)
    draft.set(f"{key}.targets", [draft[place]], place)


def set_models(draft: Draft) -> None:
    shares = ("actor_dropout", "critic_dropout")
    rules.set_dropouts(draft, shares, tuple(f"disable_{name}" for name in shares))
    asked = [name for name in ("actor_gradient_checkpointing", "critic_gradient_checkpointing") if draft.given(name)]
    if asked:
        on = any(draft[name] for name in asked)
        both = "for both models" if len({draft[name] for name in asked}) > 1 or len(asked) == 1 else ""
        draft.set("gradient_checkpointing", switch(on), *asked, why=both)
    rules.set_zero(draft, "actor_zero_stage", "critic_zero_stage")
    draft.set("ppo.ema", EMA if draft["enable_ema"] else None, "enable_ema")


def set_unsupervised(draft: Draft) -> None:
    name, subset = draft["unsupervised_dataset_name"], draft["unsupervised_dataset_config_name"]
    words = ("unsupervised_dataset_name", "unsupervised_dataset_config_name")
    if not name:
        draft.drop("names no unsupervised data", *words, "unsup_coef")
        return
    more = {"subset": subset} if subset else {}
    draft.set("ppo.unsup_data", {"path": name, "format": "text", **more}, *words)
    draft.set("ppo.unsup_coef", draft["unsup_coef"], "unsup_coef")


def set_stop(draft: Draft) -> None:
    """enable_test_mode ends the run after so many steps."""
    if not draft["enable_test_mode"]:
        draft.drop("belongs to enable_test_mode", "test_stop_step")
        draft.drop("asks for nothing", "enable_test_mode")
        rules.set_length(draft)
        return
    if draft["test_stop_step"] < 1:
        what = f"needs a number of steps from 1, and test_stop_step is {draft['test_stop_step']}"
        draft.refuse("enable_test_mode", what, "give --test_stop_step")
        return
    draft.set("duration", counted(draft["test_stop_step"], "step"), "enable_test_mode", "test_stop_step")
    draft.drop("test_stop_step goes before it", "num_train_epochs")


PPO_RULES = (
    rules.set_required("actor_model_name_or_path", "critic_model_name_or_path"),
    rules.set_stage("ppo"),
    set_rollouts,
    set_lengths,
    set_actor_adapter,
    set_models,
    set_unsupervised,
    set_stop,
    *rules.COMMON,
    rules.set_output("actor"),
)
