"""Translate ms-swift's data sets: `ID_OR_PATH:SUBSET#NUMBER`, and what its own table of data sets does to them.

Its ids are ModelScope's unless use_hf; those of its table that have another id on the Hugging Face hub are read there.
Data sets that it rewrites by code are refused by name, which is how it finds them in its table. Facts:
swift/dataset of ms-swift 4 (August 2026).
"""

from __future__ import annotations

import re
from typing import Any

from surefoot.interop.draft import Draft
from surefoot.interop.model_templates import UNTHINKING, template_of
from surefoot.interop.settings import Refusal
from surefoot.interop.shared_rules import short_sources
from surefoot.system.errors import InputError
from surefoot.system.locations import DATA_SUFFIXES

_ALPACA = {"format": "alpaca"}
SELF = "self-cognition"
# Name in its table -> the hub's id, and keys of the source.
_ELSEWHERE: dict[str, tuple[str, dict[str, Any]]] = {
    SELF: ("modelscope/self-cognition", {}),
    "alpaca-gpt4-data-zh": ("llm-wizard/alpaca-gpt4-data-zh", _ALPACA),
    "alpaca-gpt4-data-en": ("vicgalle/alpaca-gpt4", _ALPACA),
    "LongAlpaca-12k": ("Yukang/LongAlpaca-12k", _ALPACA),
    "gsm8k": ("openai/gsm8k", {"subset": "main"}),
    "ultrachat_200k": ("HuggingFaceH4/ultrachat_200k", {"split": "train_sft"}),
    "shareAI-Llama3-DPO-zh-en-emoji": (
        "shareAI/DPO-zh-en-emoji",
        {"format": "preference", "columns": {"prompt": "question", "chosen": "answer_zh", "rejected": "answer_en"}},
    ),
    "LaTeX_OCR": (
        "linxy/LaTeX_OCR",
        {**_ALPACA, "columns": {"images": "image", "output": "text"},
         "constant": {"instruction": "<image>Using LaTeX to perform OCR on the image."}},
    ),
    **{
        name: (f"{owner}/{renamed or name}", {})
        for name, owner, renamed in (
            ("Chinese-DeepSeek-R1-Distill-data-110k-SFT", "Congliu", ""), ("chinese-c4", "shjwudp", ""),
            ("OpenO1-SFT", "O1-OPEN", ""), ("school_math_0.25M", "BelleGroup", ""), ("alpaca-cleaned", "yahma", ""),
            ("CodeAlpaca-20k", "HuggingFaceH4", "CodeAlpaca_20K"), ("guanaco_belle_merge_v1.0", "Chinese-Vicuna", ""),
            ("code_alpaca_en", "sahil2801", "CodeAlpaca-20k"), ("train_3.5M_CN", "BelleGroup", ""),
            ("train_2M_CN", "BelleGroup", ""), ("train_1M_CN", "BelleGroup", ""), ("SlimOrca", "Open-Orca", ""),
            ("train_0.5M_CN", "BelleGroup", ""), ("tulu-v2-sft-mixture", "allenai", ""), ("pile", "EleutherAI", ""),
            ("Open-Platypus", "garage-bAInd", ""), ("no_robots", "HuggingFaceH4", ""),
            ("OpenHermes-2.5", "teknium", ""),
            ("cosmopedia-100k", "HuggingFaceTB", ""), ("SkyPile-150B", "Skywork", ""), ("dolma", "allenai", ""),
        )
    },
}  # fmt: skip
_LITTLE = {  # what ms-swift changes in the records besides
    "alpaca-gpt4-data-zh": "ms-swift takes away a heading (输入：) before some inputs",
    "LongAlpaca-12k": "ms-swift takes away 'Answer: ' before some answers",
    "shareAI-Llama3-DPO-zh-en-emoji": "ms-swift takes away the characters that choose a sign's form",
}
_BY_CODE = (
    "DISC-Law-SFT Duet-v0.5 GuanacoDataset LLaVA-Instruct-150K LLaVA-Pretrain M3IT MATH-lighteval "
    "MathInstruct MovieChat-1K-test OpenOrca OpenOrca-Chinese ShareGPT-4o ShareGPT4V blossom-math-v2 captcha-images "
    "coco "
    "clevr_cogen_a_train databricks-dolly-15k egoschema firefly-train-1.1M function-calling-chatml hh-rlhf hh_rlhf_cn "
    "lawyer_llama_data leetcode-solutions-python lmsys-chat-1m math-trn-format orpo-dpo-mix-40k ruozhiba starcoderdata "
    "sql-create-context stack-exchange-paired synthetic_text_to_sql the-stack tigerbot-law-plugin zhihu_rlhf_3k jd "
    "wikipedia-cn-20230720-filtered Human-Like-DPO-Dataset xlam-function-calling-60k scidocs-reranking R1-Distill-SFT "
    "stackoverflowdupquestions-reranking SA1B-Dense-Caption SA1B-Paired-Captions-Images wds_voc2007_multilabel "
    "MSAgent-Bench CodeExercise-Python-27k Evol-instruction-66k zh_cls_fudan-news zh_ner-JAVE AgentInstruct_copy "
    "100PoisonMpts DocQA-RL-1.6K MSAgent-MultiRole ms_bench AdvertiseGen DuReader_robust-QG chinese-poetry-collection "
    "clue coco_2014_caption verifiable-coding-problems-python Qwen3-1.7-TTS-SFT-Furina sudoku-extreme-1k stsb HC3 GQA "
    "alpha-umi-toolbench-processed-v2 speech_asr_aishell1_trainsets ChartQA GRIT GenQA Infinity-Instruct OCR-VQA VQAv2 "
    "MideficsDataset RLAIF-V-Dataset RedPajama-Data-V2 ScienceQA TextCaps VideoChatGPT WebInstructSub aya_collection "
    "cinepile github-code gpt4v-dataset llava-data llava-instruct-mix-vsft lnqa medical_zh path-vqa pixelprose refcoco "
    "moondream2-coyo-5M-captions orca_dpo_pairs A-OKVQA refcocog garbage265 instruct Countdown-Tasks-3to4 geometry3k "
    "new_special_tokens chartqa_digit_r1v_format multimodal-open-r1-8k-verified"
)
_REWRITTEN = frozenset(_BY_CODE.split())
_FORM = re.compile(r"(?:(?P<hub>hf|ms|HF|MS)::)?(?P<id>[^#]+?)(?::(?P<subset>[\w./-]+))?(?:#(?P<most>\d+))?")
_OWNERS = {"LLM-Research": "meta-llama", "ZhipuAI": "zai-org", "OpenBMB": "openbmb", "openai-mirror": "openai",
           "nv-community": "nvidia", "Tencent-Hunyuan": "tencent"}  # fmt: skip
_ONLY_THERE = ("AI-ModelScope", "iic", "modelscope", "swift")
_FEWEST = 64  # tokens of an example of a stream, on average
_THERE = "the id is ModelScope's, and surefoot reads that of the Hugging Face hub"
_SAMPLED = "ms-swift draws as many records at random; here the first ones are used"


def set_model(draft: Draft) -> None:
    if draft["model"]:
        set_hub_model(draft, "model", "model.path")


def set_hub_model(draft: Draft, name: str, key: str) -> None:
    """Set surefoot's key to the model that the setting names, or refuse it."""
    try:
        named, why = hub_model(draft[name], draft["use_hf"])
    except Refusal as refusal:
        draft.refuse(name, refusal.what, refusal.fix)
        return
    draft.set(key, named, name, why=why)


def hub_model(model: str, use_hf: bool) -> tuple[str, str]:
    """Return the path or hub id of a model, and why it is another one. Raises Refusal."""
    owner, _, name = model.partition("/")
    if use_hf or not name or "/" in name or owner in (".", "", ".."):
        return model, ""
    if owner in _ONLY_THERE:
        raise Refusal(f"{model} is a model of ModelScope's", "name its id on the Hugging Face hub, or a folder")
    return f"{_OWNERS.get(owner, owner)}/{name}", _THERE if owner in _OWNERS else ""


def set_data(draft: Draft) -> None:
    """Set data.train and data.eval."""
    if not draft["dataset"]:
        return
    reasons: list[str] = []
    sources = [found for one in draft["dataset"] if (found := _source(draft, "dataset", one, reasons))]
    _set_evaluation(draft)
    if draft["streaming"]:
        _stream(draft, sources)
    if draft["train_dataloader_shuffle"] or draft["streaming"]:
        draft.drop("every epoch is shuffled with the seed", "dataset_shuffle", "train_dataloader_shuffle")
    elif draft["dataset_shuffle"]:
        what = "the same shuffled order in every epoch, where surefoot has the files' or another in each"
        draft.refuse("train_dataloader_shuffle", what, "set dataset_shuffle: false too, or leave it out")
    else:
        draft.set("data.order", "file", "train_dataloader_shuffle", "dataset_shuffle")
    names = ["dataset", *(name for name in ("system", "columns") if draft[name] is not None)]
    draft.set("data.train", short_sources(sources or [{"path": "?"}]), *names, why="; ".join(dict.fromkeys(reasons)))
    filled = any("fill" in source for source in sources)
    for name in ("model_name", "model_author"):
        draft.note(name, "carried" if filled else "listed", "" if filled else "no data set has its place", "data.train")
    draft.note("use_hf", "carried" if draft["use_hf"] else "listed", "" if draft["use_hf"] else _THERE)


def _set_evaluation(draft: Draft) -> None:
    share, reasons = draft["split_dataset_ratio"], list[str]()
    if held := draft["val_dataset"]:
        tests = [found for one in held if (found := _source(draft, "val_dataset", one, reasons))]
        sources = [{"split": "train", **one} for one in tests or [{"path": "?"}]]
        draft.set("data.eval", short_sources(sources), "val_dataset", why="; ".join(dict.fromkeys(reasons)))
        draft.drop("val_dataset takes precedence", "split_dataset_ratio")
    elif share and draft["eval_strategy"] != "no":
        draft.set("data.eval", share, "split_dataset_ratio")
    else:
        draft.drop("nothing is held out", "split_dataset_ratio")


def _is_local(path: str) -> bool:
    return path.endswith(DATA_SUFFIXES) or path.startswith((".", "/"))


def _source(draft: Draft, setting: str, word: str, reasons: list[str]) -> dict[str, Any] | None:
    found = _FORM.fullmatch(word)
    if found is None:
        draft.refuse(setting, f"{word} is no data set of the form ID:SUBSET#NUMBER", "name a file or hub id")
        return None
    path, subset, most = found["id"], found["subset"], found["most"]
    name = path.rstrip("/").rpartition("/")[2]
    there = draft["use_hf"] if found["hub"] is None else found["hub"].lower() == "hf"
    source: dict[str, Any] = {"path": path}
    local = _is_local(path)
    if not local and name in _REWRITTEN:
        what = f"ms-swift rewrites the records of {name} by code of its own"
        draft.refuse(setting, what, "write them to a file as messages, and name that")
        return None
    if not local and name in _ELSEWHERE:
        renamed, keys = _ELSEWHERE[name]
        source |= {"path": path if there else renamed, **keys}
        reasons += [_THERE] if not there and renamed != path else []
        reasons += [_LITTLE[name]] if name in _LITTLE else []
    elif not local and not there:
        reasons.append(_THERE)
    unthinking = template_of(draft["model"] or "") == UNTHINKING  # which writes the thoughts of that subset
    if subset is not None and name != SELF:
        source["subset"] = subset
    elif subset not in (None, "default") and not (subset == "empty_think" and unthinking):
        draft.refuse(setting, f"ms-swift adds thoughts to {name}:{subset}", "name the set without its subset")
    if most is not None:
        source["max_samples"] = int(most)
        reasons.append(_SAMPLED)
    try:
        return source | _also(draft, source, own=name == SELF)
    except Refusal as refusal:
        draft.refuse("model_name", refusal.what, refusal.fix)
    except InputError as error:
        for fault in error.faults:
            draft.refuse("system", f"{fault.where}: {fault.what}", fault.fix)
    return None


def _also(draft: Draft, source: dict[str, Any], *, own: bool) -> dict[str, Any]:
    """Return the columns, system message and texts of placeholders. own: whether it is self-cognition."""
    found: dict[str, Any] = {}
    if renamed := draft["columns"]:
        columns = {theirs: column for column, theirs in renamed.items()}
        found["columns"] = {**source.get("columns", {}), **columns}
    if system := draft["system"]:
        text = draft.options.read(system) if system.endswith(".txt") else system.replace("\\n", "\n")
        found["system"] = text
    if own:
        fill: dict[str, str] = {}
        for setting, place in (("model_name", "NAME"), ("model_author", "AUTHOR")):
            values = draft[setting] or []
            if len(set(values)) > 1:
                raise Refusal("a name for each language: surefoot has one", "give one, or write the records to a file")
            fill |= {place: values[0]} if values else {}
        found |= {"fill": fill} if fill else {}
    return found


def _stream(draft: Draft, sources: list[dict[str, Any]]) -> None:
    if draft["max_steps"] <= 0:
        draft.refuse("streaming", "needs max_steps", "a stream has no known length")
        return
    size = draft["per_device_train_batch_size"] * draft["gradient_accumulation_steps"]
    row = (draft["packing_length"] or draft["max_length"] or 0) if draft["packing"] else 0
    most = draft["max_steps"] * size * draft.processes * max(1, row // _FEWEST)
    for source in sources:
        source.setdefault("max_samples", most)
        source |= {} if _is_local(source["path"]) else {"streaming": True}
    packed = f", if they have {_FEWEST} tokens on average" if row else ""
    draft.note("streaming", "changed", f"reads as many records as max_steps takes{packed}", "data.train")
