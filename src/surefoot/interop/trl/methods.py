"""Translate TRL's other methods: `trl dpo`, `kto`, `reward`, `grpo`, `rloo`, and the scripts for ORPO, CPO and GKD.

Facts: the dataclasses of TRL 1.16 (the experimental ones for ORPO, CPO and GKD). tests/equality compares losses with
TRL's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from surefoot.interop import trainer
from surefoot.interop.backward import differs, equals, longest_or_null, never, pair_losses, reverse, unless
from surefoot.interop.draft import Draft
from surefoot.interop.settings import (
    ALL_POSITIONS,
    Row,
    all_listed,
    by_name,
    carried,
    joint,
    listed,
    number,
    refused,
    text,
    whole,
)
from surefoot.interop.trl import back
from surefoot.interop.trl.data import HANDBOOK, OWN_EOS, selected_columns, set_sources, set_template, template_settings
from surefoot.interop.trl.group import GRPO_ROWS, RLOO_ROWS, SYNCED, dropped, set_grpo, set_rloo

_ENCODER = "surefoot trains causal language models"
_LEAVE = "leave it out"
_LOSSES = (
    "sigmoid", "ipo", "hinge", "sigmoid_norm", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop",
)  # fmt: skip
_SMOOTHED = ("robust", "exo_pair")  # of them, those that TRL smooths
LABELS = "robust and exo_pair only: TRL does not apply it to other losses"
ONE_LOSS = "one of TRL's losses but aot and aot_unpaired, optionally with sft"


_CUTS = "surefoot cuts the prompt's beginning first, down to a quarter of the length, then the answer's end"
_ALL: tuple[Row, ...] = (
    carried("disable_dropout", True, "model.dropout", dropped, back=differs("model.dropout", "own")),
    joint("max_length", 1024, ("data.max_length",), "null: no limit", null=ALL_POSITIONS, back=longest_or_null),
    refused("truncation_mode", "keep_start", _CUTS),
)
_RATE = carried("learning_rate", 1e-6, "optim.lr")
_REFERENCE: tuple[Row, ...] = (
    *SYNCED,
    listed("precompute_ref_batch_size", None, "affects speed only, not results"),
)
_TOGETHER = "prompt and answer are truncated together, to max_length: prompts lose their beginning only then"
_HANDBOOK: tuple[Row, ...] = (
    *HANDBOOK,
    joint("max_prompt_length", None, ("data.max_length",), _TOGETHER, type=whole, back=never),
)
_OLDER: tuple[Row, ...] = (
    refused("max_completion_length", None, "prompt and answer are truncated together (max_length)"),
    *_HANDBOOK,
    listed("padding_value", None, "padding is masked by position"),
    refused("generate_during_eval", False, "surefoot uses samples.count for this"),
    refused("is_encoder_decoder", None, _ENCODER, same=(False,)),
)
_DPO: tuple[Row, ...] = (
    *_ALL,
    _RATE,
    *_HANDBOOK,
    *_REFERENCE,
    carried("beta", 0.1, "alignment.beta"),
    joint("label_smoothing", 0.0, ("alignment.label_smoothing",), LABELS),
    joint("loss_type", ["sigmoid"], ("alignment.loss", "alignment.sft"), ONE_LOSS, back=pair_losses),
    joint("loss_weights", None, ("alignment.sft",), "weight of sft; the other loss has weight 1",
          back=lambda ours: [1.0, ours["alignment.sft"]] if ours["alignment.sft"] else None),
    joint("precompute_ref_log_probs", False, ("alignment.reference",), back=equals("alignment.reference", "cached")),
    refused("ld_alpha", None, "surefoot's losses weight all tokens of an answer equally"),
    refused("f_divergence_type", "reverse_kl", "surefoot's DPO uses the reverse KL"),
    listed("f_alpha_divergence_coef", 0.5, "belongs to f_divergence_type"),
    refused("use_weighting", False, "surefoot weights all pairs equally"),
    refused("discopop_tau", 0.05, "surefoot's discopop has the paper's 0.05"),
)  # fmt: skip
_KTO: tuple[Row, ...] = (
    *_ALL,
    _RATE,
    *_REFERENCE,
    carried("beta", 0.1, "alignment.beta"),
    carried("desirable_weight", 1.0, "alignment.good"),
    carried("undesirable_weight", 1.0, "alignment.bad"),
    refused("loss_type", "kto", "surefoot supports only the kto loss"),
    refused("precompute_ref_log_probs", False, "KTO's KL term pairs prompts with answers of other examples"),
)  # fmt: skip
_REWARD: tuple[Row, ...] = (
    *_ALL,
    carried("learning_rate", 1e-4, "optim.lr"),
    carried("center_rewards_coefficient", None, "reward.center", type=number, back=unless("reward.center", 0)),
    joint("chat_template_path", None, ("data.template",), "a .jinja file", type=text, back=back.template_file),
    listed("lora_task_type", "CAUSAL_LM", "the value head always trains beside the adapter"),
    OWN_EOS,
)
_ORPO: tuple[Row, ...] = (*_ALL, _RATE, *_OLDER, carried("beta", 0.1, "alignment.beta"))
_CPO: tuple[Row, ...] = (
    *_ALL,
    _RATE,
    *_OLDER,
    carried("beta", 0.1, "alignment.beta"),
    joint("label_smoothing", 0.0, ("alignment.label_smoothing",), "loss_type: sigmoid only"),
    joint("loss_type", "sigmoid", ("alignment.loss",), "sigmoid is CPO, simpo SimPO", type=text,
          back=reverse("alignment.loss", {"sigmoid": "cpo", "simpo": "simpo"})),
    joint("cpo_alpha", 1.0, ("alignment.sft",),
          back=lambda ours: ours["alignment.sft"] + (ours["alignment.loss"] == "cpo")),
    joint("simpo_gamma", 0.5, ("alignment.margin",), "loss_type: simpo only"),
    refused("alpha", 0.0, "surefoot has no AlphaPO"),
)  # fmt: skip
_COLLATOR = "GKD's collator does not read it"
_GKD: tuple[Row, ...] = (
    *_ALL,
    carried("learning_rate", 2e-5, "optim.lr"),
    joint("chat_template_path", None, ("data.template",), "a .jinja file", type=text, back=back.template_file),
    joint("teacher_model_name_or_path", None, ("distill.teacher",), type=text),
    refused("teacher_model_init_kwargs", None, "surefoot passes no extra arguments when loading", same=({},)),
    joint("lmbda", 0.5, ("distill.on_policy",)),
    carried("beta", 0.5, "distill.beta"),
    joint("temperature", 0.9, ("distill.sampling_temperature",)),
    joint("max_new_tokens", 128, ("distill.max_new_tokens",)),
    refused("seq_kd", False, "surefoot's teacher draws no answers", "draw them first: surefoot generate"),
    *all_listed(_COLLATOR, dataset_text_field="text", dataset_kwargs=None, shuffle_dataset=False, packing=False),
    *all_listed(_COLLATOR, packing_strategy="bfd", eval_packing=None, completion_only_loss=None),
    *all_listed(_COLLATOR, assistant_only_loss=False),
)


def set_dpo_losses(draft: Draft, kind: str, weighing: str, smoothing: str, *also: str) -> bool:
    """Set alignment.loss and alignment.sft: one loss, optionally with cross entropy.

    kind, weighing, smoothing: the tool's settings for the losses, their weights and label smoothing.
    also: other settings that decide the loss.
    Returns whether surefoot supports the losses.
    """
    requested, weights = draft[kind], draft[weighing]
    losses = requested if isinstance(requested, list) else ["sigmoid"] if requested is None else [requested]
    weights = weights if isinstance(weights, list) else [1.0] * len(losses) if weights is None else [weights]
    main = [loss for loss in losses if loss != "sft"]
    if len(main) != 1 or main[0] not in _LOSSES or len(losses) > 2:
        fix = f"use one of {', '.join(_LOSSES)}, optionally with sft"
        draft.refuse(kind, f"surefoot has no {' + '.join(map(str, losses))} as TRL defines it", fix)
        return False
    if len(weights) != len(losses) or any(isinstance(one, bool | str) for one in weights):
        draft.refuse(weighing, f"expected {len(losses)} numbers, one per loss")
        return False
    weight_of = dict(zip(losses, weights, strict=True))
    if weight_of[main[0]] != 1:
        draft.refuse(
            weighing, f"{main[0]} has weight 1 in surefoot", "divide all weights by it, and multiply the learning rate"
        )
        return False
    draft.set("alignment.loss", main[0], *also, kind)
    if main[0] in _SMOOTHED:
        draft.set("alignment.label_smoothing", draft[smoothing] or 0.0, smoothing)
    else:
        draft.drop(f"TRL does not apply it to {main[0]}", smoothing)
    if "sft" in weight_of:
        draft.set("alignment.sft", float(weight_of["sft"]), kind, weighing)
    draft.note(weighing, "carried", "", "alignment.loss")
    return True


def _set_dpo(draft: Draft) -> None:
    if not set_dpo_losses(draft, "loss_type", "loss_weights", "label_smoothing"):
        return
    reference = "cached" if draft["precompute_ref_log_probs"] else "auto"
    draft.set("alignment.reference", reference, "precompute_ref_log_probs")


def _set_cpo(draft: Draft) -> None:
    kind, alpha = draft["loss_type"], draft["cpo_alpha"]
    if kind not in ("sigmoid", "simpo"):
        draft.refuse(
            "loss_type", f"surefoot has no reference-free loss {kind} as TRL defines it", "use sigmoid or simpo"
        )
        return
    smoothed = draft["label_smoothing"]
    if kind == "simpo":
        draft.set("alignment.loss", "simpo", "loss_type")
        draft.set("alignment.sft", alpha, "cpo_alpha")
        draft.set("alignment.margin", draft["simpo_gamma"], "simpo_gamma")
        if smoothed:
            draft.refuse("label_smoothing", "is for loss_type: sigmoid", _LEAVE)
        return
    draft.set("alignment.loss", "cpo", "loss_type", why="the script's method" if not draft.given("loss_type") else "")
    draft.set("alignment.label_smoothing", smoothed, "label_smoothing")
    draft.drop("loss_type is sigmoid", "simpo_gamma")
    if alpha == 1:
        draft.note("cpo_alpha", "carried", "surefoot's CPO includes cross entropy with weight 1", "alignment.loss")
    elif alpha > 1:
        draft.set("alignment.sft", alpha - 1, "cpo_alpha", why="in addition to the weight 1 in surefoot's CPO")
    else:
        draft.refuse("cpo_alpha", "in surefoot's CPO cross entropy has at least weight 1", _LEAVE)


def set_orpo(draft: Draft, *names: str) -> None:
    """Set TRL's ORPO. names: settings that name the method."""
    draft.set("alignment.loss", "orpo", *names, why="" if names else "the script's method")
    draft.set("alignment.sft_prompt", True, why="TRL's ORPO counts prompts in the cross entropy, the paper does not")


def _set_reward(draft: Draft) -> None:
    draft.assume("a classification head without bias", "a value head here, saved as value_head.safetensors", "stage")


_LAST = "GKD learns the last message and what the template writes behind its end, which is not learned here"


def _set_gkd(draft: Draft) -> None:
    draft.set("data.train_on", "last", why=_LAST)
    set_student(draft)


def set_student(draft: Draft) -> None:
    """Set distill.*: the teacher, and what the student draws."""
    teacher = draft["teacher_model_name_or_path"]
    if teacher is None:
        draft.refuse("teacher_model_name_or_path", "is required: a model does not learn from itself", "name a model")
        return
    draft.set("distill.teacher", teacher, "teacher_model_name_or_path")
    draft.set(
        "distill.on_policy", draft["lmbda"], "lmbda", why="drawn for each example; GKD draws for each micro-batch"
    )
    if draft["lmbda"]:
        draft.set("distill.sampling_temperature", draft["temperature"], "temperature")
        draft.set("distill.max_new_tokens", draft["max_new_tokens"], "max_new_tokens")
    else:
        draft.drop("the student draws no answers", "temperature", "max_new_tokens")
    draft.assume("the mean of a step", "over its tokens; GKD averages the means of micro-batches", "batch.size")


@dataclass(frozen=True)
class Method:
    """One of TRL's trainers.

    stage: surefoot's stage.
    rows: the trainer's own settings.
    rule: translates the joint rows.
    longer: what TRL does to an example longer than max_length, if surefoot does something else.
    """

    stage: str
    rows: tuple[Row, ...]
    rule: Callable[[Draft], None] = lambda draft: None
    longer: str = ""


_KEEPS_START = "TRL keeps the start of prompt and answer, and leaves out an example whose prompt alone is as long"
_KEEPS_PROMPT = "TRL keeps the whole prompt and cuts both answers"
_LEAVES_OUT = "TRL leaves out a pair with a longer side"


METHODS: Mapping[str, Method] = {
    "dpo": Method("dpo", _DPO, _set_dpo, _KEEPS_START),
    "kto": Method("kto", _KTO, longer=_KEEPS_START),
    "reward": Method("reward", _REWARD, _set_reward, _LEAVES_OUT),
    "orpo": Method("dpo", _ORPO, set_orpo, _KEEPS_PROMPT),
    "cpo": Method("dpo", _CPO, _set_cpo, _KEEPS_PROMPT),
    "gkd": Method("distill", _GKD, _set_gkd),
    "grpo": Method("grpo", GRPO_ROWS, set_grpo),
    "rloo": Method("grpo", RLOO_ROWS, set_rloo),
}
# Settings of `trl sft` that the other methods do not have, or have with another meaning.
_SFT_ONLY = {
    "chat_template_path", "dataset_text_field", "dataset_kwargs", "eos_token", "packing", "packing_strategy",
    "eval_packing", "shuffle_dataset", "completion_only_loss", "assistant_only_loss", "loss_type", "max_length",
    "learning_rate", *(row.name for row in HANDBOOK),
}  # fmt: skip


def rows_of(name: str, shared: tuple[Row, ...]) -> Mapping[str, Row]:
    """Return the rows of a method. shared: the rows of `trl sft`."""
    kept = [row for row in (*trainer.ROWS, *shared) if row.name not in _SFT_ONLY]
    return by_name(*kept, *METHODS[name].rows)


def pairs_rule(name: str) -> Callable[[Draft], None]:
    """Return the data rule of a method: texts use no template, conversations use the tokenizer's."""

    def rule(draft: Draft) -> None:
        method = METHODS[name]
        draft.set("stage", method.stage)
        if method.longer and draft["max_length"] != ALL_POSITIONS:
            draft.set("data.max_length", draft["max_length"], "max_length", why=f"{method.longer}; {_CUTS}")
        sources = set_sources(draft)
        if sources is None:
            names = ("chat_template_path", "chat_template")
            draft.drop("there is no training data", *(name for name in names if name in draft.rows))
            return
        record = draft.options.first(sources[0] if isinstance(sources[0], str) else sources[0]["path"])
        selected = selected_columns(draft)
        if record is not None and selected:
            record = {name: value for name, value in record.items() if name in selected}
        texts = record is not None and isinstance(record.get("prompt", record.get("chosen")), str)
        names, seen = template_settings(draft), record is not None
        set_template(draft, names, texts=texts, seen=seen, selected=bool(selected))
        if "max_prompt_length" in draft.rows:
            draft.note("max_prompt_length", "changed", _TOGETHER, "data.max_length")

    return rule
