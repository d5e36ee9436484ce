"""Rules for DeepSpeed-Chat flags that have to be translated together, in its three steps.

Constants in the original's code are written out as assumptions where surefoot's default differs: betas 0.9 and 0.95,
texts without a template, loss on every token in step 1, the last weights saved, the constants of PPO.
"""

from __future__ import annotations

from collections.abc import Callable

from surefoot.interop.deepspeed_chat.rows import Step
from surefoot.interop.draft import Draft
from surefoot.interop.shared_rules import counted, set_warmup, switch
from surefoot.interop.trainer import set_schedule_name

OUTPUT = "./output"
_ALONE = "one process holds everything: nothing is sharded"
_BIASES = "all that has no LoRA trains too; biases of layers with LoRA, which Llama does not have, stay frozen here"
_CRITIC = "the original also trains all of the critic that has no LoRA, at another rate; surefoot's has one"
_AGAIN = "resumes from the newest checkpoint in output_dir, if any; the original starts over and overwrites it"


def set_stage(step: Step) -> Callable[[Draft], None]:
    def rule(draft: Draft) -> None:
        draft.set("stage", step)
        draft.set("optim.betas", [0.9, 0.95], why="fixed in DeepSpeed-Chat")
        draft.set("bos.prepend", "tokenizer", why="DeepSpeed-Chat leaves BOS to the tokenizer")
        draft.set("checkpoint.best", "none", why="DeepSpeed-Chat saves the last weights")
        if step == "sft":
            draft.set(
                "data.train_on", "everything", why="prompts carry loss as well; data.train_on=responses masks them"
            )
            draft.set("data.encoding", "whole", why="DeepSpeed-Chat tokenizes prompt and answer as one text")
        if step == "reward":
            draft.set("reward.loss", "divergence", why="the mean over all positions from the first difference on")

    return rule


def set_length(draft: Draft) -> None:
    passes = draft["num_train_epochs"]
    if passes < 1:
        draft.refuse("num_train_epochs", f"expected a number from 1, got {passes}")
        return
    draft.set("duration", counted(passes, "epoch"), "num_train_epochs")


def set_schedule(draft: Draft) -> None:
    if set_schedule_name(draft, "lr_scheduler_type", "num_warmup_steps"):
        set_warmup(draft, "num_warmup_steps", None, None)


def set_evaluation(draft: Draft) -> None:
    """Set eval_every: every epoch in steps 1 and 2, or every eval_interval steps in step 2."""
    interval = draft["eval_interval"] if "eval_interval" in draft.rows else 0
    if interval < 0:
        draft.refuse("eval_interval", f"expected a number of steps from 0, got {interval}")
    elif interval:
        why = "instead of at the end of each epoch"
        draft.set("eval_every", counted(interval, "step"), "eval_interval", why=why)
    else:
        draft.set("eval_every", "1 epoch", *(["eval_interval"] if "eval_interval" in draft.rows else []),
                  why="" if draft.given("eval_interval") else "DeepSpeed-Chat evaluates after every epoch")  # fmt: skip


def set_padding(draft: Draft) -> None:
    name = "num_padding_at_beginning"
    if draft.given(name):
        draft.set("reward.num_padding_at_beginning", draft[name], name)
    else:
        why = "the default 1 fits only OPT; surefoot checks the tokenizer"
        draft.assume(f"{name}: auto", why, "reward.num_padding_at_beginning")


def set_seed(draft: Draft) -> None:
    seed = 1234 if draft["seed"] is None else draft["seed"]
    why = "" if draft.given("seed") or draft["seed"] is not None else draft.rows["seed"].about
    draft.set("seed", seed, "seed", why=why)


def set_precision(draft: Draft) -> None:
    dtype = draft["dtype"]
    if dtype not in ("fp16", "bf16"):
        draft.refuse("dtype", f"DeepSpeed-Chat has no dtype {dtype}", "use fp16 or bf16")
        return
    draft.set("precision.compute", dtype, "dtype")


def set_dropouts(draft: Draft, shares: tuple[str, ...], switches: tuple[str, ...]) -> None:
    """Set model.dropout. shares: flags with a rate. switches: older flags for a rate of 0."""
    requested = {name: draft[name] for name in shares if draft[name] is not None}
    requested |= {name: 0.0 for name in switches if draft[name]}
    if len(set(requested.values())) > 1:
        *_, last = requested
        draft.refuse(last, f"{' and '.join(requested)} differ, but a run has one rate for all models", "give one value")
    elif requested:
        value = next(iter(requested.values()))
        if not 0 <= value < 1:
            draft.refuse(next(iter(requested)), f"expected a rate below 1, got {value:g}")
            return
        others = [
            name for name in shares if not any(name.endswith(given.removeprefix("disable_")) for given in requested)
        ]
        both = f"for both models; in DeepSpeed-Chat the model of {others[0]} keeps its own" if others else ""
        draft.set("model.dropout", value, *requested, why=both)
    elif draft.written("stage") in ("reward", "dpo"):
        draft.set("model.dropout", "own", *shares, why="as in DeepSpeed-Chat without --dropout")
    elif draft.written("stage") == "ppo":
        why = "DeepSpeed-Chat keeps the models' dropout; surefoot uses none, as ratios compare log-probabilities"
        draft.assume(f"{' and '.join(shares)} not given", why, "model.dropout")


def set_checkpointing(draft: Draft) -> None:
    name = "gradient_checkpointing"
    if draft.given(name):
        draft.set("gradient_checkpointing", switch(draft[name]), name)


def set_adapter(draft: Draft) -> None:
    set_lora(draft, "")
    # The value head of a reward model trains beside LoRA in any case.
    _set_rates(draft, "", alone=draft["only_optimize_lora"] and draft.written("stage") != "reward")


def _set_rates(draft: Draft, prefix: str, *, alone: bool) -> None:
    """Set the learning rates. alone: whether with LoRA nothing else trains."""
    rate, own = f"{prefix}learning_rate", f"{prefix}lora_learning_rate"
    if draft[f"{prefix}lora_dim"] > 0 and alone:
        draft.set("optim.lr", draft[own], own)
        draft.drop(f"with LoRA {own} applies", rate)
        return
    draft.set("optim.lr", draft[rate], rate)
    if draft[f"{prefix}lora_dim"] > 0:
        draft.set("optim.rates", [{"of": "lora_", "lr": draft[own]}], own)


def set_lora(draft: Draft, prefix: str) -> None:
    """Set the adapter of one model. prefix: prefix of its flags, such as actor_."""
    rank, place, alone = f"{prefix}lora_dim", f"{prefix}lora_module_name", "only_optimize_lora"
    rate = f"{prefix}lora_learning_rate"
    if draft[rank] < 0:
        draft.refuse(rank, f"expected a number from 0, got {draft[rank]}")
        return
    if draft[rank] == 0:
        draft.drop(f"{rank} is 0, so there is no LoRA", rank, place, rate, alone)
        return
    if not draft[alone]:
        draft.set("adapter.modules_to_save", "rest", rank, why=_BIASES)
    draft.set("adapter.kind", "lora", rank, alone)
    draft.set("adapter.rank", draft[rank], rank)
    draft.set("adapter.alpha", 1.0, rank)
    draft.set("adapter.targets", [draft[place]], place)
    draft.set("adapter.publish", "merged", why="DeepSpeed-Chat saves whole models only")


def set_zero(draft: Draft, *stages: str) -> None:
    """Set `parallel`: ZeRO and offload for several processes, offload alone for one, in which nothing is sharded."""
    count, offload = draft.processes, draft["offload"]
    for name in stages:
        if draft[name] not in (0, 1, 2, 3):
            draft.refuse(name, f"DeepSpeed has no stage {draft[name]}", "use 0, 1, 2 or 3")
            return
    highest = max(draft[name] for name in stages)
    if count == 1:
        draft.drop(_ALONE, *stages)
        if offload and not highest:
            draft.drop("there is no ZeRO that offloads", "offload")
        elif offload and "enable_ema" in draft.rows and draft["enable_ema"]:
            draft.drop("enable_ema averages the weights on the device", "offload")
        elif offload:
            why = "one process keeps the weights of its products on the device" if highest == 3 else ""
            draft.set("parallel.offload", "optimizer", "offload", why=why)
        return
    both = "both models use one engine, at the higher stage" if len({draft[name] for name in stages}) > 1 else ""
    draft.set("parallel.nproc", count, why="the number that the launcher starts")
    draft.set("parallel.engine", "deepspeed" if highest else "ddp", *stages, why=both)
    if highest:
        draft.set("parallel.zero_stage", highest, *stages, why=both)
        draft.set("parallel.offload", {False: "none", True: "all" if highest == 3 else "optimizer"}[offload], "offload")
    else:
        draft.drop("zero_stage is 0, so nothing is sharded", "offload")


def set_output(inside: str = "") -> Callable[[Draft], None]:
    """Return a rule that sets output. inside: subfolder of output_dir that holds the model."""

    def rule(draft: Draft) -> None:
        output = draft["output_dir"] or OUTPUT
        why = "a run is always saved; the original's scripts use this name" if not draft["output_dir"] else ""
        folder = f"{output.rstrip('/')}/{inside}" if inside else output
        draft.set(
            "output", folder, "output_dir", why=f"the policy is in {inside}/, as in DeepSpeed-Chat" if inside else why
        )
        draft.arguments.append("--resume")
        draft.assume("an earlier run", _AGAIN, "--resume")

    return rule


COMMON = (set_precision, set_schedule, set_seed)


EMA = 0.992
_CONSTANTS = "kl_ctl 0.1, clip_reward 5, cliprange 0.2, cliprange_value 0.2, gamma 1, lam 0.95"
_GREEDY = "sampled at temperature 1; the original leaves sampling to the model's generation_config.json"
_LONG = "longer prompts are dropped, not truncated, as in the original"


def set_rollouts(draft: Draft) -> None:
    """Set batch.* and ppo.rollout_batches: a step takes training batch x accumulation answers, and a rollout makes
    generation batch x generation batches.

    A step over several rollouts becomes one rollout, as no weight changes between them.
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
    count = draft.processes
    if rollout % step and (step % rollout or draft["ppo_epochs"] > 1):
        what = f"a rollout of {rollout} answers is not a whole number of steps of {step}"
        given = next((name for name in reversed(names) if draft.given(name)), names[2])
        draft.refuse(given, what, "make one a multiple of the other")
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
    draft.assume(_CONSTANTS, "fixed there, and surefoot's defaults", "ppo.kl", "ppo.reward_clip", "ppo.ratio_clip",
                 "ppo.value_clip", "ppo.gamma", "ppo.gae_lambda")  # fmt: skip


def set_actor_adapter(draft: Draft) -> None:
    set_lora(draft, "actor_")
    actor = draft["actor_lora_dim"] > 0
    _set_rates(draft, "actor_", alone=draft["only_optimize_lora"])
    _set_critic(draft, actor)


def _set_critic(draft: Draft, actor: bool) -> None:
    """Set the critic's adapter, which defaults to the actor's in surefoot."""
    words = rank, place, rate = "critic_lora_dim", "critic_lora_module_name", "critic_lora_learning_rate"
    key, alone = "ppo.critic_adapter", "only_optimize_lora"
    if draft[rank] < 0:
        draft.refuse(rank, f"expected a number from 0, got {draft[rank]}")
        return
    if draft[rank] == 0:
        draft.drop(f"{rank} is 0, so all of the critic trains", *words)
        draft.set("ppo.critic_lr", draft["critic_learning_rate"], "critic_learning_rate")
        if actor:
            draft.set(key, "none", rank, why="without LoRA all of the critic trains, as in DeepSpeed-Chat")
        return
    if not draft[alone]:
        draft.refuse(rank, _CRITIC, f"add --{alone}, or leave out --{rank} to train all of it")
        return
    draft.set("ppo.critic_lr", draft[rate], rate)
    draft.drop(f"with LoRA {rate} applies", "critic_learning_rate")
    if actor and all(draft[f"actor_{word}"] == draft[f"critic_{word}"] for word in ("lora_dim", "lora_module_name")):
        draft.note(rank, "carried", "", key)
        draft.note(place, "carried", "", key)
        return
    draft.set(f"{key}.kind", "lora", rank, alone)
    draft.set(f"{key}.rank", draft[rank], rank)
    draft.set(f"{key}.alpha", 1.0, rank)
    draft.set(f"{key}.targets", [draft[place]], place)


def set_models(draft: Draft) -> None:
    shares = ("actor_dropout", "critic_dropout")
    set_dropouts(draft, shares, tuple(f"disable_{name}" for name in shares))
    requested = [
        name for name in ("actor_gradient_checkpointing", "critic_gradient_checkpointing") if draft.given(name)
    ]
    if requested:
        on = any(draft[name] for name in requested)
        both = "for both models" if len({draft[name] for name in requested}) > 1 or len(requested) == 1 else ""
        draft.set("gradient_checkpointing", switch(on), *requested, why=both)
    set_zero(draft, "actor_zero_stage", "critic_zero_stage")
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
    """Set duration: enable_test_mode ends the run after test_stop_step steps."""
    if not draft["enable_test_mode"]:
        draft.drop("belongs to enable_test_mode", "test_stop_step")
        set_length(draft)
        return
    if draft["test_stop_step"] < 1:
        what = f"needs a number of steps from 1, and test_stop_step is {draft['test_stop_step']}"
        draft.refuse("enable_test_mode", what, "give --test_stop_step")
        return
    draft.set("duration", counted(draft["test_stop_step"], "step"), "enable_test_mode", "test_stop_step")
    draft.drop("test_stop_step takes precedence", "num_train_epochs")


PPO_RULES = (
    set_stage("ppo"),
    set_rollouts,
    set_lengths,
    set_actor_adapter,
    set_models,
    set_unsupervised,
    set_stop,
    *COMMON,
    set_output("actor"),
)
