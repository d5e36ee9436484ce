"""Rules for torchtune settings that have to be translated together."""

from __future__ import annotations

import posixpath

from surefoot.interop.draft import Draft
from surefoot.interop.settings import ALL_POSITIONS, NO_LIMIT
from surefoot.interop.shared_rules import (
    HEAD_NOT_ROUNDED,
    KEEP_ALL,
    counted,
    set_batch,
    set_keep,
    set_rows,
)
from surefoot.interop.torchtune.rows import TRAINABLE, family, last_name
from surefoot.interop.torchtune.vision import CAULDRON, FAMILY, sees, set_adapted, set_trained, trainable

_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_FUSED = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"), **dict.fromkeys(_MLP[:2], "gate_up_proj")}
_FUSING = ("phi3", "phi4")  # families whose checkpoints have the matrices of _FUSED, which torchtune splits
_ONE_ADAPTER = "torchtune splits this matrix of the model and adapts the parts named; here one adapter is on all of it"
_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "bitsandbytes.optim.AdamW": "adamw",
    "bitsandbytes.optim.PagedAdamW": "adamw",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw_8bit",
    "torch.optim.SGD": "sgd",
}
_LOSSES = ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss", "CrossEntropyLoss")
# Loss of pairs -> (surefoot's, the setting that is its beta)
_OF_PAIRS = {"DPOLoss": ("sigmoid", "loss.beta"), "RSOLoss": ("hinge", "loss.gamma")}
_DTYPES = ("bf16", "fp16", "fp32")


def set_model(draft: Draft) -> None:
    if "Meta" in last_name(draft["checkpointer._component_"]):
        fix = "use FullModelHFCheckpointer and a folder with config.json"
        draft.refuse("checkpointer._component_", "surefoot reads Hugging Face's format", fix)
    draft.note("checkpointer._component_", "listed", "surefoot reads Hugging Face's format")


def set_adapter(draft: Draft) -> None:
    builder = last_name(draft["model._component_"])
    given = (
        "lora_attn_modules",
        "apply_lora_to_mlp",
        "apply_lora_to_output",
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "use_dora",
    )
    words = [f"model.{name}" for name in given]
    if not builder.startswith(("lora_", "qlora_")):
        draft.note("model._component_", "carried", "no adapter: all weights train", "model.path")
        draft.drop("the model has no adapter", *words, "model.quantize_base")
        return
    draft.set("adapter.kind", "dora" if draft["model.use_dora"] else "lora", "model._component_", "model.use_dora")
    draft.note("model._component_", "carried", "that it has an adapter; the rest is read from the model's own files")
    for name, key in (("lora_rank", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
        draft.set(f"adapter.{key}", draft[f"model.{name}"], f"model.{name}")
    named = draft["model.lora_attn_modules"] or []
    if unknown := [name for name in named if name not in _ATTENTION]:
        draft.refuse(
            "model.lora_attn_modules", f"torchtune has no {unknown[0]}", f"choose from {', '.join(_ATTENTION)}"
        )
        return
    with_mlp = draft["model.apply_lora_to_mlp"]
    targets = [*(_ATTENTION[name] for name in named), *(_MLP if with_mlp else ())]
    targets += ["lm_head"] if draft["model.apply_lora_to_output"] else []
    if not targets:
        draft.refuse("model.lora_attn_modules", "names no module", "name at least one")
        return
    if sees(draft):
        attention = [_ATTENTION[name] for name in named]
        set_adapted(draft, attention, mlp=with_mlp, output=draft["model.apply_lora_to_output"])
        for name in words[:3]:
            draft.note(name, "carried", "", "adapter.targets")
        return
    fused = _FUSED if family(draft["model._component_"]) in _FUSING else {}
    draft.set("adapter.targets", list(dict.fromkeys(fused.get(name, name) for name in targets)), *words[:3])
    if any(name in fused for name in named):
        draft.note("model.lora_attn_modules", "changed", _ONE_ADAPTER, "adapter.targets")
    if fused and with_mlp:
        draft.note("model.apply_lora_to_mlp", "changed", _ONE_ADAPTER, "adapter.targets")


def set_parts(draft: Draft) -> None:
    """Set which parts of a model that also sees train: texts reach the decoder alone."""
    decoder = draft[TRAINABLE[0]]
    if sees(draft):
        if draft.written("adapter") is None:
            set_trained(draft)
        return
    if family(draft["model._component_"]) == FAMILY and not trainable(draft)["decoder"]:
        what = "texts reach the decoder alone, and it is frozen: nothing would learn"
        draft.refuse(TRAINABLE[0], what, f"train the decoder, or use {CAULDRON}")
        return
    for name in TRAINABLE:
        draft.note(name, "changed", draft.rows[name].about, "adapter" if decoder == "lora" else "model.path")
    if decoder in ("frozen", False):
        draft.refuse(TRAINABLE[0], "surefoot trains the language model, or an adapter on it", "train the decoder")
    elif decoder not in (None, True, "full", "lora"):
        draft.refuse(TRAINABLE[0], f"torchtune has no {decoder}", "use full or lora")


def set_loss(draft: Draft) -> None:
    """Set alignment.*, or note cross-entropy."""
    loss, pairs = last_name(draft["loss._component_"]), draft.written("stage") == "dpo"
    own = ("loss.beta", "loss.gamma", "loss.label_smoothing")
    if pairs != (loss in _OF_PAIRS):
        what = f"{loss or 'cross-entropy'} does not go with {last_name(draft['dataset._component_'])}"
        draft.refuse("loss._component_", what, f"pairs need {' or '.join(_OF_PAIRS)}")
    elif not pairs:
        if loss not in ("", *_LOSSES):
            draft.refuse("loss._component_", f"surefoot's loss is cross-entropy, not {loss}")
        draft.note("loss._component_", "carried", "cross-entropy over the tokens of a step")
        draft.drop("the loss does not read it", *own, "ref_checkpointer.checkpoint_dir")
    else:
        ours, beta = _OF_PAIRS[loss]
        draft.set("alignment.loss", ours, "loss._component_")
        draft.set("alignment.beta", draft[beta], beta)
        if ours == "sigmoid":
            draft.set("alignment.label_smoothing", draft["loss.label_smoothing"], "loss.label_smoothing")
        draft.drop("the loss does not read it", *(name for name in own if name != beta))
        _set_reference(draft)


def _set_reference(draft: Draft) -> None:
    name, model = "ref_checkpointer.checkpoint_dir", draft["checkpointer.checkpoint_dir"]
    reference = draft[name]
    if reference and posixpath.normpath(reference) != posixpath.normpath(str(model)):
        draft.set("alignment.reference", reference, name)
    else:
        draft.note(name, "carried", "the model as it was before training", "alignment.reference")


_CONTINUED = "longer texts continue in further examples; torchtune drops what is left"


def set_length(draft: Draft) -> None:
    """Set data.max_length; torchtune's tokenizers truncate nothing if it is null or not given."""
    name = "tokenizer.max_seq_len"
    texts = last_name(draft["dataset._component_"]) == "text_completion_dataset"
    why = NO_LIMIT if draft[name] is None else _CONTINUED if texts else draft.rows[name].about
    draft.set("data.max_length", draft[name] or ALL_POSITIONS, name, why=why)
    draft.note(name, "carried", NO_LIMIT, "data.max_length")


def set_precision(draft: Draft) -> None:
    dtype, quantized = draft["dtype"], draft["model.quantize_base"]
    if dtype not in _DTYPES:
        draft.refuse("dtype", f"torchtune has no {dtype}", f"choose from {', '.join(_DTYPES)}")
        return
    adapted = draft.written("adapter") is not None
    master = "" if dtype == "fp32" else "trained weights are kept in fp32"
    draft.set("precision.compute", dtype, "dtype", why=master)
    if quantized or last_name(draft["model._component_"]).startswith("qlora_"):
        why = "the vision tower stays in the compute dtype" if draft.written("vision") else ""
        draft.set("precision.base", "nf4", "model.quantize_base", "model._component_", why=why)
    elif adapted:
        draft.set("precision.base", dtype, "dtype", why=master)


_DIVERGENCES = {
    f"{kind}KL{form}Loss": beta
    for kind, beta in (("Forward", 0.0), ("Reverse", 1.0))
    for form in ("", "WithChunkedOutput")
}
_QAT = "Int8DynActInt4WeightQATQuantizer"


def set_qat(draft: Draft) -> None:
    quantizer = last_name(draft["quantizer._component_"])
    if quantizer not in ("", _QAT):
        draft.refuse("quantizer._component_", f"surefoot does not support torchtune's {quantizer}", f"use {_QAT}")
    elif quantizer:
        draft.set("precision.qat", "int8-int4", "quantizer._component_", why=HEAD_NOT_ROUNDED)
        draft.set("precision.qat_group_size", draft["quantizer.groupsize"], "quantizer.groupsize")
        if draft["fake_quant_after_n_steps"] == 0:
            what, fix = "0 turns rounding off at step 0 and never on", "leave it out"
            draft.refuse("fake_quant_after_n_steps", what, fix)
        else:
            draft.set("precision.qat_after", draft["fake_quant_after_n_steps"] or 0, "fake_quant_after_n_steps")
    else:
        names = ("quantizer._component_", "quantizer.groupsize", "fake_quant_after_n_steps")
        draft.drop("no quantization is requested", *names)


_PACKED = "torchtune fills rows in the order of the file and leaves no place in an earlier one, so it has a few more"


def set_teacher(draft: Draft) -> None:
    """Set distill.*: torchtune's loss is (1 - kd_ratio) x cross entropy + kd_ratio x divergence."""
    names = [name for name in draft.rows if name.startswith(("teacher_", "kd_"))]
    teacher, loss, ratio = draft["teacher_checkpointer.checkpoint_dir"], draft["kd_loss._component_"], draft["kd_ratio"]
    if teacher is None and loss is None:
        draft.drop("there is no teacher", *names)
        return
    beta = _DIVERGENCES.get(last_name(loss))
    if teacher is None or beta is None:
        name = "kd_loss._component_" if teacher else "teacher_checkpointer.checkpoint_dir"
        fix = f"give the teacher's folder, and one of {', '.join(_DIVERGENCES)}"
        draft.refuse(name, "a divergence and a teacher belong together", fix)
    elif draft.written("stage") != "sft":
        draft.refuse("dataset._component_", "surefoot distills on answers, not on plain texts", "use another dataset")
    elif draft["dataset.packed"]:
        draft.refuse("dataset.packed", "surefoot distills on examples, not on packed rows", "leave it out")
    elif not 0 < ratio <= 1 or "Adam" not in str(draft["optimizer._component_"]) or draft["clip_grad_norm"]:
        # sft + divergence is the same loss times 1 / kd_ratio, and only AdamW's step does not see a factor.
        what = "surefoot weighs the cross entropy, not the divergence, which is the same with AdamW and no clipping"
        draft.refuse("kd_ratio", what, "use AdamW without clip_grad_norm and a ratio above 0")
    else:
        draft.set("stage", "distill", "teacher_checkpointer.checkpoint_dir")
        draft.set("distill.teacher", teacher, "teacher_checkpointer.checkpoint_dir")
        draft.set("distill.beta", beta, "kd_loss._component_")
        why = f"the loss is {1 / ratio:g} times torchtune's, and AdamW's step does not depend on a factor"
        draft.set("distill.sft", (1 - ratio) / ratio, "kd_ratio", why=why)


def set_steps(draft: Draft) -> None:
    set_batch(draft, "batch_size", "gradient_accumulation_steps")
    if draft["dataset.packed"] and draft["tokenizer.max_seq_len"] is None:
        draft.refuse("dataset.packed", "needs a length of the rows", "set tokenizer.max_seq_len")
    elif draft["dataset.packed"]:
        names = ("dataset.packed", "tokenizer.max_seq_len", "batch_size")
        set_rows(draft, draft["tokenizer.max_seq_len"], *names, why=_PACKED)
    epochs, most = draft["epochs"], draft["max_steps_per_epoch"]
    if epochs < 1:
        draft.refuse("epochs", f"expected a number from 1, got {epochs}")
    elif most:
        why = "the same total; in torchtune an epoch with fewer steps ends earlier"
        draft.set("duration", counted(epochs * most, "step"), "epochs", "max_steps_per_epoch", why=why)
    else:
        draft.set("duration", counted(epochs, "epoch"), "epochs")
    optimizer = draft["optimizer._component_"]
    if optimizer not in _OPTIMIZERS:
        draft.refuse(
            "optimizer._component_", f"surefoot does not support {optimizer}", f"supported: {', '.join(_OPTIMIZERS)}"
        )
        return
    paged = "the optimizer state is not paged to the CPU" if "Paged" in optimizer else ""
    draft.set("optim.name", _OPTIMIZERS[optimizer], "optimizer._component_", why=paged)
    usual = 0.0 if optimizer == "torch.optim.SGD" else 0.01
    decay = draft["optimizer.weight_decay"]
    why = "" if decay is not None else f"the default of {optimizer}"
    draft.set("optim.weight_decay", usual if decay is None else decay, "optimizer.weight_decay", why=why)
    schedule, warmup = last_name(draft["lr_scheduler._component_"]), draft["lr_scheduler.num_warmup_steps"]
    if schedule not in ("", "get_cosine_schedule_with_warmup"):
        draft.refuse(
            "lr_scheduler._component_",
            f"surefoot does not support torchtune's {schedule}",
            "use get_cosine_schedule_with_warmup",
        )
        return
    constant = "without lr_scheduler the rate is constant"
    draft.set(
        "optim.schedule",
        "cosine" if schedule else "constant",
        "lr_scheduler._component_",
        why="" if schedule else constant,
    )
    rise = counted(warmup, "step") if schedule and warmup else 0.0
    draft.set("optim.warmup", rise, "lr_scheduler.num_warmup_steps")
    if schedule and warmup:
        draft.set("optim.warmup_from_zero", True, "lr_scheduler.num_warmup_steps")


def set_rest(draft: Draft) -> None:
    if not draft["clip_grad_norm"]:
        draft.set("optim.max_grad_norm", None, "clip_grad_norm", why="torchtune does not clip by default")
    draft.set("checkpoint.every", "1 epoch", why="torchtune saves after each epoch")
    if keep := draft["checkpointer.keep_last_n_checkpoints"]:
        set_keep(draft, keep, "checkpointer.keep_last_n_checkpoints")
    else:
        draft.set("checkpoint.keep", KEEP_ALL, why="torchtune deletes no checkpoint")
    alone = draft.processes == 1
    draft.note("fsdp_cpu_offload", "listed" if alone else "carried", "is for several processes" if alone else "",
               *(() if alone else ("parallel.offload",)))  # fmt: skip
    if draft["device"] == "cpu":
        draft.environment["CUDA_VISIBLE_DEVICES"] = ""
    draft.note("device", "carried", "" if draft["device"] == "cpu" else "the accelerator, if there is one")
    if draft["resume_from_checkpoint"]:
        draft.arguments.append("--resume")
    draft.note("resume_from_checkpoint", "carried", "", *(["--resume"] if draft["resume_from_checkpoint"] else []))
    loggers = {
        "WandBLogger": ["wandb"],
        "TensorBoardLogger": ["tensorboard"],
        "DiskLogger": [],
        "StdoutLogger": [],
        "": [],
    }
    logger = last_name(draft["metric_logger._component_"])
    if logger not in loggers:
        draft.refuse("metric_logger._component_", f"surefoot has no {logger}", "use WandBLogger or TensorBoardLogger")
        return
    details = ("metric_logger.project", "metric_logger.name")
    draft.set("report_to", loggers[logger], "metric_logger._component_")
    if loggers[logger]:
        for name in (name for name in details if draft[name]):
            draft.set(f"tracking.{last_name(name)}", draft[name], name)
    else:
        draft.drop("there is no tracker", *details)
