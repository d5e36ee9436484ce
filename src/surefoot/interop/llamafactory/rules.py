"""Rules for LLaMA-Factory settings that have to be translated together. Those of single stages are in `methods`."""

from __future__ import annotations

from functools import partial

from surefoot.families.other_templates import PREFIX
from surefoot.interop import trainer
from surefoot.interop.adapters import MERGE, STARTED, set_initial, set_loraplus, set_quantized
from surefoot.interop.draft import Draft
from surefoot.interop.llamafactory import freeze
from surefoot.interop.llamafactory.data import (
    PICTURED,
    SAME,
    STAGES,
    UNTHINKING,
    adds_thoughts,
    set_data,
    why_not,
    writes_bos,
)
from surefoot.interop.llamafactory.methods import set_method
from surefoot.interop.settings import names
from surefoot.interop.shared_rules import OF_TOKENS, SCALED, set_added, set_patience, set_random, set_rows

_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target")
_PRECISION = "LLaMA-Factory computes in the checkpoint's dtype; surefoot uses the fastest safe one on this machine"


def set_stage(draft: Draft) -> None:
    stage = str(draft["stage"])
    if stage not in STAGES:
        draft.refuse("stage", f"LLaMA-Factory has no stage {stage}", "choose from pt, sft, rm, ppo, dpo, kto")
        return
    draft.set("stage", STAGES[stage], "stage")
    if not draft["do_train"]:
        fix = "write do_train: true; `surefoot evaluate` measures a model"
        draft.refuse("do_train", "without it LLaMA-Factory does not train", fix)
    draft.note("do_train", "carried", "a run always trains")


def set_adapter(draft: Draft) -> None:
    kind = draft["finetuning_type"]
    switches, starts = ("use_dora", "use_rslora", "pissa_init"), ("pissa_iter", "pissa_convert")
    if kind not in ("lora", "full", "freeze"):
        draft.refuse("finetuning_type", f"surefoot has no {kind}", "use lora, full or freeze")
        return
    if kind == "freeze":
        freeze.set_trained(draft)
    else:
        if draft["use_llama_pro"]:
            draft.refuse("use_llama_pro", "surefoot has no expanded blocks", "use finetuning_type: freeze")
        draft.drop(f"finetuning_type is {kind}", *freeze.SETTINGS)
    if kind != "lora":
        draft.note("finetuning_type", "carried", "no adapter")
        for name in (name for name in switches if draft[name]):
            draft.refuse(name, "needs finetuning_type: lora")
        if draft["adapter_name_or_path"] is not None:
            draft.refuse("adapter_name_or_path", "needs finetuning_type: lora", MERGE)
        draft.drop(f"finetuning_type is {kind}", *_LORA, *switches, *starts, "create_new_adapter")
        return
    if draft["adapter_name_or_path"] is not None:
        _continue(draft, (*_LORA, *switches, *starts))
        return
    draft.drop("a run without adapter_name_or_path starts with a new adapter", "create_new_adapter")
    rank, alpha = draft["lora_rank"], draft["lora_alpha"]
    if rank < 1:
        draft.refuse("lora_rank", f"expected a number from 1, got {rank}")
        return
    draft.set("adapter.kind", "dora" if draft["use_dora"] else "lora", "finetuning_type", "use_dora")
    draft.set("adapter.rank", rank, "lora_rank")
    twice = "" if alpha is not None else "twice lora_rank, the default of LLaMA-Factory"
    draft.set("adapter.alpha", float(rank * 2 if alpha is None else alpha), "lora_alpha", why=twice)
    if draft["stage"] in ("dpo", "kto"):
        draft.drop(
            "LLaMA-Factory's trainer for this stage disables all dropout, including the adapter's", "lora_dropout"
        )
    else:
        draft.set("adapter.dropout", draft["lora_dropout"], "lora_dropout")
    targets = draft["lora_target"]
    draft.set("adapter.targets", "all-linear" if targets in ("all", ["all"]) else targets, "lora_target")
    draft.set("adapter.rslora", draft["use_rslora"], "use_rslora")
    if draft["pissa_init"]:
        draft.set("adapter.start", "pissa", "pissa_init", why=STARTED)
        if draft["pissa_iter"] == -1:
            draft.note("pissa_iter", "carried", "the exact decomposition", "adapter.start")
        else:
            draft.set("adapter.start_iterations", draft["pissa_iter"], "pissa_iter")
        draft.note("pissa_convert", "carried", STARTED)
    else:
        draft.drop("belongs to pissa_init", *starts)
    if extra := draft["additional_target"]:
        draft.set("adapter.modules_to_save", extra, "additional_target")


_KT = (
    "the plan says where experts lie and are computed. KTransformers adapts routers, and gives gate and up of an "
    "expert an A each, in bf16; here they share one, in fp32, as in PEFT"
)
_BF16 = (None, "auto", "AMXBF16", "BF16")
_OTHER_NUMBERS = ("kt_weight_path", "kt_non_expert_weight_path", "kt_expert_checkpoint_path", "kt_use_lora_experts")


def set_experts(draft: Draft) -> None:
    """Set the adapters on experts and routers that KTransformers trains. Facts: kt_kernel.sft, August 2026."""
    given = draft["kt_config"] or {}
    if not draft["use_kt"]:
        draft.drop("use_kt is off", "kt_config", *_OTHER_NUMBERS)
        return
    for name in (name for name in _OTHER_NUMBERS if draft[name]):
        draft.refuse(name, "makes other experts than the model's own in bf16", "leave it out")
    kind, backend = given.get("kt_expert_weight_format"), given.get("kt_backend")
    if kind not in (None, "bf16") or backend not in _BF16:
        what = f"{kind or backend} experts are rounded before training, and surefoot's are not"
        draft.refuse("kt_config", what, "use kt_expert_weight_format: bf16 and kt_backend: AMXBF16")
        return
    if draft["finetuning_type"] != "lora":
        draft.refuse("use_kt", "surefoot takes KTransformers' LoRA alone", "leave it out")
        return
    draft.note("kt_config", "listed", "the plan says where experts lie and are computed")
    if draft["adapter_name_or_path"] is None:
        draft.set("adapter.experts", True, "use_kt", why=_KT)
        routed = draft.written("adapter.targets") == "all-linear" or "gate" in (draft["lora_target"] or ())
        draft.set("adapter.router", routed, "use_kt", why=_KT)
    else:
        draft.refuse("adapter_name_or_path", "KTransformers keeps adapters of experts in a form of its own", MERGE)


def _continue(draft: Draft, shape: tuple[str, ...]) -> None:
    """Go on with a saved adapter, as LLaMA-Factory does with the last of adapter_name_or_path."""
    path = names(draft["adapter_name_or_path"])
    if draft["create_new_adapter"]:
        what = "LLaMA-Factory merges adapter_name_or_path into the model then, and trains a new adapter"
        draft.refuse("create_new_adapter", what, MERGE)
    elif len(path) != 1:
        what = "LLaMA-Factory merges all but the last adapter into the model"
        draft.refuse("adapter_name_or_path", what, MERGE)
    elif draft["adapter_folder"]:
        draft.refuse("adapter_folder", "is within adapter_name_or_path", "name that folder in adapter_name_or_path")
    else:
        draft.note("finetuning_type", "carried")
        draft.drop("is off: training goes on with the saved adapter", "create_new_adapter")
        set_initial(draft, "adapter_name_or_path", shape, dropout=draft["stage"] not in ("dpo", "kto"))


def set_vision(draft: Draft) -> None:
    for name, part in (("freeze_vision_tower", "tower"), ("freeze_multi_modal_projector", "projector")):
        if draft[name]:
            draft.note(name, "carried", "also frozen here")
        elif draft["finetuning_type"] == "full":
            draft.set(f"vision.{part}", "trained", name)
        elif draft["finetuning_type"] == "freeze":
            draft.refuse(name, "surefoot trains all of it beside parts of a language model, or none", "leave it out")
        elif part == "projector":
            draft.drop("has no effect with LoRA in LLaMA-Factory, unless the tower has it as well", name)
        elif str(draft["template"]).startswith("qwen3") or not draft["freeze_multi_modal_projector"]:
            what = "with it LLaMA-Factory adds LoRA to linear layers of the projector, too, but not to all"
            draft.refuse(name, what, "leave it out, or name the modules in surefoot's adapter.targets")
        else:
            draft.set("vision.tower", "adapter", name)
    if draft.given("image_max_pixels") or (str(draft["template"]).startswith("qwen") and draft["template"] in PICTURED):
        draft.set("data.max_pixels", draft["image_max_pixels"], "image_max_pixels", why=SCALED)


def set_quantization(draft: Draft) -> None:
    method, bits, kind, double = (
        "quantization_method", "quantization_bit", "quantization_type", "double_quantization"
    )  # fmt: skip
    if draft[bits] is None:
        draft.drop("nothing is quantized", method, kind, double)
        return
    set_quantized(draft, method, bits, double, adapted=draft["finetuning_type"] == "lora", fix="finetuning_type: lora")
    if draft[bits] == 4 and draft[kind] != "nf4":
        draft.refuse(kind, "surefoot's 4-bit format is nf4", "leave it out")
    elif draft[bits] == 4:
        draft.note(kind, "carried", "", "precision.base")
    else:
        draft.drop("applies to 4 bits", kind)


def set_order_and_start(draft: Draft) -> None:
    if draft["disable_shuffling"]:
        draft.set("data.order", "file", "disable_shuffling")
    set_random(draft, "train_from_scratch")


def set_tokens(draft: Draft) -> None:
    """Set added tokens, after the template and the adapter. With LoRA, LLaMA-Factory trains embedding and head in full
    where it resizes them, as surefoot does for new tokens."""
    tokens = [*(draft["add_tokens"] or ()), *(draft["add_special_tokens"] or ())]
    set_added(draft, tokens, "add_tokens", "add_special_tokens")
    if tokens:
        draft.note("resize_vocab", "carried", "", "tokenizer.add")
    elif draft["resize_vocab"] and draft.written("adapter.kind") and not draft["additional_target"]:
        what = "surefoot trains embedding and head beside an adapter for new tokens alone"
        draft.refuse("resize_vocab", what, "leave it out, or name them in additional_target")
    else:
        draft.drop("rows are added where a token needs one", "resize_vocab")


def set_template(draft: Draft) -> None:
    if draft["stage"] == "pt":
        draft.drop("plain texts have no turns", "template", "default_system", "enable_thinking")
        return
    name = draft["template"]
    if name is None:
        draft.set("data.template", "tokenizer", "template", why="the tokenizer's chat template")
        if not draft["enable_thinking"]:
            what = "the tokenizer's chat template decides where thoughts go"
            draft.refuse("enable_thinking", what, "leave it out, or name a template")
        draft.note("enable_thinking", "carried", "has no effect with this template")
        return
    if name not in SAME:
        draft.refuse("template", *why_not(name))
        draft.drop("the template is not supported", "default_system", "enable_thinking")
        return
    unthinking = adds_thoughts(name) and not draft["enable_thinking"]
    draft.set("data.template", PREFIX + UNTHINKING if unthinking else SAME[name].name, "template")
    if not draft["use_bos_zero_training"]:
        draft.set("bos.prepend", "on" if writes_bos(name) else "off", "template")
    if draft["default_system"] == "" and SAME[name].default_system:
        draft.refuse("default_system", "the template has a system message of its own", "name another, such as chatml")
    draft.note("default_system", "carried", "" if draft["default_system"] else "there is none")
    draft.note("enable_thinking", "carried", "" if adds_thoughts(name) else "has no effect with this template")


def set_learned(draft: Draft) -> None:
    if draft.given("cutoff_len"):
        draft.set("data.max_length", draft["cutoff_len"], "cutoff_len")
    whole, last = draft["train_on_prompt"], draft["mask_history"]
    if draft["stage"] != "sft":
        for name in (name for name in ("train_on_prompt", "mask_history") if draft[name]):
            draft.refuse(name, "is for stage: sft", "leave it out")
    if whole and last:
        draft.refuse("mask_history", "excludes train_on_prompt", "keep one")
        return
    if whole or last:
        draft.set("data.train_on", "everything" if whole else "last", "train_on_prompt" if whole else "mask_history")
    _set_token_loss(draft)


_ANCHORED = (
    "in training, a mean over a step's tokens; LLaMA-Factory adds up the means of its micro-batches. The reference is "
    "the model before training, with LoRA the one without its adapter, where LLaMA-Factory ends with an error; "
    "evaluations report the cross entropy here"
)


def _set_token_loss(draft: Draft) -> None:
    if draft["stage"] != "sft":
        draft.drop("is for stage: sft", "use_dft_loss", "use_eaft_loss", "use_asft_loss")
    elif draft["use_asft_loss"]:
        for name in (name for name in ("use_dft_loss", "use_eaft_loss") if draft[name]):
            draft.refuse(name, "excludes use_asft_loss", "keep one")
        if draft["ref_model"] is not None:
            draft.refuse("ref_model", "use_asft_loss compares with the model before training here", "leave it out")
        draft.set("sft.loss", "asft", "use_asft_loss", why=_ANCHORED)
        draft.set("sft.kl", draft["asft_alpha"], "asft_alpha")
    elif draft["use_dft_loss"]:  # which LLaMA-Factory reads first
        draft.set("sft.loss", "dft", "use_dft_loss", why=OF_TOKENS)
    elif draft["use_eaft_loss"]:
        draft.set("sft.loss", "eaft", "use_eaft_loss", why=OF_TOKENS)
        draft.set("sft.alpha", draft["eaft_alpha"], "eaft_alpha")
    if draft.written("sft.loss") != "eaft":
        draft.drop("belongs to use_eaft_loss", "eaft_alpha")
    if draft.written("sft.loss") != "asft":
        draft.drop("belongs to use_asft_loss", "asft_alpha")


_ATTENDS = "without neat_packing the examples of a row attend to each other, which surefoot's never do"
_KNAPSACK = "LLaMA-Factory fills rows from 1000 examples at a time, longest first, so it has a few more or fewer"


def set_packing(draft: Draft) -> None:
    """Set batch.row_tokens: with packing, batches count rows of cutoff_len. Runs after batch.size is written."""
    packing, neat = draft["packing"] in (True, "true", "True"), draft["neat_packing"]
    if neat and draft["stage"] == "sft":
        draft.note("packing", "carried", "", "batch.row_tokens")
        set_rows(draft, draft["cutoff_len"], "neat_packing", "cutoff_len", why=_KNAPSACK)
        return
    if neat:
        draft.refuse("neat_packing", "LLaMA-Factory packs in this way in stage sft only", "leave it out")
        return
    if packing and draft["stage"] in ("pt", "sft"):
        fix = "add neat_packing: true, or leave it out" if draft["stage"] == "sft" else "leave it out"
        draft.refuse("packing", _ATTENDS, fix)
        return
    draft.drop("has no effect in this stage" if packing else "is off or not set", "packing", "neat_packing")
    if draft["stage"] == "pt" and draft["packing"] is None:
        joined = "LLaMA-Factory concatenates texts in this stage: batches count rows of cutoff_len there, texts here"
        draft.note("stage", "changed", joined, "batch.size")


def set_precision(draft: Draft) -> None:
    trainer.set_precision(draft, unset=None, why=_PRECISION)


def set_muon(draft: Draft) -> None:
    if draft["use_muon"]:
        draft.config.setdefault("optim", {}).pop("betas", None)
        draft.set("optim.name", "muon", "use_muon", why="AdamW for embeddings, head and vectors, as in LLaMA-Factory")
        draft.drop("use_muon takes precedence", "optim")


def set_bos(draft: Draft) -> None:
    if not draft["use_bos_zero_training"]:
        if draft.given("bos_scaling_factor"):
            fix = "add use_bos_zero_training: true, or leave it out"
            draft.refuse("bos_scaling_factor", "has no effect without use_bos_zero_training", fix)
        return
    draft.set("bos.prepend", "on", "use_bos_zero_training")
    draft.set("bos.scale", draft["bos_scaling_factor"], "bos_scaling_factor", "use_bos_zero_training")


def set_trackers(draft: Draft) -> None:
    trainer.set_trackers(draft)
    if "wandb" in (draft.written("report_to") or ()) and draft.written("tracking.project") is None:
        draft.set("tracking.project", "llamafactory", why="LLaMA-Factory's W&B project if WANDB_PROJECT is not set")


def set_output(draft: Draft) -> None:
    """Set the output; LLaMA-Factory resumes from checkpoints in it unless overwrite_output_dir is on."""
    trainer.set_output(draft)
    if not draft.arguments:
        draft.arguments.append("--resume")
        draft.assume(
            "overwrite_output_dir: false", "resumes from the newest checkpoint in output_dir, if any", "--resume"
        )


RULES = (
    set_stage,
    set_adapter,
    set_experts,
    set_vision,
    set_quantization,
    set_data,
    set_template,
    set_tokens,
    set_order_and_start,
    set_learned,
    set_precision,
    *({trainer.set_output: set_output, trainer.set_trackers: set_trackers}.get(rule, rule) for rule in trainer.RULES),
    set_packing,
    partial(set_patience, name="early_stopping_steps", fix="give val_size or eval_dataset"),
    set_muon,
    set_loraplus("loraplus_lr_ratio"),
    set_bos,
    set_method,
)
