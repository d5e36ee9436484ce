"""Translate Axolotl's `rl` and `reward_model`: TRL's trainers for DPO, IPO, KTO, ORPO, SimPO and GRPO, and for reward
models.

Facts: the code of Axolotl 0.19 that builds TRL's arguments, its config reference, and TRL's dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from surefoot.interop.axolotl import back
from surefoot.interop.backward import equals, never, true_if, unless
from surefoot.interop.draft import Draft
from surefoot.interop.settings import Row, all_listed, by_name, joint, listed, number, refused, text, truth
from surefoot.interop.trl.group import GRPO_ROWS, set_grpo
from surefoot.interop.trl.methods import LABELS, ONE_LOSS, set_dpo_losses, set_orpo
from surefoot.interop.trl.rewards import written

# rl -> (surefoot stage, surefoot loss)
METHODS: Mapping[str, tuple[str, str | None]] = {
    "dpo": ("dpo", "sigmoid"),
    "ipo": ("dpo", "ipo"),
    "orpo": ("dpo", "orpo"),
    "simpo": ("dpo", "simpo"),
    "kto": ("kto", None),
    "grpo": ("grpo", None),
}
BETA = 0.1  # TRL's default for every method
_LEAVE = "leave it out"
_OWN = {
    "dpo": (
        "dpo_loss_type",
        "dpo_loss_weights",
        "dpo_label_smoothing",
        "precompute_ref_log_probs",
        "rl_adapter_ref_model",
    ),
    "ipo": ("precompute_ref_log_probs", "rl_adapter_ref_model"),
    "kto": ("kto_desirable_weight", "kto_undesirable_weight", "rl_adapter_ref_model"),
    "orpo": ("orpo_alpha",),
    "simpo": ("simpo_gamma", "cpo_alpha"),
    "reward": ("center_rewards_coefficient", "num_labels"),
}
# Settings of the block `trl:` that Axolotl does not have.
_NOT_IN_THE_BLOCK = (
    "learning_rate", "disable_dropout", "shuffle_dataset", "reward_model_name_or_path", "num_generations_eval",
    "max_prompt_length", "steps_per_generation", "vllm_server_base_url", "vllm_structured_outputs_regex", "delta",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
)  # fmt: skip


def _with_models(row: Row) -> Row:
    """reward_funcs also names reward models: the block has no setting of its own for these."""
    return replace(row, back=lambda ours: written(ours, models=True)) if row.name == "reward_funcs" else row


_ASYNC = "draws answers beside the updates, which surefoot does not (grpo.ahead)"
_BLOCK: tuple[Row, ...] = (
    *(_with_models(row) for row in GRPO_ROWS if row.name not in _NOT_IN_THE_BLOCK),
    joint("vllm_importance_sampling_clip_max", 3.0, ("grpo.correction_high",), type=number),
    refused("vllm_guided_decoding_regex", None, "surefoot restricts no answers to a pattern"),
    refused("rollout_func", None, "surefoot draws answers itself"),
    refused("use_data_producer", False, _ASYNC),
    refused("async_prefetch", False, _ASYNC),
    refused("replay_buffer_size", 0, "surefoot learns from each rollout as drawn"),
    refused("reroll_start_fraction", 1.0, "surefoot's way is grpo.redraw"),
    listed("use_liger_loss", None, "affects speed only; surefoot chooses its own kernels"),
    *all_listed("belongs to use_data_producer or async_prefetch", prefetch_depth=None, vllm_sync_interval=None,
                streaming_partial_batch=None, streaming_min_groups=None, reward_num_workers=1,
                replay_recompute_logps=True, reroll_max_groups=1, skip_zero_advantage_batches=True),
    listed("vllm_lora_sync", False, "surefoot sends adapters as files"),
)  # fmt: skip
BLOCK = "trl."  # before the names of the settings in it
_EVERY = tuple(dict.fromkeys(name for names in _OWN.values() for name in names))
ROWS: tuple[Row, ...] = (
    joint("rl", None, ("stage", "alignment.loss"), "dpo, ipo, kto, orpo, simpo, grpo", type=text, back=back.method),
    joint("reward_model", False, ("stage",), "with pairs of type bradley_terry.chat_template or bradley_terry.llama3",
          back=equals("stage", "reward")),
    joint("rl_beta", None, ("alignment.beta",), "TRL's default is 0.1", type=number),
    *(replace(row, name=f"{BLOCK}{row.name}") for row in by_name(*_BLOCK).values() if row.name != "beta"),
    joint("trl.beta", None, ("alignment.beta", "grpo.kl"), "instead of rl_beta", type=number,
          back=lambda ours: ours["grpo.kl"] if ours.facts.rollouts else None),
    joint("orpo_alpha", None, ("alignment.beta",), "used if rl_beta is not given", type=number, back=never),
    refused("rpo_alpha", None, "TRL no longer has it, and Axolotl refuses it", "give dpo_loss_type: [sigmoid, sft]"),
    joint("simpo_gamma", None, ("alignment.margin",), "TRL's default is 0.5", type=number),
    joint("cpo_alpha", None, ("alignment.sft",), "TRL's default is 1", type=number,
          back=lambda ours: ours["alignment.sft"] if ours["alignment.loss"] == "simpo" else None),
    joint("kto_desirable_weight", None, ("alignment.good",), type=number),
    joint("kto_undesirable_weight", None, ("alignment.bad",), type=number),
    joint("dpo_label_smoothing", None, ("alignment.label_smoothing",), LABELS, type=number),
    joint("dpo_loss_type", None, ("alignment.loss", "alignment.sft"), ONE_LOSS, back=back.pair_losses),
    joint("dpo_loss_weights", None, ("alignment.sft",), "weight of sft; the other loss has weight 1",
          back=back.pair_weights),
    joint("precompute_ref_log_probs", None, ("alignment.reference",), type=truth,
          back=true_if("alignment.reference", "cached")),
    joint("rl_adapter_ref_model", None, ("alignment.reference",), "a separate reference model with LoRA", type=truth,
          back=true_if("alignment.reference", "model")),
    joint("center_rewards_coefficient", None, ("reward.center",), type=number, back=unless("reward.center", 0)),
    joint("num_labels", None, (), "a reward model has one score"),
    listed("dpo_padding_free", None, "padding does not affect results here"),
    listed("dpo_use_logits_to_keep", None, "affects memory only; surefoot never computes logits of prompts"),
    listed("dpo_use_liger_kernel", None, "affects speed only; surefoot chooses its own kernels"),
    refused("dpo_use_weighting", None, "surefoot weights all pairs equally", same=(False,)),
    refused("dpo_norm_loss", None, "surefoot's DPO uses sums of log-probabilities", same=(False,)),
    refused("dpo_generate_during_eval", None, "surefoot uses samples.count for this", same=(False,)),
    listed("vllm", None, "is for the server, which has flags of its own"),
)  # fmt: skip


def method_of(draft: Draft) -> str | None:
    """Return a key of METHODS, "reward", or None for supervised training. Refuses unsupported methods."""
    requested = draft["rl"]
    if requested is not None and requested not in METHODS:
        fix = f"choose from {', '.join(METHODS)}, or write a surefoot config for PPO (stage: ppo)"
        draft.refuse("rl", f"surefoot has no {requested}", fix)
        return None
    if draft["reward_model"] and requested is not None:
        draft.refuse("reward_model", f"rl: {requested} is a separate training", "train one after the other")
    return "reward" if draft["reward_model"] else requested


def stage_of(method: str) -> str:
    return "reward" if method == "reward" else METHODS[method][0]


def set_method(draft: Draft) -> None:
    """Set alignment.* and reward.*, after the data rule has set the stage."""
    method = method_of(draft)
    read = _OWN.get(method or "", ())
    why = "reward_model is on" if method == "reward" else f"rl is {method}" if method else "rl is not set"
    draft.drop(why, *(name for name in _EVERY if name not in read))
    if method != "grpo":
        draft.drop(why, *(name for name in draft.rows if name.startswith(BLOCK) and name != "trl.beta"))
    if method in (None, "reward"):
        draft.drop(why, "rl_beta", "trl.beta")
    if method is None:
        return
    if method == "reward":
        draft.note("reward_model", "carried", "", "stage")
        draft.set("reward.center", draft["center_rewards_coefficient"] or 0.0, "center_rewards_coefficient")
        if draft["num_labels"] not in (None, 1):
            draft.refuse("num_labels", "a reward model has one score", _LEAVE)
        draft.note("num_labels", "carried", "one score")
        draft.assume("a classification head", "a value head here, saved as value_head.safetensors", "stage")
        return
    if method == "grpo":  # after the steps, see set_prompted
        draft.note("rl", "carried", "", "stage")
        return
    loss = METHODS[method][1]
    if loss is None:
        draft.note("rl", "carried", "", "stage")
    elif loss == "orpo":
        set_orpo(draft, "rl")
    else:
        draft.set("alignment.loss", loss, "rl")
    _set_beta(draft, method)
    {"dpo": _set_dpo, "kto": _set_kto, "simpo": _set_simpo}.get(method, lambda draft: None)(draft)
    if "rl_adapter_ref_model" in read:
        _set_reference(draft)


def _set_beta(draft: Draft, method: str) -> None:
    words = ["rl_beta", *(["orpo_alpha"] if method == "orpo" else [])]
    if draft["trl.beta"] is not None:
        draft.set("alignment.beta", draft["trl.beta"], "trl.beta")
        draft.drop("trl.beta takes precedence", *words)
        return
    chosen = next((name for name in words if draft[name] is not None), "rl_beta")
    draft.set("alignment.beta", BETA if draft[chosen] is None else draft[chosen], chosen)
    draft.drop("rl_beta takes precedence", *(name for name in words if name != chosen))


def set_prompted(draft: Draft) -> None:
    """Set grpo.*, after the batch is known."""
    if draft["rl"] != "grpo":
        return
    if not draft.where("trl.max_completion_length"):
        draft.refuse("trl.max_completion_length", "is required: without it Axolotl sets no limit", "set it")
    draft.set("model.dropout", "own", why="TRL's GRPO keeps the model's dropout")
    inside = draft["trl.beta"] is not None
    if inside:
        draft.drop("trl.beta takes precedence", "rl_beta")
    set_grpo(draft, BLOCK, None, beta="trl.beta" if inside else "rl_beta")


def _set_dpo(draft: Draft) -> None:
    if not set_dpo_losses(draft, "dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing", "rl"):
        draft.drop("the losses are not supported", "dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing")


def _set_kto(draft: Draft) -> None:
    for name, key in (("kto_desirable_weight", "good"), ("kto_undesirable_weight", "bad")):
        draft.set(f"alignment.{key}", draft[name] or 1.0, name)


def _set_simpo(draft: Draft) -> None:
    draft.set("alignment.margin", 0.5 if draft["simpo_gamma"] is None else draft["simpo_gamma"], "simpo_gamma")
    draft.set("alignment.sft", 1.0 if draft["cpo_alpha"] is None else draft["cpo_alpha"], "cpo_alpha")


def _set_reference(draft: Draft) -> None:
    """Set the reference: a second model, cached log-probabilities, or by default the model without its adapter."""
    cached, second = draft["precompute_ref_log_probs"], draft["rl_adapter_ref_model"]
    if cached and draft["rl"] == "kto":
        draft.refuse(
            "precompute_ref_log_probs", "KTO's KL term pairs prompts with answers of other examples of the step", _LEAVE
        )
    elif cached:
        draft.set("alignment.reference", "cached", "precompute_ref_log_probs")
        draft.drop("log-probabilities are computed once", "rl_adapter_ref_model")
    elif second:
        draft.set("alignment.reference", "model", "rl_adapter_ref_model")
