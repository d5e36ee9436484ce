"""Rules for ms-swift's settings that have to be translated together.

It writes prompts with templates of its own, chosen by the model's name; what an answer ends with is learned too. Facts:
swift/template, swift/loss_scale, swift/rlhf_trainers of ms-swift 4 (August 2026).
"""

from __future__ import annotations

import re
from typing import Any

from surefoot.families.other_templates import PREFIX
from surefoot.families.templates import OWN
from surefoot.interop import trainer
from surefoot.interop.adapters import set_initial, set_quantized, set_start, targets_or_pattern
from surefoot.interop.draft import Draft
from surefoot.interop.model_templates import UNTHINKING, template_of
from surefoot.interop.settings import ALL_POSITIONS, NO_LIMIT
from surefoot.interop.shared_rules import (
    NEW_ROWS,
    OF_TOKENS,
    SCALED,
    set_added,
    set_batch,
    set_patience,
    set_rows,
    set_together,
)
from surefoot.interop.swift.data import set_hub_model
from surefoot.interop.trl.group import set_grpo
from surefoot.interop.trl.methods import METHODS, set_dpo_losses, set_student
from surefoot.interop.words import plain_count

_NAMED = {  # its templates -> ours
    "qwen": f"{PREFIX}qwen2_vl", "qwen2_5": f"{PREFIX}qwen", "qwen3": UNTHINKING, "chatml": f"{PREFIX}chatml",
    "qwen3_nothinking": f"{PREFIX}qwen3_nothink", "qwen2_vl": f"{PREFIX}qwen2_vl", "qwen2_5_vl": f"{PREFIX}qwen2_vl",
}  # fmt: skip
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SHAPE = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "target_regex", "modules_to_save", "use_rslora",
          "use_dora", "init_weights")  # fmt: skip
_LONGER = {  # pretraining or not, truncation_strategy -> what happens to longer ones
    (False, "delete"): "ms-swift leaves out longer examples, which are truncated here",
    (False, "right"): "ms-swift cuts the end off; here prompts are shortened too, so that part of the answer is left",
    (True, "delete"): "ms-swift leaves out longer texts, which become several here",
    (True, "right"): "ms-swift cuts the end off longer texts, which become several here",
    (True, "split"): "the parts of a text overlap by a token here, so that each but the first is learned",
}
_RAW = "ms-swift keeps of a dialogue the last question and answer alone, which is all of it here"
_OWN_TEMPLATE = "the tokenizer's chat template; ms-swift has one of its own for each family"
_HALF = "weights that train are in fp32 here, and computed in {}"
_PACKED = "ms-swift fills rows once, the longest examples first; here they are filled anew in every epoch"
_MEANS = "a mean over all tokens of the step's chosen answers; ms-swift averages those of its forward passes"
_OFF = "TRL, on which ms-swift's trainer is built, disables all dropout in this method"
_REWARDS = {
    "accuracy": (
        {"name": "math", "field": "solution"},
        "math-verify there reads what is between <answer> tags, or the first boxed answer; here the last formula",
    ),
    "format": ({"name": "regex", "pattern": r"(?s)\A<think>.*?</think>\s*<answer>.*?</answer>\Z"}, ""),
}


def set_precision(draft: Draft) -> None:
    asked, full = draft["torch_dtype"], draft["tuner_type"] == "full"
    kind = _TYPES.get(str(asked))
    if asked is not None and kind is None:
        draft.refuse("torch_dtype", f"{asked} is not a type of weights", f"use {', '.join(_TYPES)}")
        return
    half = draft["bf16"] if draft["bf16"] is not None else draft["fp16"]
    compute = "bf16" if draft["bf16"] else "fp16" if draft["fp16"] else None
    compute = compute or ("fp32" if half is False else {"fp32": "fp16"}.get(str(kind), kind))
    if compute is None:
        draft.assume("torch_dtype: as the checkpoint", "precision as the plan finds it safe", "precision.compute")
    else:
        draft.set("precision.compute", compute, "torch_dtype", "bf16", "fp16")
    set_quantized(draft, "quant_method", "quant_bits", "bnb_4bit_use_double_quant", adapted=not full,
                  fix="tuner_type: lora")  # fmt: skip
    if draft["quant_method"] is not None or draft["quant_bits"] is not None:
        return
    if kind is not None and not full:
        draft.set("precision.base", kind, "torch_dtype")
    elif kind in ("bf16", "fp16"):
        draft.note("torch_dtype", "changed", _HALF.format(kind), "precision.compute")


def set_adapter(draft: Draft) -> None:
    kind = draft["tuner_type"]
    if draft["freeze_llm"]:
        draft.refuse("freeze_llm", "surefoot trains the language model, or an adapter on it", "leave it out")
    for name, part in (("freeze_vit", "tower"), ("freeze_aligner", "projector")):
        if draft[name]:
            draft.note(name, "carried", "also frozen here")
        elif kind == "full":
            draft.set(f"vision.{part}", "trained", name)
        else:
            draft.refuse(name, "ms-swift adapts it; surefoot trains it whole or not", "leave it out")
    if kind not in ("lora", "full", "lora_llm"):
        draft.refuse("tuner_type", f"surefoot has no {kind}", "use lora or full")
        return
    if kind == "lora_llm":
        draft.refuse("tuner_type", "surefoot trains no whole tower beside an adapter", "use lora or full")
    if kind == "full":
        draft.note("tuner_type", "carried", "no adapter")
        draft.drop("tuner_type is full", *_SHAPE)
        if draft["adapters"]:
            draft.refuse("adapters", "needs tuner_type: lora", "merge it first (surefoot export --merge)")
        return
    dropout = draft.written("model.dropout") is None
    if draft["adapters"]:
        if len(draft["adapters"]) > 1:
            draft.refuse("adapters", "surefoot goes on with one adapter", "name one")
            return
        draft.take("adapters", draft["adapters"][0])
        draft.note("tuner_type", "carried")
        set_initial(draft, "adapters", _SHAPE, dropout=dropout)
        return
    draft.set("adapter.kind", "dora" if draft["use_dora"] else "lora", "tuner_type", "use_dora")
    draft.set("adapter.rank", draft["lora_rank"], "lora_rank")
    draft.set("adapter.alpha", float(draft["lora_alpha"]), "lora_alpha")
    if dropout:
        draft.set("adapter.dropout", draft["lora_dropout"], "lora_dropout")
    else:
        draft.drop(_OFF, "lora_dropout")
    draft.set("adapter.rslora", draft["use_rslora"], "use_rslora")
    set_start(draft, "init_weights")
    draft.set("adapter.modules_to_save", draft["modules_to_save"] or [], "modules_to_save")
    named = draft["target_modules"]
    named = [named] if isinstance(named, str) else named
    if pattern := draft["target_regex"]:
        draft.set("adapter.targets", targets_or_pattern(pattern), "target_regex")
        draft.drop("target_regex takes precedence", "target_modules")
    elif ("all-linear" in named and len(named) > 1) or "all-embedding" in named:
        draft.refuse("target_modules", "all-linear is one of several here", "name the others in modules_to_save")
    else:
        draft.set("adapter.targets", "all-linear" if named == ["all-linear"] else named, "target_modules")


_SIDES = ((r"qwen2(\.5)?-(vl|omni)", 28), (r"qwen3-(vl|omni)|qwen3\.\d", 32))  # family -> pixels beside a token


def set_pixels(draft: Draft) -> None:
    """Set data.max_pixels from the variables that ms-swift reads for Qwen's models: tokens of a picture, or pixels."""
    name = (draft["model"] or "").rstrip("/").rpartition("/")[2].lower()
    side = next((side for family, side in _SIDES if re.match(family, name)), None)
    tokens, pixels = (
        plain_count(draft.environment.get(one, "").strip()) for one in ("IMAGE_MAX_TOKEN_NUM", "MAX_PIXELS")
    )
    if side and (tokens or pixels) and draft["max_pixels"] is None:
        most = (tokens or (pixels or 0) // side**2) * side**2
        draft.set("data.max_pixels", most, why=f"IMAGE_MAX_TOKEN_NUM or MAX_PIXELS; {SCALED}")


def set_texts(draft: Draft) -> None:
    """Set data.template, data.train_on and data.max_length. The stage is written."""
    stage = draft.written("stage")
    limit, how = draft["max_length"], draft["truncation_strategy"]
    _set_length(draft, stage, limit, how)
    if draft["enable_dft_loss"] and stage in ("sft", "pretrain"):
        draft.set("sft.loss", "dft", "enable_dft_loss", why=OF_TOKENS)
    if stage == "pretrain":
        draft.drop("plain texts have no turns", "template", "agent_template", "use_chat_template", "loss_scale")
        return
    orpo = stage == "dpo" and draft["rlhf_type"] == "orpo"
    scales = set(str(draft["loss_scale"] or ("default" if stage == "sft" or orpo else "last_round")).split("+"))
    if other := scales - {"default", "last_round", "all", "ignore_empty_think"}:
        draft.refuse("loss_scale", f"surefoot has no {min(other)}: tokens are learned or not", "use default")
    learned = "last" if "last_round" in scales else "everything" if "all" in scales else "responses"
    if stage in ("sft", "distill"):
        draft.set("data.train_on", learned, "loss_scale")
    elif learned != "last":
        draft.assume("earlier answers of a pair", "count in ms-swift's loss; here the last do", "alignment.loss")
    draft.note("loss_scale", "carried", "", "data.train_on")
    draft.drop("the template decides in training", "enable_thinking")
    if draft["use_chat_template"] is False:
        draft.set("data.template", "raw", "use_chat_template", why=_RAW)
        draft.set("bos.prepend", "tokenizer", why="ms-swift begins a text as the tokenizer does")
        draft.drop("texts have no template", "template", "agent_template")
        return
    draft.note("use_chat_template", "carried")
    name, agent = draft["template"], draft["agent_template"]
    if name is not None and name not in _NAMED:
        draft.refuse("template", f"surefoot has no {name}", "leave it out: the tokenizer's, or the model's by its name")
        return
    found = _NAMED[name] if name is not None else template_of(draft["model"] or "")
    if agent is not None and agent != "hermes":
        draft.refuse("agent_template", "surefoot writes tools as the model's own chat template", "leave it out")
    if agent is not None and found != OWN:
        found = OWN
        draft.note("agent_template", "changed", "tools as in the tokenizer's chat template", "data.template")
    if found == f"{PREFIX}qwen" and draft["system"] == "":
        found = f"{PREFIX}chatml"  # without a system message
    thinks = draft["enable_thinking"]
    if (stage == "grpo" or (stage == "distill" and draft["lmbda"])) and (
        (thinks and found == UNTHINKING) or (thinks is not None and found == OWN)
    ):
        draft.refuse("enable_thinking", "decides how drawn answers begin; here the template does", "leave it out")
    if found == UNTHINKING and "last_round" in scales:
        draft.assume("earlier answers", "begin with an empty thought here, unlike ms-swift's", "data.template")
    if found == UNTHINKING and "all" in scales:
        draft.assume("empty thoughts", "are learned here, unlike in ms-swift", "data.train_on")
    draft.set("data.template", found, "template", why=_OWN_TEMPLATE if found == OWN else "")
    if any(token.endswith(".txt") for token in draft["new_special_tokens"] or ()):
        draft.refuse("new_special_tokens", "surefoot reads no file of tokens", "name them in surefoot's tokenizer.add")
    set_added(draft, draft["new_special_tokens"] or (), "new_special_tokens", why=NEW_ROWS)
    draft.set("bos.prepend", "tokenizer" if found == OWN else "off", why="as ms-swift's template for the model")


def _set_length(draft: Draft, stage: Any, limit: int | None, how: str | None) -> None:
    if how not in (None, "delete", "right") and (how != "split" or stage != "pretrain"):
        draft.refuse("truncation_strategy", f"surefoot truncates at the end, not {how}", "use right or delete")
        return
    if stage == "grpo":
        if limit is None:
            draft.set("data.max_length", ALL_POSITIONS, why="ms-swift cuts no prompts then")
        else:
            why = "together with max_completion_length; longer prompts are left out"
            draft.set("data.max_length", limit + draft["max_completion_length"], "max_length", why=why)
        draft.note("truncation_strategy", "changed", "longer prompts are left out", "data.max_length")
        return
    longer = _LONGER[stage == "pretrain", how or "delete"]
    if limit is None:
        draft.set("data.max_length", ALL_POSITIONS, "max_length", why=NO_LIMIT)
    else:
        draft.set("data.max_length", limit, "max_length", why=longer)
    draft.note("truncation_strategy", "changed", longer, "data.max_length")


def set_size(draft: Draft) -> None:
    set_together(draft, "sequence_parallel_size", "sequences")
    set_batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps")


def set_packing(draft: Draft) -> None:
    if not draft["packing"]:
        draft.drop("nothing is packed", "packing", "packing_length")
    elif (length := draft["packing_length"] or draft["max_length"]) is None:
        draft.refuse("packing", "needs a length of the rows", "set max_length")
    else:
        set_rows(draft, length, "packing", "packing_length", "max_length", why=_PACKED)


def set_more(draft: Draft) -> None:
    """Set the optimizer that has a name of its own, early stopping, and what trackers there are."""
    if (name := draft["optimizer"]) == "muon":
        draft.config.setdefault("optim", {}).pop("betas", None)
        draft.set("optim.name", "muon", "optimizer", why="AdamW for embeddings, head and vectors")
    elif name is not None:
        draft.refuse("optimizer", f"surefoot has no {name}", "use optim, or muon")
    if draft["early_stop_interval"]:
        set_patience(draft, "early_stop_interval", "give split_dataset_ratio or val_dataset")


def set_trackers(draft: Draft) -> None:
    asked = draft["report_to"]
    if "swanlab" not in asked:
        trainer.set_trackers(draft)
        return
    why = "SwanLab is not one of surefoot's trackers"
    draft.set("report_to", [one for one in asked if one not in ("swanlab", "none")], "report_to", why=why)
    draft.drop("the run folder names the run", "run_name", "project")


def set_evaluation(draft: Draft) -> None:
    if draft.written("data.eval") is not None:
        trainer.set_evaluation(draft)
        return
    names = ("eval_strategy", "eval_steps", "do_eval", "load_best_model_at_end", "metric_for_best_model")
    draft.drop("ms-swift evaluates nothing without evaluation data", *names, "greater_is_better")


def set_method(draft: Draft) -> None:
    """Set alignment.*, reward.*, distill.* or grpo.*, after the batch is known."""
    asked, stage = str(draft["rlhf_type"]), draft.written("stage")
    draft.note("rlhf_type", "carried", "", "stage")
    method = {"rm": "reward", "simpo": "cpo"}.get(asked, asked)
    if method != "dpo":
        draft.drop(f"rlhf_type is {asked}", "rpo_alpha")
    if method != "gkd":
        draft.drop(f"rlhf_type is {asked}", "sft_alpha")
    if method != "grpo":
        draft.drop(f"rlhf_type is {asked}", "dynamic_sample", "max_resample_times")
    if stage == "dpo" or method == "kto":
        draft.set("alignment.beta", draft["beta"], "beta")
    _set_reference(draft, has=method in ("dpo", "kto"))
    if method not in ("gkd", "grpo"):
        draft.assume("a line break behind an answer", "belongs to the answer in ms-swift's ChatML", "data.template")
    if method == "orpo":
        draft.set("alignment.loss", "orpo", "rlhf_type")
    elif method == "cpo":
        METHODS["cpo"].rule(draft)
    {"dpo": _set_dpo, "reward": _set_reward, "gkd": _set_gkd, "grpo": _set_grpo}.get(method, lambda _: None)(draft)


def _set_reference(draft: Draft, *, has: bool) -> None:
    model = draft["ref_model"]
    if model is None:
        return
    if not has or model == draft["model"]:
        draft.drop("the reference is the model as it begins" if has else "there is no reference model", "ref_model")
        return
    set_hub_model(draft, "ref_model", "alignment.reference")


def _set_dpo(draft: Draft) -> None:
    if not set_dpo_losses(draft, "loss_type", "loss_weights", "label_smoothing", "rlhf_type"):
        return
    if (weight := draft["rpo_alpha"]) is not None:
        draft.set("alignment.sft", weight, "rpo_alpha", why=_MEANS if weight else "")


def _set_reward(draft: Draft) -> None:
    draft.drop("a reward model has no beta", "beta")
    METHODS["reward"].rule(draft)


def _set_gkd(draft: Draft) -> None:
    if draft["teacher_model_name_or_path"] == draft["model"]:
        draft.refuse("teacher_model_name_or_path", "a model does not learn from itself here", "name another")
        return
    if draft["max_completion_length"] is not None:
        draft.take("max_new_tokens", draft["max_completion_length"])
        draft.note("max_completion_length", "carried", "", "distill.max_new_tokens")
    draft.set("distill.beta", draft["beta"], "beta")
    draft.set("distill.temperature", draft["temperature"], "temperature")
    draft.set("distill.sft", draft["sft_alpha"], "sft_alpha")
    set_student(draft)


def _set_grpo(draft: Draft) -> None:
    if isinstance(kind := draft["loss_type"], list):
        draft.take("loss_type", kind[0] if len(kind) == 1 else " ".join(map(str, kind)))
    if draft["use_vllm"] and draft["vllm_mode"] is None:
        draft.refuse("vllm_mode", "ms-swift needs it with use_vllm", "colocate or server")
        return
    set_grpo(draft, rewards=_REWARDS)
    draws = draft["max_resample_times"] if draft["dynamic_sample"] else 0
    draft.set("grpo.redraw", draws, "dynamic_sample", "max_resample_times")
