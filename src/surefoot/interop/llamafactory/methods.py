"""Rules for the settings of LLaMA-Factory's stages rm, dpo, kto and ppo.

Facts: its trainers for rm, dpo and kto; for PPO the constants of TRL's PPOTrainer 0.8 to 0.9, which it calls.
"""

from __future__ import annotations

from surefoot.interop.draft import Draft

_PREFERENCES = (
    "pref_beta", "pref_ftx", "pref_bco_weight", "pref_loss", "dpo_label_smoothing", "simpo_gamma", "ld_alpha",
)  # fmt: skip
_JUDGED = ("kto_chosen_weight", "kto_rejected_weight")
_REFERENCE = ("ref_model", "ref_model_adapters", "ref_model_quantization_bit")
_REWARD = ("reward_model", "reward_model_adapters", "reward_model_quantization_bit", "reward_model_type")
_PPO = ("ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards", *_REWARD)
_ANSWERING = ("max_new_tokens", "temperature", "top_p", "top_k")
_ALL = (*_PREFERENCES, *_JUDGED, *_REFERENCE, *_PPO, *_ANSWERING)
_READ = {
    "dpo": {*_PREFERENCES, *_REFERENCE},
    "kto": {"pref_beta", *_JUDGED, *_REFERENCE},
    "ppo": {*_PPO, *_REFERENCE, *_ANSWERING},
}
_UNSUPPORTED = ("ref_model_adapters", "ref_model_quantization_bit", "reward_model_adapters",
                 "reward_model_quantization_bit", "ld_alpha")  # fmt: skip
_FTX = "a mean over all tokens of the step's chosen answers; LLaMA-Factory averages the means of the answers"


def set_method(draft: Draft) -> None:
    stage = str(draft["stage"])
    read = _READ.get(stage, set())
    draft.drop(f"stage is {stage}", *(name for name in _ALL if name not in read))
    {"dpo": set_pairs, "kto": _kto, "ppo": _ppo}.get(stage, lambda draft: None)(draft)
    if stage == "rm":
        draft.set("model.dropout", "own", why="LLaMA-Factory keeps dropout on in this stage, unlike dpo and kto")
    for name in (name for name in _UNSUPPORTED if stage in _READ and draft[name] is not None):
        fix = "merge adapters first (surefoot export)" if name.endswith("adapters") else "leave it out"
        draft.refuse(name, "surefoot does not support this part of the method", fix)


def set_pairs(draft: Draft) -> None:
    loss = draft["pref_loss"]
    if draft["pref_bco_weight"]:
        draft.refuse("pref_bco_weight", "surefoot has no BCO loss", "leave it out")
    if loss not in ("sigmoid", "hinge", "ipo", "orpo", "simpo"):
        fix = "use stage: kto with judged answers, or sigmoid, hinge, ipo, orpo or simpo"
        draft.refuse("pref_loss", f"surefoot has no {loss}", fix)
        return
    draft.set("alignment.loss", loss, "pref_loss", why=_FTX if loss == "orpo" else "")
    draft.set("alignment.beta", draft["pref_beta"], "pref_beta")
    if draft["pref_ftx"] and loss in ("orpo", "simpo"):
        draft.refuse("pref_ftx", f"LLaMA-Factory does not add it to {loss}", "leave it out")
    else:
        draft.set("alignment.sft", draft["pref_ftx"], "pref_ftx", why=_FTX if draft["pref_ftx"] else "")
    if draft["dpo_label_smoothing"] and loss != "sigmoid":
        draft.refuse("dpo_label_smoothing", "is for pref_loss: sigmoid", "leave it out")
    else:
        draft.set("alignment.label_smoothing", draft["dpo_label_smoothing"], "dpo_label_smoothing")
    if loss == "simpo":
        draft.set("alignment.margin", draft["simpo_gamma"], "simpo_gamma")
    else:
        draft.drop(f"pref_loss is {loss}", "simpo_gamma")
    if loss in ("orpo", "simpo"):
        draft.drop(f"{loss} has no reference model", "ref_model")
    else:
        _reference(draft)


def _kto(draft: Draft) -> None:
    draft.set("alignment.beta", draft["pref_beta"], "pref_beta")
    draft.set("alignment.good", draft["kto_chosen_weight"], "kto_chosen_weight")
    draft.set("alignment.bad", draft["kto_rejected_weight"], "kto_rejected_weight")
    _reference(draft)
    if draft["pref_ftx"]:
        draft.refuse("pref_ftx", "surefoot's KTO has no cross-entropy term", "leave it out")


def _reference(draft: Draft) -> None:
    if draft["ref_model"] is not None:
        draft.set("alignment.reference", draft["ref_model"], "ref_model")


def _ppo(draft: Draft) -> None:
    if draft["reward_model"] is None:
        draft.refuse("reward_model", "is required", "name the folder of a reward model")
        return
    kind = draft["reward_model_type"]
    if kind not in ("lora", "full"):
        what = "surefoot sends prompts and responses to a reward service, not LLaMA-Factory's messages"
        draft.refuse("reward_model_type", what, "write ppo.reward: http://… in a surefoot config")
        return
    draft.set("ppo.reward", draft["reward_model"], "reward_model", "reward_model_type")
    draft.set("ppo.epochs", draft["ppo_epochs"], "ppo_epochs")
    draft.set("ppo.rollout_batches", draft["ppo_buffer_size"], "ppo_buffer_size")
    draft.set("ppo.kl_target", draft["ppo_target"], "ppo_target")
    draft.set("ppo.kl", 0.2, why="TRL's initial value, which LLaMA-Factory keeps")
    draft.set("ppo.reward_clip", None, why="LLaMA-Factory does not clip scores")
    draft.set("ppo.whiten", True, why="TRL always whitens advantages")
    draft.set(
        "ppo.critic_lr",
        draft["learning_rate"],
        "learning_rate",
        why="also for the critic: LLaMA-Factory has one optimizer",
    )
    for name in ("ppo_score_norm", "ppo_whiten_rewards"):
        if draft[name]:
            draft.refuse(name, "surefoot clips scores (ppo.reward_clip) and whitens only advantages", "leave it out")
    if draft["ref_model"] is not None:
        draft.refuse("ref_model", "the reference of PPO is the initial policy", "leave it out")
    draft.set("ppo.max_new_tokens", draft["max_new_tokens"], "max_new_tokens")
    draft.set("ppo.temperature", draft["temperature"], "temperature")
    draft.set("ppo.top_p", draft["top_p"], "top_p")
    no_top_k = "samples from all tokens within top_p, without a top_k limit"
    if draft["top_k"] in (0, -1):
        draft.note("top_k", "carried")
    elif draft.given("top_k"):
        draft.note("top_k", "changed", no_top_k, "ppo.top_p")
    else:
        draft.assume(f"top_k: {draft['top_k']}", no_top_k, "ppo.top_p")
