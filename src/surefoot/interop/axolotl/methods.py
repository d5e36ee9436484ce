"""Translate Axolotl's `rl` and `reward_model`: TRL's trainers for DPO, IPO, KTO, ORPO and SimPO, and for reward models.

Facts: the code of Axolotl 0.19 that builds TRL's arguments, its config reference, and TRL's dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.interop.draft import Draft
from surefoot.interop.settings import Row, group, joint, listed, number, refused, text, truth
from surefoot.interop.trl.methods import set_dpo_losses

# rl -> (surefoot stage, surefoot loss)
METHODS: Mapping[str, tuple[str, str | None]] = {
    "dpo": ("dpo", "sigmoid"),
    "ipo": ("dpo", "ipo"),
    "orpo": ("dpo", "orpo"),
    "simpo": ("dpo", "simpo"),
    "kto": ("kto", None),
}
BETA = 0.1  # TRL's default for every method
_LEAVE = "leave it out"
_OWN = {
    "dpo": ("rpo_alpha", "dpo_label_smoothing", "dpo_loss_type", "dpo_loss_weights", "precompute_ref_log_probs",
            "rl_adapter_ref_model"),
    "ipo": ("precompute_ref_log_probs", "rl_adapter_ref_model"),
    "kto": ("kto_desirable_weight", "kto_undesirable_weight", "rl_adapter_ref_model"),
    "orpo": ("orpo_alpha",),
    "simpo": ("simpo_gamma", "cpo_alpha"),
    "reward": ("center_rewards_coefficient", "num_labels"),
}  # fmt: skip
_EVERY = tuple(dict.fromkeys(name for names in _OWN.values() for name in names))
ROWS: tuple[Row, ...] = (
    joint("rl", None, ("stage", "alignment.loss"), "dpo, ipo, kto, orpo, simpo", type=text),
    joint("reward_model", False, ("stage",), "with pairs of type bradley_terry.chat_template or bradley_terry.llama3"),
    joint("rl_beta", None, ("alignment.beta",), "TRL's default is 0.1", type=number),
    joint("trl", None, ("alignment.beta",), "only beta; the rest is for GRPO", type=group),
    joint("orpo_alpha", None, ("alignment.beta",), "used if rl_beta is not given", type=number),
    joint("rpo_alpha", None, ("alignment.sft",), type=number),
    joint("simpo_gamma", None, ("alignment.margin",), "TRL's default is 0.5", type=number),
    joint("cpo_alpha", None, ("alignment.sft",), "TRL's default is 1", type=number),
    joint("kto_desirable_weight", None, ("alignment.good",), type=number),
    joint("kto_undesirable_weight", None, ("alignment.bad",), type=number),
    joint("dpo_label_smoothing", None, ("alignment.label_smoothing",), type=number),
    joint("dpo_loss_type", None, ("alignment.loss", "alignment.sft"), "sigmoid, ipo or hinge, optionally with sft"),
    joint("dpo_loss_weights", None, ("alignment.sft",), "weight of sft; the other loss has weight 1"),
    joint("precompute_ref_log_probs", None, ("alignment.reference",), type=truth),
    joint("rl_adapter_ref_model", None, ("alignment.reference",), "a separate reference model with LoRA", type=truth),
    joint("center_rewards_coefficient", None, ("reward.center",), type=number),
    joint("num_labels", None, (), "a reward model has one score"),
    listed("dpo_padding_free", None, "padding does not affect results here"),
    listed("dpo_use_logits_to_keep", None, "affects memory only; surefoot never computes logits of prompts"),
    listed("dpo_use_liger_kernel", None, "affects speed only; surefoot chooses its own kernels"),
    refused("dpo_use_weighting", None, "surefoot weights all pairs equally", _LEAVE, same=(False,)),
    refused("dpo_norm_loss", None, "surefoot's DPO uses sums of log-probabilities", _LEAVE, same=(False,)),
    refused("dpo_generate_during_eval", None, "surefoot uses samples.count for this", _LEAVE, same=(False,)),
    refused("vllm", None, "belongs to GRPO, which this translation does not support", _LEAVE, same=({},)),
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
    if method in (None, "reward"):
        draft.drop(why, "rl_beta", "trl")
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
    loss = METHODS[method][1]
    if loss is None:
        draft.note("rl", "carried", "", "stage")
    else:
        draft.set("alignment.loss", loss, "rl")
    _set_beta(draft, method)
    {"dpo": _set_dpo, "kto": _set_kto, "simpo": _set_simpo}.get(method, lambda draft: None)(draft)
    if "rl_adapter_ref_model" in read:
        _set_reference(draft)


def _set_beta(draft: Draft, method: str) -> None:
    own = draft["trl"] or {}
    if others := [name for name, value in own.items() if name != "beta" and value not in (None, False)]:
        draft.refuse("trl", f"{others[0]} belongs to GRPO, which this translation does not support", _LEAVE)
    words = ["rl_beta", *(["orpo_alpha"] if method == "orpo" else [])]
    if own.get("beta") is not None:
        draft.set("alignment.beta", own["beta"], "trl")
        draft.drop("trl.beta takes precedence", *words)
        return
    draft.drop("is off or not set", "trl")
    chosen = next((name for name in words if draft[name] is not None), "rl_beta")
    draft.set("alignment.beta", BETA if draft[chosen] is None else draft[chosen], chosen)
    draft.drop("rl_beta takes precedence", *(name for name in words if name != chosen))


def _set_dpo(draft: Draft) -> None:
    if draft["dpo_label_smoothing"]:
        draft.set("alignment.label_smoothing", draft["dpo_label_smoothing"], "dpo_label_smoothing")
    if not set_dpo_losses(draft, "dpo_loss_type", "dpo_loss_weights", "rl"):
        draft.drop("the losses are not supported", "dpo_loss_type", "dpo_loss_weights", "rpo_alpha")
        return
    if draft["rpo_alpha"] and draft.written("alignment.sft") is not None:
        draft.refuse("rpo_alpha", "dpo_loss_type already includes sft", "keep one")
    elif draft["rpo_alpha"]:
        draft.set("alignment.sft", draft["rpo_alpha"], "rpo_alpha")


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
