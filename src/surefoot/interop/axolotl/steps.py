"""What a step of Axolotl's is, and when it evaluates and saves: rows, rates, intervals and attention.

Facts: `_create_multipack_sampler`, `_configure_save_and_eval_strategy` and `normalize_config` of Axolotl 0.19.
"""

from __future__ import annotations

import math
import re
from typing import Any

from surefoot.interop.adapters import rate_of, rounded, set_loraplus
from surefoot.interop.draft import Draft
from surefoot.interop.shared_rules import ROUNDED_UP, counted, set_batch, set_duration, set_keep, switch
from surefoot.interop.trainer import BEST, set_optimizer, set_schedule_name

USUAL_WARMUP = 0.03  # fraction of all steps if neither warmup_steps nor warmup_ratio is given
_RISE = "surefoot rounds up to a whole step, Axolotl down"
_FORMS = {"flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
          "xformers_attention": "xformers", "flex_attention": "flex_attention"}  # fmt: skip
_KERNELS = ("kernels-community/flash-attn2", "kernels-community/flash-attn3")
_EXACT = ("xformers", "flex_attention", "flash_attention_3")  # other kernels of exact attention
_OF_THE_HUB = re.compile(r"kernels-community/(?!sage)")  # sage computes in 8 bits


def _attention(draft: Draft) -> dict[str, str]:
    """Return the requested forms of attention, by setting."""
    requested = {name: form for name, form in _FORMS.items() if draft[name]}
    if draft["attn_implementation"]:
        requested["attn_implementation"] = draft["attn_implementation"]
    return requested


def set_attention(draft: Draft) -> None:
    requested, ours = _attention(draft), _FORMS.values()
    if len(set(requested.values())) > 1:
        draft.refuse(next(iter(requested)), f"{' and '.join(requested)} exclude each other", "keep one")
    elif requested:
        name, form = next(iter(requested.items()))
        if form in _EXACT or _OF_THE_HUB.match(form):
            draft.set("attention.implementation", "auto", *requested, why=f"{form} computes the same attention")
        elif form not in ours:
            draft.refuse(name, f"surefoot has no {form}", f"choose from {', '.join(ours)}")
        else:
            draft.set("attention.implementation", form, *requested)


_ROWS = "Axolotl fills the rows anew in every epoch; its rows also end at sample_packing_bin_size (200) examples"
_MIXED = "with this attention the examples of a row see one another there, and do not here"
_ONE_PASS = "Axolotl reads it only beside gradient_accumulation_steps: null, and takes 1 pass"
_PASSES = "Axolotl averages the means of the passes of a step; here every learned token of a step weighs the same"
_LONG_ROWS = ("flash_attention_2", *_EXACT, *_KERNELS)  # without padding the rows of a pass are joined into one


_SHUFFLED_ONCE = "Axolotl shuffles several data sets once and keeps this order; here every epoch has its own"
_FIRST_FIT = "an example of a shuffled epoch goes into the first row with room for it, there into the last one"


def set_order(draft: Draft) -> None:
    """Set data.order. Without curriculum_sampling Axolotl shuffles in every epoch, whatever it did before."""
    in_turn, merged = draft["sample_packing_sequentially"], draft["shuffle_merged_datasets"]
    sets = draft["datasets"]
    mixed = merged and isinstance(sets, list) and len(sets) > 1
    if mixed or not draft["curriculum_sampling"]:
        draft.drop("every epoch is shuffled with the seed", "shuffle_merged_datasets")
        draft.note("curriculum_sampling", "changed" if draft["curriculum_sampling"] else "listed", _SHUFFLED_ONCE)
        draft.note(
            "sample_packing_sequentially", "changed" if in_turn and draft["sample_packing"] else "listed", _FIRST_FIT
        )
        return
    filled = "" if in_turn or not draft["sample_packing"] else "rows are filled in the order of the files here"
    draft.set("data.order", "file", "curriculum_sampling", why=filled)
    draft.note("shuffle_merged_datasets", "carried", "", "data.order")
    draft.note("sample_packing_sequentially", "carried", "", "data.order")


def _set_batch(draft: Draft) -> None:
    """Set the batch, in examples, or with sample_packing in rows."""
    decides = "gradient_accumulation_steps"
    micro, passes, total = draft["micro_batch_size"], draft[decides], draft["batch_size"]
    if total and draft.given(decides):
        draft.refuse("batch_size", "gradient_accumulation_steps already sets it", "keep one")
    elif total and draft.where(decides):  # null
        passes, decides = total // micro if micro > 0 else 0, "batch_size"
    elif total:
        draft.drop(_ONE_PASS, "batch_size")
    if not draft["sample_packing"]:
        draft.drop("is for sample_packing", "multipack_real_batches")
    if micro < 1 or passes < 1:
        draft.refuse("micro_batch_size" if micro < 1 else decides, "a step needs at least one example", "raise it")
    elif draft["sample_packing"]:
        _set_rows(draft, passes, decides)
    elif decides == "batch_size":
        draft.set("batch.size", passes * micro * draft.processes, decides)
        draft.set("batch.micro", micro, "micro_batch_size")
    else:
        set_batch(draft, "micro_batch_size", decides)
    if passes > 1 and draft.written("stage") in ("sft", "pretrain"):
        draft.note(decides, "changed", _PASSES, "batch.size")


def _set_rows(draft: Draft, passes: int, decides: str) -> None:
    """Set rows of sequence_len tokens, of which those of a pass are one for attention without padding.

    passes: forward passes of a step. decides: the setting that they come from.
    """
    if draft.written("stage") not in ("sft", "pretrain"):
        draft.refuse("sample_packing", "is for supervised training", "leave it out")
        return
    micro, length, processes = draft["micro_batch_size"], draft["sequence_len"], draft.processes
    form = next(iter(_attention(draft).values()), None)
    single = draft["multipack_real_batches"]
    single = form not in _LONG_ROWS if single is None else single
    single &= not (draft.given("pretraining_dataset") or draft["streaming"])  # those join the rows of a pass
    why = f"times {processes} processes" if processes > 1 else ""
    names = ("micro_batch_size", "multipack_real_batches")
    draft.set("batch.size", passes * (micro if single else 1) * processes, decides, *names, why=why)
    draft.set("batch.row_tokens", length if single else micro * length, "sample_packing", *names, "sequence_len",
              why=_ROWS if form in (*_LONG_ROWS, "sdpa", "eager") else f"{_ROWS}; {_MIXED}")  # fmt: skip


# axolotl-contribs-mit 0.0.6: MuonOptimizerFactory, and with a device mesh DistMuonOptimizerFactory.
_MUON = (
    "Axolotl's muon never trains biases and norms; where weights are sharded it trains them, but without Nesterov's "
    "momentum, and scales a step by the root of outputs / inputs"
)


def set_steps(draft: Draft) -> None:
    _set_batch(draft)
    set_duration(draft, "num_epochs", "max_steps")
    if draft["optimizer"] == "muon":
        draft.refuse("optimizer", _MUON, "write optim.name: muon into surefoot's config")
    else:
        set_optimizer(draft, "optimizer")
    if set_schedule_name(draft, "lr_scheduler", "warmup_steps", "warmup_ratio"):
        _set_warmup(draft)
    _set_floor(draft)
    value = draft["gradient_checkpointing"]
    offloaded = f"{value} chooses where activations are stored" if isinstance(value, str) else ""
    draft.set("gradient_checkpointing", switch(value), "gradient_checkpointing", why=offloaded)
    mode = draft["torch_compile_mode"]
    if draft["torch_compile"] == "auto":
        draft.note("torch_compile", "changed", "off unless enabled: it rarely pays", "compile")
    else:
        draft.set(
            "compile", (mode or "default") if draft["torch_compile"] else "off", "torch_compile", "torch_compile_mode"
        )


def _set_floor(draft: Draft) -> None:
    ratio = draft["cosine_min_lr_ratio"]
    if ratio and draft["lr_scheduler"] == "cosine":
        whole = ratio == 1  # it ends where it began
        draft.set("optim.schedule" if whole else "optim.floor", "constant" if whole else ratio, "cosine_min_lr_ratio")
    else:
        draft.drop("is for lr_scheduler: cosine, and above 0", "cosine_min_lr_ratio")


def _set_warmup(draft: Draft) -> None:
    steps, ratio = draft["warmup_steps"], draft["warmup_ratio"]
    if steps is not None and 0 < steps < 1:  # a share, since transformers 5
        draft.set("optim.warmup", float(steps), "warmup_steps")
        draft.set("optim.warmup_from_zero", True, "warmup_steps")
        return
    if steps is not None and ratio is not None:
        draft.refuse("warmup_ratio", "warmup_steps already sets it", "keep one")
    elif steps == 0 or ratio == 0:
        draft.set("optim.warmup", 0.0, "warmup_steps", "warmup_ratio")
    else:
        if steps is not None:
            least = "Axolotl's minimum is 2" if steps == 1 else ""
            draft.set("optim.warmup", counted(max(2, math.ceil(steps)), "step"), "warmup_steps", why=least)
        elif ratio is not None:
            draft.set("optim.warmup", float(ratio), "warmup_ratio", why=_RISE)
        else:
            draft.set("optim.warmup", USUAL_WARMUP, why="Axolotl's default, which is at most 100 steps there")
        draft.set("optim.warmup_from_zero", True, "warmup_steps", "warmup_ratio")


def set_evaluation(draft: Draft) -> None:
    held_out = draft["val_set_size"]
    if held_out and draft.given("test_datasets"):
        draft.refuse("val_set_size", "test_datasets already sets it", "keep one")
        return
    if held_out:
        draft.set("data.eval", int(held_out) if held_out > 1 else held_out, "val_set_size")
    elif not draft.given("test_datasets"):
        draft.set("data.eval", "none", "val_set_size")
    names = ("evals_per_epoch", "eval_steps", "eval_strategy")
    if draft.written("data.eval") in (None, "none"):
        draft.drop("there is no evaluation data", *names, "early_stopping_patience", "load_best_model_at_end")
        draft.drop("there are no prompts to generate from", "generate_samples", *_SAMPLES)
        return
    _set_interval(draft, "eval_every", *names, unset="no")
    patience = draft["early_stopping_patience"]
    best = bool(draft["load_best_model_at_end"] or patience)
    draft.set("checkpoint.best", "loss" if best else "none", "load_best_model_at_end")
    if patience:
        draft.set("early_stopping.patience", patience, "early_stopping_patience")
    if draft["generate_samples"]:
        draft.set("samples.count", draft["num_generation_samples"], "generate_samples", "num_generation_samples")
        draft.set("samples.max_new_tokens", draft["generation_max_new_tokens"], "generation_max_new_tokens")
    else:
        draft.drop("generate_samples is off", "generate_samples", *_SAMPLES)


_SAMPLES = ("num_generation_samples", "generation_max_new_tokens")


def set_saving(draft: Draft) -> None:
    _set_interval(draft, "checkpoint.every", "saves_per_epoch", "save_steps", "save_strategy", unset="epoch")
    set_keep(draft, draft["save_total_limit"], "save_total_limit")


def _set_interval(draft: Draft, key: str, per_epoch: str, steps: str, strategy: str, *, unset: str) -> None:
    """Set an interval from a count per epoch, a number (or fraction) of steps, or a strategy.

    unset: the strategy if nothing is set.
    """
    times, every, word = draft[per_epoch], draft[steps], draft[strategy]
    if times or every:
        draft.note(strategy, "carried", f"{per_epoch if times else steps} decides", key)
    if times and every:
        draft.refuse(steps, f"{per_epoch} already sets it", "keep one")
    elif times:
        draft.set(key, counted(1 / times, "epoch"), per_epoch, why="" if times == 1 else ROUNDED_UP)
    elif every and every < 1 and (total := draft["max_steps"]) and total > 0:
        draft.set(key, counted(math.ceil(every * total), "step"), steps)
    elif every and every < 1:
        epochs = every * draft["num_epochs"]
        draft.set(key, counted(epochs, "epoch"), steps, why="" if epochs == int(epochs) else ROUNDED_UP)
    elif every:
        draft.set(key, counted(every, "step"), steps)
    elif (word or unset) in ("no", "False"):
        last = {"eval_every": (None, "evaluates once, at the end")}
        value, why = last.get(key, (draft.written("duration") or "1 epoch", "saves once, at the end"))
        draft.set(key, value, strategy, why=why)
    elif (word or unset) == "epoch":
        draft.set(key, "1 epoch", strategy, why="" if word else "Axolotl's default is every epoch")
    elif word == "best":
        fix = f"give {per_epoch} or {steps}, and load_best_model_at_end: true"
        draft.refuse(strategy, BEST, fix)
    else:
        draft.refuse(strategy, f"{word} is not a number of steps", f"give {per_epoch} or {steps}")


_EMBEDDINGS = ("embed_tokens", "lm_head")
_NO_DECAY = "Axolotl does not decay these weights"
_ALSO = "vectors, embeddings and the head have it too if their names fit"


def set_part_rates(draft: Draft) -> None:
    """Set optim.rates: LoRA+, else embeddings at a rate of their own and lr_groups. Runs after steps and adapter."""
    names = ("embedding_lr_scale", "embedding_lr", "lr_groups")
    set_loraplus("loraplus_lr_ratio")(draft)
    if draft["loraplus_lr_ratio"]:
        draft.drop("loraplus_lr_ratio takes precedence", *names)
        if draft["weight_decay"]:
            draft.set("optim.weight_decay", 0.0, "weight_decay", why="Axolotl's LoRA+ has none")
        return
    rates = _embedding_rates(draft)
    for entry in _groups(draft):
        for module in entry["modules"]:
            plain = str(module).removeprefix("base_model.model.").replace(".default", "")
            rates.setdefault(re.escape(plain), entry["lr"])
    if rates:
        why = [_NO_DECAY] if draft["weight_decay"] and any(map(draft.given, names[:2])) else []
        why += [_ALSO] if draft["lr_groups"] else []
        draft.set("optim.rates", [{"of": part, "lr": rate} for part, rate in rates.items()], *names, why="; ".join(why))


def _embedding_rates(draft: Draft) -> dict[str, float]:
    scale, names = draft["embedding_lr_scale"], ("embedding_lr_scale", "embedding_lr")
    rate = rounded(rate_of(draft) * scale) if scale else draft["embedding_lr"]
    saved = draft.written("adapter.modules_to_save") or []
    if scale:
        draft.drop("embedding_lr_scale takes precedence", "embedding_lr")
    if not rate or (draft.written("adapter.kind") and not saved):
        draft.drop("is off, or no embedding trains", *names)
        return {}
    parts = saved if draft.written("adapter.kind") else _EMBEDDINGS
    return {"|".join(rf"(^|\.){re.escape(part)}\." for part in parts): rate}


def _groups(draft: Draft) -> list[dict[str, Any]]:
    groups = draft["lr_groups"] or []
    whole = isinstance(groups, list) and all(
        isinstance(one, dict) and isinstance(one.get("modules"), list) and isinstance(one.get("lr"), int | float)
        for one in groups
    )
    if not whole:
        draft.refuse("lr_groups", "expected a list of groups with name, modules and lr")
    return groups if whole else []
