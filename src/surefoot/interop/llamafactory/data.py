"""Translate LLaMA-Factory's data settings: dataset descriptions become sources, template names become surefoot's.

Facts: src/llamafactory/data/template.py and its list of names. `tests/equality` compares token ids and label masks
with those of LLaMA-Factory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from surefoot.families.other_templates import LLAMAFACTORY, PREFIX
from surefoot.interop.draft import Draft
from surefoot.system.dataset_info import COLUMNS
from surefoot.system.errors import InputError
from surefoot.system.locations import DATA_SUFFIXES, DESCRIPTION
from surefoot.system.messages import nearest_words

_MIXES = ("concat", "interleave_under", "interleave_over", "interleave_once")
_EPOCH = "an epoch is as long as all datasets together, sampled by weight"


def set_data(draft: Draft) -> None:
    train, evaluation = draft["dataset"], draft["eval_dataset"]
    if train is None:
        fix = "give a name from dataset_info.json"
        draft.refuse("dataset", "is required", fix)
        draft.drop("there is no training data", "dataset_dir", "streaming", "mix_strategy", "interleave_probs")
        draft.drop("there is no training data", "eval_dataset", "val_size", "max_samples", "tokenized_path")
        return
    if str(draft["dataset_dir"]).startswith("REMOTE:"):
        draft.refuse("dataset_dir", "surefoot reads dataset descriptions on this machine only", "download the folder")
        return
    draft.drop("tokenized data are cached by content", "tokenized_path")
    sources = [_source(draft, name) for name in train]
    if draft["default_system"]:
        draft.note("default_system", "carried", "", "data.train")
    names = _mix(draft, sources)
    _stream(draft, sources)
    draft.set("data.train", sources[0] if len(sources) == 1 else sources, "dataset", "dataset_dir", *names)
    if (most := draft["max_samples"]) is not None:
        if most < 1:
            draft.refuse("max_samples", f"expected a number from 1, got {most}")
            return
        draft.set("data.max_samples", most, "max_samples")
    _set_evaluation(draft, evaluation)


def _source(draft: Draft, name: str) -> dict[str, Any]:
    found, system = _named(draft, name), draft["default_system"]
    return {**found, "system": system} if system and draft["stage"] != "pt" else found


def _named(draft: Draft, name: str) -> dict[str, Any]:
    folder, stage = draft["dataset_dir"], str(draft["stage"])
    if folder == "ONLINE":
        return {"path": name}
    found = None
    if stage == "pt" or stage in LAYOUTS:  # in other stages the description is read when data is prepared
        entry = _entry(folder, name, draft.options.read)
        found = _texts(folder, entry) if stage == "pt" else _compared(folder, entry, LAYOUTS[stage])
    return found or {"path": folder, "name": name}


def _to_evaluate(source: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluation source: a hub dataset uses its train split, a described dataset its own split."""
    return source if "name" in source or source["path"].endswith(DATA_SUFFIXES) else {"split": "train"} | source


STAGES = {"pt": "pretrain", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
# Stages whose descriptions are translated here -> data format.
LAYOUTS = {"rm": "preference", "dpo": "preference", "kto": "judged"}


def _compared(folder: str, entry: dict[str, Any] | None, layout: str) -> dict[str, Any] | None:
    """Return the source of a described dataset of pairs or judged answers; None if it cannot be expressed."""
    if entry is None or entry.get("tags"):
        return None
    style = entry.get("formatting", "alpaca")
    if style not in COLUMNS:
        return None
    renamed = {COLUMNS[style].get(ours, ours): own for ours, own in entry.get("columns", {}).items()}
    columns = {ours: own for ours, own in renamed.items() if ours != own}
    return _located(entry, folder, {"format": layout, **({"columns": columns} if columns else {})})


def _entry(folder: str, name: str, read: Callable[[str], str]) -> dict[str, Any] | None:
    """Return the dataset's description in dataset_info.json, or None if it cannot be read."""
    try:
        entry = json.loads(read(f"{folder}/{DESCRIPTION}")).get(name)
    except (InputError, ValueError, AttributeError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("columns", {}), dict) else None


def _located(entry: dict[str, Any], folder: str, more: dict[str, Any]) -> dict[str, Any] | None:
    if "hf_hub_url" in entry:
        also = {key: entry[key] for key in ("subset", "split") if key in entry}
        return {"path": entry["hf_hub_url"], **more, **also}
    if "file_name" in entry:
        return {"path": f"{folder}/{entry['file_name']}", **more}
    return None


def _texts(folder: str, entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the source of a described dataset of plain texts; the description calls its text column prompt."""
    if entry is None or "columns" not in entry:
        return None
    column = entry["columns"].get("prompt", "text")
    return _located(entry, folder, {"format": "text", **({} if column == "text" else {"columns": {"text": column}})})


def _mix(draft: Draft, sources: list[dict[str, Any]]) -> list[str]:
    """Set the weights of the sources. Returns the settings that decide them."""
    strategy, shares = draft["mix_strategy"], draft["interleave_probs"]
    if strategy not in _MIXES:
        draft.refuse("mix_strategy", f"LLaMA-Factory has no {strategy}", f"choose from {', '.join(_MIXES)}")
    elif strategy in ("interleave_under", "interleave_over") and len(sources) > 1:
        try:
            weights = [1.0] * len(sources) if shares is None else [float(share) for share in shares]
        except ValueError:
            weights = []
        if len(weights) != len(sources) or any(weight <= 0 for weight in weights):
            draft.refuse("interleave_probs", f"expected {len(sources)} numbers above 0, one per dataset")
            return []
        for source, weight in zip(sources, weights, strict=True):
            source["weight"] = weight
        for name in ("mix_strategy", "interleave_probs"):
            draft.note(name, "changed", _EPOCH, "data.train")
        return ["mix_strategy", "interleave_probs"]
    else:
        draft.note("mix_strategy", "carried", "each record once per epoch, all shuffled together", "data.train")
        draft.drop(f"mix_strategy is {strategy}" if len(sources) > 1 else "there is one dataset", "interleave_probs")
    return []


def _stream(draft: Draft, sources: list[dict[str, Any]]) -> None:
    if not draft["streaming"]:
        return
    if draft["max_steps"] <= 0:
        draft.refuse("streaming", "needs max_steps", "a stream has no known length")
        return
    if draft["max_samples"] is not None:
        draft.refuse("max_samples", "excludes streaming", "leave it out")
        return
    if draft["dataset_dir"] != "ONLINE":
        draft.drop("described datasets are read whole, with the same result", "streaming")
        return
    size = draft["per_device_train_batch_size"] * draft["gradient_accumulation_steps"]
    held_out = draft["val_size"]
    if 0 < held_out < 1:
        draft.refuse("val_size", "a stream has no known length", "give a number of examples, as LLaMA-Factory requires")
        return
    for source in sources:
        source |= {"streaming": True, "max_samples": draft["max_steps"] * size + int(held_out)}
    taken = "max_steps and val_size take" if held_out else "max_steps takes"
    draft.note("streaming", "changed", f"reads as many records as {taken}", "data.train")


def _set_evaluation(draft: Draft, evaluation: list[str] | None) -> None:
    share = draft["val_size"]
    if evaluation and share:
        draft.refuse("val_size", "excludes eval_dataset", "keep one")
    elif evaluation:
        sources = [_to_evaluate(_source(draft, name)) for name in evaluation]
        if (most := draft["max_samples"]) is not None:
            sources = [source | {"max_samples": most} for source in sources]
        draft.set("data.eval", sources[0] if len(sources) == 1 else sources, "eval_dataset", "dataset_dir")
        draft.drop("eval_dataset takes precedence", "val_size")
    elif share:
        if share < 0 or (share > 1 and share != int(share)):
            draft.refuse("val_size", f"expected a fraction below 1 or a count, got {share:g}")
            return
        draft.set("data.eval", int(share) if share >= 1 else share, "val_size")
    else:
        draft.drop("nothing is held out", "val_size")


UNTHINKING = "qwen3-unthinking"  # qwen3 with enable_thinking: false
_ROWS = {row.name.removeprefix(PREFIX): row for row in LLAMAFACTORY}
# Templates with the same text; they differ in tools and in media that surefoot does not train on.
_LIKE = {
    "gemma3": "gemma",
    "yi": "chatml",
    "smollm": "chatml",
    "qwen3_vl_nothink": "qwen3_nothink",
    "qwen3_5_nothink": "qwen3_nothink",
    "qwen3_vl": "qwen3",
    "qwen3_5": "qwen3",
    "qwen3_6": "qwen3",
}
PICTURED = ("gemma3", "qwen2_vl", "qwen3_vl", "qwen3_vl_nothink", "qwen3_5", "qwen3_5_nothink", "qwen3_6")
SAME = {
    **{name: row for name, row in _ROWS.items() if name != UNTHINKING},
    **{name: _ROWS[other] for name, other in _LIKE.items()},
}

_WITHOUT = (
    "aeva bailing bailing_v2 breeze chatglm3 chatml_de cohere cpm4 dbrx deepseekr1 hy3 "
    "deepseekcoder dots_ocr empty ernie ernie_nothink ernie_vl exaone falcon falcon_h1 fewshot gemma2 "
    "gemma3n gemma4 gemma4n glm4 glm4_moe glm4v glm4_5v glm_ocr glm4_7 glmz1 gpt_oss granite3 granite3_vision "
    "granite4 index hunyuan hunyuan_small hy_dense_1_8b hy_dense_7b intern2 intern_vl intern_s1 keye_vl kimi_vl "
    "lfm2 lfm2_vl llama2_zh llama4 mllama moonlight moss_vl llava llava_next llava_next_llama3 llava_next_mistral "
    "llava_next_qwen llava_next_yi llava_next_video llava_next_video_mistral llava_next_video_yi mimo mimo_v2 "
    "mimo_vl minicpm_v minicpm_v_4_6 minicpm_o minimax1 minimax2 ministral mistral_small ministral3 olmo openchat "
    "openchat-3.6 opencoder paligemma paligemma_chat phi_small phi4_mini pixtral qwen2_audio qwen2_omni "
    "qwen3_omni qwen3_omni_nothink sailor "
    "seed_coder seed_oss smollm2 solar starchat telechat2 video_llava xuanyuan yi_vl youtu youtu_vl yuan"
)
OTHERS = tuple(_WITHOUT.split())
NAMES = (*SAME, *OTHERS)


def adds_thoughts(name: str) -> bool:
    """Return whether the template adds empty thoughts, which enable_thinking: false leaves unlearned."""
    return SAME[name] is SAME["qwen3"]


def writes_bos(name: str) -> bool:
    """Return whether the template starts with BOS."""
    row = SAME[name]
    return "{bos}" in row.prefix + row.user


def why_not(name: str) -> tuple[str, str]:
    """Return (what, fix) for a template without a counterpart."""
    if name in OTHERS:
        near = nearest_words(name, SAME, 2)
        also = f", or {' or '.join(near)} if that is the model's" if near else ""
        return f"surefoot has no template {name}", f"template: null uses the tokenizer's own{also}"
    near = nearest_words(name, NAMES, 2)
    known = f"did you mean {' or '.join(near)}?" if near else f"surefoot supports {', '.join(SAME)}"
    return f"LLaMA-Factory has no template {name}", known
