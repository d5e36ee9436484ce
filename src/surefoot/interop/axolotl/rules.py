"""Rules for Axolotl settings that have to be translated together."""

from __future__ import annotations

from functools import partial
from typing import Any

from surefoot.interop.axolotl.data import set_data
from surefoot.interop.axolotl.methods import set_method, set_prompted
from surefoot.interop.axolotl.processes import set_processes
from surefoot.interop.axolotl.steps import (
    set_attention,
    set_evaluation,
    set_order,
    set_part_rates,
    set_saving,
    set_steps,
)
from surefoot.interop.axolotl.trained import set_adapter, set_vision
from surefoot.interop.draft import Draft
from surefoot.interop.settings import ALL_POSITIONS, names
from surefoot.interop.shared_rules import (
    HEAD_NOT_ROUNDED,
    NEW_ROWS,
    OF_TOKENS,
    resume_argument,
    set_added,
    set_random,
)
from surefoot.interop.sharing import Names, set_sharing

# In Axolotl fsdp_config alone enables FSDP.
_HEADERS = (
    "of chat_template Axolotl learns the texts of all turns and their ends; surefoot the headers between them too"
)
_NAMES = Names("micro_batch_size", "gradient_accumulation_steps", "optimizer", "lr_scheduler", implied=True)
_PLUGINS = tuple(
    f"axolotl.integrations.{name}." for name in ("liger", "cut_cross_entropy", "kernels", "swanlab", "expert_parallel")
)


_QAT = {"weight_dtype": "int8", "activation_dtype": None, "group_size": 32, "quantize_embedding": False,
        "fake_quant_after_n_steps": None}  # fmt: skip
# (weights, activations) -> surefoot's name, the only group size that Axolotl takes, and how it differs there.
_QAT_FORMS = {
    ("int4", "int8"): ("int8-int4", None, "Axolotl trains with asymmetric quantization (min to max of a group) and "
                       "converts with symmetric; here both are symmetric"),
    ("nvfp4", "nvfp4"): ("nvfp4", 16, "Axolotl asks torchao for NVFP4 of weights alone, which torchao does not train; "
                         "here weights and activations are rounded, as torchao's config for both does"),
    ("mxfp4", "mxfp4"): ("mxfp4", 32, "biases learn too, which torchao's layer leaves without a gradient"),
}  # fmt: skip


def set_qat(draft: Draft) -> None:
    given = draft["qat"]
    if given is None:
        draft.drop("no quantization is requested", "qat")
        return
    if unknown := [name for name in given if name not in _QAT]:
        draft.refuse("qat", f"Axolotl's qat has no {unknown[0]}", f"choose from {', '.join(_QAT)}")
        return
    settings = _QAT | given
    types, size = (settings["weight_dtype"], settings["activation_dtype"]), settings["group_size"]
    after = "fake_quant_after_n_steps"
    if types not in _QAT_FORMS:
        what = f"surefoot does not support {types[0]} weights with {types[1] or 'full-precision'} activations"
        draft.refuse("qat", what, "use int4 with int8, or nvfp4 or mxfp4 for both, or leave it out")
        return
    form, only, why = _QAT_FORMS[types]
    if only and size not in (None, only):
        draft.refuse("qat", f"Axolotl takes {form} in groups of {only} alone, not of {size}", f"use group_size: {only}")
    elif settings["quantize_embedding"]:
        draft.refuse("qat", "surefoot has no quantize_embedding", "leave that out")
    elif settings[after] == 0:
        draft.refuse("qat", f"{after}: 0 turns rounding off at step 0 and never on", f"leave {after} out")
    else:
        ignored = f"; {after} does not reach these layers in Axolotl" if only and settings[after] else ""
        why = f"{why}, and {HEAD_NOT_ROUNDED}{ignored}"
        draft.set("precision.qat", form, "qat", why=why)
        if not only:
            draft.set("precision.qat_group_size", size or 32, "qat", why=why)
        if settings[after] and not only:
            draft.set("precision.qat_after", settings[after], "qat", why=why)


def set_length_limit(draft: Draft) -> None:
    if draft["rl"] == "grpo":
        draft.set("data.max_length", ALL_POSITIONS, why="TRL truncates no prompts")
        draft.drop("is not for rl: grpo", "sequence_len", "excess_length_strategy", "train_on_inputs")
        return
    strategy = draft["excess_length_strategy"] or "drop"
    cut = strategy == "truncate"
    draft.set(
        "data.max_length", draft["sequence_len"], "sequence_len", why="" if cut else draft.rows["sequence_len"].about
    )
    draft.note(
        "excess_length_strategy", "carried" if cut else "changed", "" if cut else "longer examples are truncated"
    )
    if draft.written("stage") == "sft":
        train_on = "everything" if draft["train_on_inputs"] else "responses"
        turns = draft["train_on_inputs"] and "chat_template" in str(draft["datasets"])
        draft.set("data.train_on", train_on, "train_on_inputs", why=_HEADERS if turns else "")
    elif draft.written("stage") == "pretrain":
        draft.drop("plain texts are trained on all tokens", "train_on_inputs")
    else:
        draft.drop("only answers are compared", "train_on_inputs")


def set_token_loss(draft: Draft) -> None:
    """Set sft.*. Axolotl's EAFT weighs by the entropy itself, so that a token has weight 1 at an entropy of 1."""
    if not draft["use_eaft"] or draft["rl"] or draft["reward_model"]:
        draft.drop("belongs to use_eaft, or to another method", "use_eaft", "eaft_alpha", "eaft_k")
        return
    draft.set("sft.loss", "eaft", "use_eaft", why=OF_TOKENS)
    draft.set("sft.entropy", 1.0, "use_eaft")
    for name, key, usual in (("eaft_alpha", "alpha", 1.0), ("eaft_k", "top", 20)):
        draft.set(f"sft.{key}", usual if draft[name] is None else draft[name], name)


def set_precision(draft: Draft) -> None:
    bf16 = draft["bf16"]
    if draft["fp16"] and draft.given("bf16") and bf16 not in (False, "auto"):
        draft.refuse("fp16", "bf16 is set as well", "keep one")
        return
    master = "trained weights are kept in fp32"
    if draft["fp16"] or draft["float16"]:
        draft.set("precision.compute", "fp16", "fp16", "float16", why=master if draft["float16"] else "")
    elif bf16 is True or bf16 == "full" or draft["bfloat16"]:
        pure = bf16 == "full" or draft["bfloat16"]
        draft.set("precision.compute", "bf16", "bf16", "bfloat16", why=master if pure else "")
    elif bf16 == "auto" and not draft["float32"]:
        draft.set("precision.compute", "auto", "bf16")
    else:
        draft.set("precision.compute", "fp32", "bf16", "float32")


def set_trackers(draft: Draft) -> None:
    requested: dict[str, list[str]] = {"wandb": [], "tensorboard": [], "mlflow": [], "trackio": []}
    if draft["use_wandb"] is not False and draft["wandb_project"] and draft["wandb_mode"] != "disabled":
        requested["wandb"] = ["use_wandb", "wandb_project"]
    for tracker in ("tensorboard", "mlflow", "trackio"):
        requested[tracker] = [f"use_{tracker}"] if draft[f"use_{tracker}"] else []
    chosen = [tracker for tracker, words in requested.items() if words]
    deciding = [name for words in requested.values() for name in words]
    details = ("wandb_name", "wandb_mode", "mlflow_experiment_name", "trackio_project_name")
    every = ("use_wandb", "wandb_project", "use_tensorboard", "use_mlflow", "use_trackio")
    draft.drop("this tracker is off", *(name for name in every if name not in deciding))
    if not chosen:
        draft.drop("this tracker is off", *details)
        return
    draft.set("report_to", chosen, *deciding)
    for name in ("wandb_project", "mlflow_experiment_name", "trackio_project_name"):
        if draft[name]:
            draft.set("tracking.project", draft[name], name)
            break
    draft.drop(
        "surefoot has one project for all trackers",
        *(name for name in details[2:] if draft.written("tracking.project") != draft[name]),
    )
    if draft["wandb_name"]:
        draft.set("tracking.name", draft["wandb_name"], "wandb_name")
    draft.set("tracking.offline", draft["wandb_mode"] == "offline", "wandb_mode")


def set_rest(draft: Draft) -> None:
    if draft["tokenizer_config"] not in (None, draft["base_model"]):
        draft.refuse("tokenizer_config", "surefoot reads the tokenizer in base_model's folder", "put its files there")
    draft.drop("is base_model", "tokenizer_config")
    _set_tokens(draft)
    set_random(draft, "reinit_weights")
    _set_model_config(draft)
    for plugin in draft["plugins"] or []:
        if not str(plugin).startswith(_PLUGINS):
            draft.refuse("plugins", f"surefoot has no equivalent of {plugin}", "leave it out")
            return
    draft.drop("affects speed or logging only", "plugins")
    stored = draft["model_quantization_config"]
    if stored not in (None, "Mxfp4Config"):
        draft.refuse("model_quantization_config", f"surefoot decodes no {stored} in this way", "leave it out")
    draft.note("model_quantization_config", "carried", draft.rows["model_quantization_config"].about)
    if draft["hub_model_id"]:
        draft.arguments += ["--push", draft["hub_model_id"]]
        draft.note("hub_model_id", "changed", "uploaded once, at the end, to a private repository", "--push")
    if draft["auto_resume_from_checkpoints"]:
        draft.arguments.append("--resume")
        draft.note("auto_resume_from_checkpoints", "carried", "", "--resume")
        draft.drop("auto_resume_from_checkpoints already sets it", "resume_from_checkpoint")
    else:
        resume_argument(draft, "resume_from_checkpoint", str(draft["output_dir"]))


def _set_tokens(draft: Draft) -> None:
    """Set the tokens of `special_tokens` and `tokens`. A mapping in `tokens` is how early versions of Axolotl wrote
    `special_tokens`."""
    added: Any = draft["tokens"] or []
    early: dict[str, Any] = added if isinstance(added, dict) else {}
    given = {name: token for name, token in ((draft["special_tokens"] or {}) | early).items() if token}
    new = names([] if early else added)
    new += names(given.pop("additional_special_tokens", []))
    if (end := given.get("eos_token")) is not None and new:
        new.append(str(end))  # Axolotl adds it where it is missing
    set_added(draft, new, "special_tokens", "tokens", why=NEW_ROWS)
    for name, token in given.items():
        role = name.removesuffix("_token")
        if name not in _ROLES:
            draft.refuse("special_tokens", f"{name}: surefoot reads {', '.join(_ROLES)}", "leave it out")
        else:
            why = "" if role == "pad" else "checked: it must be the tokenizer's own, or the run is refused"
            draft.set(f"tokenizer.{role}", str(token), "special_tokens", "tokens", why=why)


_ROLES = ("pad_token", "bos_token", "eos_token", "unk_token")


def _set_model_config(draft: Draft) -> None:
    given = draft["model_config"] or {}
    if other := [name for name in given if name != "output_router_logits"]:
        draft.refuse("model_config", f"surefoot takes {other[0]} from the model's own config.json", "change it there")
    elif given.get("output_router_logits"):
        draft.set("model.router_aux_loss_coef", "own", "model_config")
    else:
        draft.drop("is off or not set", "model_config")


RULES = (
    set_processes,
    set_data,
    set_method,
    set_adapter,
    set_vision,
    set_qat,
    set_length_limit,
    set_token_loss,
    set_order,
    set_precision,
    set_attention,
    set_steps,
    set_part_rates,
    set_prompted,
    set_evaluation,
    set_saving,
    set_trackers,
    partial(set_sharing, names=_NAMES),
    set_rest,
)
