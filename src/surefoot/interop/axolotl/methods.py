"""Axolotl's `rl` and `reward_model`: TRL's trainers for DPO, IPO, KTO, ORPO and SimPO, and for reward models.

Facts: its builder of TRL's arguments and its reference of settings, 0.19; TRL's defaults are those of its dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.interop.draft import Draft
from surefoot.interop.settings import Row, group, joint, listed, number, refused, text, truth
from surefoot.interop.trl.methods import set_dpo_losses

# rl -> (our stage, our loss)
METHODS: Mapping[str, tuple[str, str | None]] = {
    "dpo": ("dpo", "sigmoid"),
    "ipo": ("dpo", "ipo"),
    "orpo": ("dpo", "orpo"),
    "simpo": ("dpo", "simpo"),
    "kto": ("kto", None),
}
BETA = 0.1  # TRL's, of every method
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
    joint("reward_model", False, ("stage",), "pairs of the types bradley_terry.chat_template and bradley_terry.llama3"),
    joint("rl_beta", None, ("alignment.beta",), "TRL's default is 0.1", type=number),
    joint("trl", None, ("alignment.beta",), "beta alone; the rest is GRPO's", type=group),
    joint("orpo_alpha", None, ("alignment.beta",), "where rl_beta is not given", type=number),
    joint("rpo_alpha", None, ("alignment.sft",), type=number),
    joint("simpo_gamma", None, ("alignment.margin",), "TRL's default is 0.5", type=number),
    joint("cpo_alpha", None, ("alignment.sft",), "TRL's default is 1", type=number),
    joint("kto_desirable_weight", None, ("alignment.good",), type=number),
    joint("kto_undesirable_weight", None, ("alignment.bad",), type=number),
    joint("dpo_label_smoothing", None, ("alignment.label_smoothing",), type=number),
    joint("dpo_loss_type", None, ("alignment.loss", "alignment.sft"), "sigmoid, ipo or hinge; beside one of them sft"),
    joint("dpo_loss_weights", None, ("alignment.sft",), "of sft, beside a weight of 1"),
    joint("precompute_ref_log_probs", None, ("alignment.reference",), type=truth),
    joint("rl_adapter_ref_model", None, ("alignment.reference",), "a second model beside an adapter", type=truth),
    joint("center_rewards_coefficient", None, ("reward.center",), type=number),
    joint("num_labels", None, (), "a reward model has one score"),
    listed("dpo_padding_free", None, "padding changes no number here"),
    listed("dpo_use_logits_to_keep", None, "is about memory; logits of prompts are never made"),
    listed("dpo_use_liger_kernel", None, "is about speed; surefoot chooses its kernels itself"),
    refused("dpo_use_weighting", None, "surefoot weighs all pairs alike", _LEAVE, same=(False,)),
    refused("dpo_norm_loss", None, "surefoot's DPO takes sums of log-probabilities", _LEAVE, same=(False,)),
    refused("dpo_generate_during_eval", None, "surefoot has samples.count for this", _LEAVE, same=(False,)),
    refused("vllm", None, "belongs to GRPO, which surefoot does not have", _LEAVE, same=({},)),
)  # fmt: skip


def method_of(draft: Draft) -> str | None:
    """A key of METHODS, "reward", or None for supervised training. Refuses what surefoot has not."""
    requested = draft["rl"]
    if requested is not None and requested not in METHODS:
        fix = f"it has {', '.join(METHODS)}, and PPO with a config of its own (stage: ppo)"
        draft.refuse("rl", f"surefoot has no {requested}", fix)
        return None
    if draft["reward_model"] and requested is not None:
        draft.refuse("reward_model", f"rl: {requested} is another training", "train the two after each other")
    return "reward" if draft["reward_model"] else requested


def stage_of(method: str) -> str:
    return "reward" if method == "reward" else METHODS[method][0]


def set_method(draft: Draft) -> None:
    """alignment and reward, once the data have settled the stage."""
    method = method_of(draft)
    read = _OWN.get(method or "", ())
    said = "reward_model is on" if method == "reward" else f"rl is {method}" if method else "no rl is asked for"
    draft.drop(said, *(name for name in _EVERY if name not in read))
    if method in (None, "reward"):
        draft.drop(said, "rl_beta", "trl")
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
        draft.refuse("trl", f"{others[0]} belongs to GRPO, which surefoot does not have", _LEAVE)
    words = ["rl_beta", *(["orpo_alpha"] if method == "orpo" else [])]
    if own.get("beta") is not None:
        draft.set("alignment.beta", own["beta"], "trl")
        draft.drop("trl.beta goes before it", *words)
        return
    draft.drop("asks for nothing", "trl")
    chosen = next((name for name in words if draft[name] is not None), "rl_beta")
    draft.set("alignment.beta", BETA if draft[chosen] is None else draft[chosen], chosen)
    draft.drop("rl_beta goes before it", *(name for name in words if name != chosen))


def _set_dpo(draft: Draft) -> None:
    if draft["dpo_label_smoothing"]:
        draft.set("alignment.label_smoothing", draft["dpo_label_smoothing"], "dpo_label_smoothing")
    if not set_dpo_losses(draft, "dpo_loss_type", "dpo_loss_weights", "rl"):
        draft.drop("the losses are refused", "dpo_loss_type", "dpo_loss_weights", "rpo_alpha")
        return
    if draft["rpo_alpha"] and draft.written("alignment.sft") is not None:
        draft.refuse("rpo_alpha", "dpo_loss_type asks for sft already", "keep one")
    elif draft["rpo_alpha"]:
        draft.set("alignment.sft", draft["rpo_alpha"], "rpo_alpha")


def _set_kto(draft: Draft) -> None:
    for name, key in (("kto_desirable_weight", "good"), ("kto_undesirable_weight", "bad")):
        draft.set(f"alignment.{key}", draft[name] or 1.0, name)


def _set_simpo(draft: Draft) -> None:
    draft.set("alignment.margin", 0.5 if draft["simpo_gamma"] is None else draft["simpo_gamma"], "simpo_gamma")
    draft.set("alignment.sft", 1.0 if draft["cpo_alpha"] is None else draft["cpo_alpha"], "cpo_alpha")


def _set_reference(draft: Draft) -> None:
    """A second model, log-probabilities computed once, or what surefoot takes by itself: the adapter switched off."""
    cached, second = draft["precompute_ref_log_probs"], draft["rl_adapter_ref_model"]
    if cached and draft["rl"] == "kto":
        draft.refuse("precompute_ref_log_probs", "KTO's KL pairs prompts with answers of others in the step", _LEAVE)
    elif cached:
        draft.set("alignment.reference", "cached", "precompute_ref_log_probs")
        draft.drop("log-probabilities are computed once", "rl_adapter_ref_model")
    elif second:
        draft.set("alignment.reference", "model", "rl_adapter_ref_model")
