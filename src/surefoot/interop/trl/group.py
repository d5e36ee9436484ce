"""Translate TRL's GRPOConfig and RLOOConfig to `stage: grpo`. Axolotl's `trl:` block has the same names.

Facts: the dataclasses and trainers of TRL 1.16. `tests/equality` compares loss and gradient of translated configs with
those of TRL's trainers.
"""

from __future__ import annotations

from typing import Any

from surefoot.interop.backward import Ours, differs, equals, never, reverse, unless
from surefoot.interop.draft import Draft
from surefoot.interop.settings import (
    Refusal,
    Row,
    all_listed,
    carried,
    group,
    joint,
    listed,
    number,
    refused,
    text,
    whole,
)
from surefoot.interop.shared_rules import template_arguments
from surefoot.interop.trl.rewards import OWN, Rewards, set_rewards, written, written_model, written_weights
from surefoot.method_facts.losses import GROUP_LOSSES

_SPEED = "affects speed only, not results"
_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo")
_OTHER_LOSS = "belongs to a loss that is not supported"
_SCALES = {True: "group", False: "none", "group": "group", "batch": "step", "none": "none"}
_KEPT = "TRL takes ratios among all tokens (trl#6789); here they are among those that could be drawn"
_SPLIT = "TRL deals the answers of a generation out to its steps; here each step has whole groups and its own mean"
_OWN_MEANS = "TRL takes the mean of each micro-batch; here it is one over the step"
_MASKED = "an answer without an end keeps its KL penalty in the score; TRL's loss has their advantages as a constant"
_SERVER = "surefoot's server is plain `vllm serve`, see docs/grpo.md"
_COLOCATED = "surefoot draws answers with the training model itself, unless grpo.engine: vllm names a server"


def dropped(value: bool) -> float | str:
    return 0.0 if value else "own"


def _scale(value: Any) -> str:
    if isinstance(value, list | dict) or value not in _SCALES:
        raise ValueError("group, batch or none")
    return _SCALES[value]


def _scale_of(ours: Ours) -> str | None:
    own = ours["grpo.scale"]
    wanted = GROUP_LOSSES[ours["grpo.loss"]].scale if own == "auto" else own
    return next((theirs for theirs, mine in _SCALES.items() if mine == wanted and isinstance(theirs, str)), None)


def _clip(ours: Ours, side: str) -> float | None:
    """TRL's epsilon: of a loss that weighs by the ratio, the bound of the ratio itself."""
    own = ours[f"grpo.clip_{side}"]
    facts = GROUP_LOSSES[ours["grpo.loss"]]
    value = facts.clip[side == "high"] if own == "auto" else own
    return value + 1 if value is not None and facts.weighs else value


def _prompt_length(ours: Ours) -> int | None:
    limit = ours["data.max_length"]
    return limit - ours["grpo.max_new_tokens"] if isinstance(limit, int) else None


SYNCED: tuple[Row, ...] = (
    refused("sync_ref_model", False, "surefoot's reference model never changes"),
    *all_listed("belongs to sync_ref_model", ref_model_mixup_alpha=0.6, ref_model_sync_steps=512),
)
_SHARED: tuple[Row, ...] = (
    carried("learning_rate", 1e-6, "optim.lr"),
    carried("disable_dropout", False, "model.dropout", dropped, back=differs("model.dropout", "own")),
    listed("shuffle_dataset", True, "every epoch is shuffled with the seed"),
    joint("reward_funcs", None, ("grpo.rewards", "grpo.overlong"), "TRL's own, or MODULE.FUNCTION, which is read",
          back=lambda ours: written(ours, models=False)),
    joint("reward_model_name_or_path", None, ("grpo.rewards",), "a sequence classifier with one label", type=text,
          back=written_model),
    joint("reward_weights", None, ("grpo.rewards",), back=written_weights),
    listed("num_generations_eval", None, "evaluation answers each prompt greedily; grpo.eval_answers draws more"),
    joint("max_completion_length", 512, ("grpo.max_new_tokens",), type=whole,
          null=Refusal("null sets no limit to answers", "set one")),
    joint("max_prompt_length", None, ("data.max_length",), "of earlier versions; longer prompts are left out",
          type=whole, back=_prompt_length),
    joint("generation_batch_size", None, ("grpo.rollout_batches",), "a multiple of a step's answers", type=whole,
          back=lambda ours: ours["batch.size"] * ours["grpo.rollout_batches"]),
    joint("steps_per_generation", None, ("grpo.rollout_batches",), "micro-batches; a multiple of a step", type=whole,
          back=never),
    carried("num_iterations", 1, "grpo.epochs"),
    carried("temperature", 1.0, "grpo.temperature"),
    joint("top_p", 1.0, ("grpo.top_p",)),
    joint("top_k", 0, ("grpo.top_k",), null=0, back=lambda ours: ours["grpo.top_k"] or 0),
    refused("min_p", None, "surefoot draws by top_p and top_k", same=(0,)),
    refused("repetition_penalty", 1.0, "a penalty would change the probabilities that the loss compares"),
    refused("generation_kwargs", None, "surefoot draws by temperature, top_p and top_k", same=({},)),
    carried("chat_template_kwargs", None, "data.template_arguments", template_arguments, type=group,
            back=unless("data.template_arguments", {})),
    joint("epsilon", 0.2, ("grpo.clip_low", "grpo.clip_high"), back=lambda ours: _clip(ours, "low")),
    joint("epsilon_high", None, ("grpo.clip_high",), "epsilon if not given", type=number,
          back=lambda ours: _clip(ours, "high")),
    joint("mask_truncated_completions", False, ("grpo.overlong",), back=equals("grpo.overlong", "mask")),
    *SYNCED,
    joint("use_vllm", False, ("grpo.engine",), back=equals("grpo.engine", "vllm")),
    joint("vllm_mode", "colocate", ("grpo.engine",), type=text, back=reverse("grpo.engine", {"server": "vllm"})),
    joint("vllm_server_base_url", None, ("grpo.vllm_url",), type=text),
    joint("vllm_server_host", "0.0.0.0", ("grpo.vllm_url",), type=text, back=never),
    joint("vllm_server_port", 8000, ("grpo.vllm_url",), back=never),
    refused("vllm_structured_outputs_regex", None, "surefoot restricts no answers to a pattern"),
    *all_listed("is for the server, which has flags of its own", vllm_model_impl="vllm", vllm_enable_sleep_mode=False,
                vllm_server_timeout=240.0, vllm_group_port=51216, vllm_gpu_memory_utilization=0.3,
                vllm_max_model_length=None, vllm_tensor_parallel_size=1),
    *all_listed(_SPEED, ds3_gather_for_generation=True, cache_implementation=None,
                use_transformers_continuous_batching=False, transformers_continuous_batching_config=None,
                use_transformers_paged=False),
    *all_listed("answers.jsonl has every answer with its scores", log_completions=False, log_multimodal=True,
                num_completions_to_print=None, log_unique_prompts=False),
)  # fmt: skip
GRPO_ROWS: tuple[Row, ...] = (
    *_SHARED,
    carried("num_generations", 8, "grpo.group"),
    joint("beta", 0.0, ("grpo.kl",)),
    joint("use_bias_correction_kl", True, ("grpo.kl_by_ratio",), "where beta is not 0"),
    joint("loss_type", "dapo", ("grpo.loss",), f"{', '.join(_LOSSES[:-1])} or {_LOSSES[-1]}", type=text,
          back=lambda ours: "grpo" if ours["grpo.loss"] == "gspo" else ours["grpo.loss"]),
    joint("importance_sampling_level", "token", ("grpo.loss",), "sequence with loss_type: grpo is gspo", type=text,
          back=reverse("grpo.loss", {"sequence": "gspo"})),
    joint("scale_rewards", "group", ("grpo.scale",), "group (or true), batch, none (or false)", type=_scale,
          back=_scale_of),
    refused("multi_objective_aggregation", "sum_then_normalize", "surefoot adds scores up first"),
    refused("delta", None, "surefoot's ratio has one bound on each side"),
    refused("top_entropy_quantile", 1.0, "surefoot learns from all tokens"),
    refused("entropy_coef", 0.0, "surefoot's loss has no entropy term"),
    refused("use_adaptive_entropy", False, "surefoot's loss has no entropy term"),
    *all_listed("belongs to use_adaptive_entropy", entropy_coef_min=0.0, entropy_coef_max=1.0, entropy_coef_delta=0.005,
                entropy_target=0.2),
    refused("off_policy_mask_threshold", None, "surefoot masks no answers by their divergence"),
    refused("cast_lm_head_to_fp32", False, "surefoot's head has the type of the model"),
    *all_listed(_OTHER_LOSS, sapo_temperature_neg=1.05, sapo_temperature_pos=1.0, vespo_k_pos=2.0, vespo_lambda_pos=3.0,
                vespo_k_neg=3.0, vespo_lambda_neg=2.0),
    joint("vllm_importance_sampling_correction", True, ("grpo.correction",), "with a server",
          back=differs("grpo.correction", "none")),
    joint("vllm_importance_sampling_mode", "sequence_mask", ("grpo.correction",), type=text,
          back=unless("grpo.correction", "none")),
    joint("vllm_importance_sampling_clip_max", 3.0, ("grpo.correction_high",), type=number),
    joint("vllm_importance_sampling_clip_min", None, ("grpo.correction_low",), type=number),
    refused("max_tool_calling_iterations", None, "a config of TRL has no tools"),
    refused("log_completions_hub_repo", None, "surefoot uploads no answers"),
)  # fmt: skip
RLOO_ROWS: tuple[Row, ...] = (
    *_SHARED,
    carried("num_generations", 2, "grpo.group"),
    joint("beta", 0.05, ("grpo.kl",)),
    refused("normalize_advantages", False, "surefoot's rloo does not divide by a deviation"),
    refused("reward_clip_range", None, "surefoot clips no scores"),
)
GROUP_ALIASES = {"vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max"}


def set_grpo(
    draft: Draft,
    before: str = "",
    model: str | None = "reward_model_name_or_path",
    beta: str = "beta",
    rewards: Rewards = OWN,
) -> None:
    """Set grpo.* for TRL's GRPOTrainer.

    before: what stands before TRL's names in the dialect.
    model: name of the setting with a reward model, None if reward_funcs may name one.
    beta: name of the setting with the KL penalty.
    rewards: those of the tool, by name.
    """
    loss = _set_loss(draft, before) or "dapo"  # whatever else is refused is told as well
    scale, own = draft[f"{before}scale_rewards"], GROUP_LOSSES[loss].scale
    draft.set("grpo.scale", "auto" if scale == own else scale, f"{before}scale_rewards")
    by_ratio = f"{before}use_bias_correction_kl"
    if draft[beta]:
        draft.set("grpo.kl", draft[beta], beta)
        draft.set("grpo.kl_by_ratio", draft[by_ratio], by_ratio)
    else:
        draft.drop("there is no penalty", beta, by_ratio)
    _set_rest(draft, loss, before, model, rewards)
    _set_correction(draft, before)


def set_rloo(draft: Draft) -> None:
    """Set grpo.* for TRL's RLOOTrainer."""
    draft.set("grpo.loss", "rloo", why="the command's method")
    draft.set("grpo.kl", draft["beta"], "beta")
    _set_rest(draft, "rloo", "", "reward_model_name_or_path")


def _set_loss(draft: Draft, before: str) -> str | None:
    kind, level = draft[f"{before}loss_type"], draft[f"{before}importance_sampling_level"]
    names = (f"{before}loss_type", f"{before}importance_sampling_level")
    if kind not in _LOSSES:
        draft.refuse(names[0], f"surefoot has no loss {kind}", f"choose from {', '.join(_LOSSES)}")
        return None
    if level == "sequence" and kind == "grpo":
        draft.set("grpo.loss", "gspo", *names)
        return "gspo"
    if level != "token":
        what = f"surefoot has no loss {kind} by {level}"
        draft.refuse(names[1], what, "use loss_type: grpo with it, which is gspo, or leave it out")
        return None
    several = draft.processes * _accumulated(draft) > 1
    draft.set("grpo.loss", kind, *names, why=_OWN_MEANS if kind == "bnpo" and several else "")
    return kind


def _set_rest(draft: Draft, loss: str, before: str, model: str | None, rewards: Rewards = OWN) -> None:
    limit = draft[f"{before}max_completion_length"]
    draft.set("grpo.max_new_tokens", limit, f"{before}max_completion_length")
    set_rewards(
        draft, f"{before}reward_funcs", f"{before}reward_weights", model, f"{before}max_completion_length", rewards
    )
    _set_clip(draft, loss, before)
    _set_generation(draft, before)
    _set_engine(draft, before)
    if draft[f"{before}mask_truncated_completions"]:
        if draft.written("grpo.overlong") is not None:
            draft.refuse(f"{before}mask_truncated_completions", "long answers are penalized already", "keep one")
            return
        why = _MASKED if loss == "rloo" else ""
        draft.set("grpo.overlong", "mask", f"{before}mask_truncated_completions", why=why)


def _set_clip(draft: Draft, loss: str, before: str) -> None:
    low, high = f"{before}epsilon", f"{before}epsilon_high"
    above = draft[low] if draft[high] is None else draft[high]
    names = (low,) if draft[high] is None else (high,)
    facts = GROUP_LOSSES[loss]
    if facts.weighs:  # TRL's bound is that of the ratio itself
        if above <= 1:
            what = f"bounds the ratio of {loss} by {above:g}, so it would never be 1"
            draft.refuse(names[0], what, f"set {high}, such as 5")
            return
        draft.set("grpo.clip_high", _auto(above - 1, facts.clip[1]), *names)
        draft.drop(f"{loss} has no lower bound", low)
        return
    if draft[low] <= 0 or above <= 0:
        draft.refuse(low if draft[low] <= 0 else high, "expected a number above 0")
        return
    draft.set("grpo.clip_low", _auto(draft[low], facts.clip[0]), low)
    draft.set("grpo.clip_high", _auto(above, facts.clip[1]), *names)


def _auto(value: float, own: float | None) -> float | str:
    return "auto" if value == own else value


def _accumulated(draft: Draft) -> int:
    return max(1, draft["gradient_accumulation_steps"])  # a smaller number is refused where the batch is set


def _set_generation(draft: Draft, before: str) -> None:
    """Set grpo.rollout_batches, and how tokens are drawn."""
    for name, off in (("top_p", 1), ("top_k", 0)):
        given = draft[f"{before}{name}"]
        value = None if name == "top_k" and given == 0 else given
        draft.set(f"grpo.{name}", value, f"{before}{name}", why="" if given == off else _KEPT)
    size, steps = f"{before}generation_batch_size", f"{before}steps_per_generation"
    passes = _accumulated(draft)
    answers = draft.written("batch.size") or 1
    of_a_step = answers // passes
    known = steps in draft.rows
    if draft[size] is not None and known and draft[steps] is not None:
        draft.refuse(steps, "generation_batch_size is set as well", "keep one of the two")
        return
    drawn = draft[size] or (of_a_step * draft[steps] if known and draft[steps] else answers)
    names = tuple(name for name in (size, steps) if name in draft.rows)
    if drawn % answers:
        what = f"draws {drawn} answers at once, and a step learns from {answers}"
        draft.refuse(names[0] if draft[size] else names[-1], what, f"make it a multiple of {answers}")
        return
    draft.set("grpo.rollout_batches", drawn // answers, *names, why=_SPLIT if drawn > answers else "")


def _set_engine(draft: Draft, before: str) -> None:
    names = [
        f"{before}{name}" for name in ("vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
    ]
    names = [name for name in names if name in draft.rows]
    use = f"{before}use_vllm"
    if not draft[use]:
        draft.drop("use_vllm is off", use, *names)
    elif draft[f"{before}vllm_mode"] == "server":
        base = f"{before}vllm_server_base_url"
        address = draft[base] if base in draft.rows else None
        address = address or f"http://{draft[f'{before}vllm_server_host']}:{draft[f'{before}vllm_server_port']}"
        draft.set("grpo.engine", "vllm", use, f"{before}vllm_mode", why=_SERVER)
        draft.set("grpo.vllm_url", address.replace("//0.0.0.0", "//127.0.0.1"), *names[1:])
    else:
        draft.note(use, "changed", _COLOCATED, "grpo.engine")
        draft.drop("there is no server", *names)


def _set_correction(draft: Draft, before: str) -> None:
    part = f"{before}vllm_importance_sampling_"
    names = [name for name in draft.rows if name.startswith(part)]
    if draft.written("grpo.engine") != "vllm":
        draft.drop("answers are drawn by the model that learns", *names)
    elif not draft[f"{part}correction"]:
        draft.drop("is off", *names)
    else:
        draft.set("grpo.correction", draft[f"{part}mode"], f"{part}correction", f"{part}mode")
        draft.set("grpo.correction_high", draft[f"{part}clip_max"], f"{part}clip_max")
        if f"{part}clip_min" in draft.rows:
            draft.set("grpo.correction_low", draft[f"{part}clip_min"], f"{part}clip_min")
