"""Translate DeepSpeed-Chat's datasets: names, files and folders, and the share of each step.

It reads every dataset as text: a prompt that already contains `Human:` and `Assistant:`, then the answer and EOS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from surefoot.families.templates import BY_RECORD
from surefoot.interop.deepspeed_chat.rows import Step
from surefoot.interop.draft import Draft
from surefoot.interop.launch import FirstRecord
from surefoot.interop.shared_rules import short_sources
from surefoot.system.locations import DATA_SUFFIXES, is_hub_data

TAKE: Mapping[Step, int] = {"sft": 1, "reward": 2, "dpo": 2, "ppo": 3}
_ANSWERS = ("chosen", "response", "completion")  # fields with the answer, the preferred one of a pair first
# Datasets with prompt, chosen and rejected whose prompts contain `Human:` and `Assistant:` -> evaluation split.
_PLAIN = {"Dahoas/rm-static": "test", "Dahoas/full-hh-rlhf": "test"}
_PLAIN_RECORD = {"prompt": "", "chosen": "", "rejected": ""}
_OTHER = (
    "yitingxie/rlhf-reward-datasets", "Dahoas/synthetic-instruct-gptj-pairwise", "openai/webgpt_comparisons",
    "stanfordnlp/SHP",
    "pvduy/sharegpt_alpaca_oa_vicuna_format", "wangrui6/Zhihu-KOL", "Cohere/miracl-zh-queries-22-12",
    "Cohere/miracl-ja-queries-22-12", "Hello-SimpleAI/HC3-Chinese", "mkqa-Chinese", "mkqa-Japanese",
    "lmqg/qg_jaquad", "lmqg/qag_jaquad",
)  # fmt: skip
_FILE = "local/jsonfile"
_HELD_OUT = 0.1  # fraction of a dataset without an evaluation split, as in DeepSpeed-Chat


def data_rule(step: Step) -> Callable[[Draft], None]:
    return partial(_set_data, step=step)


def _set_data(draft: Draft, step: Step) -> None:
    first, folder = draft.options.first, draft.folder
    share = _share(draft, step)
    train: list[dict[str, Any]] = []
    evaluation: list[dict[str, Any]] = []
    names = [(name, share) for name in draft["data_path"]]
    if step in ("sft", "dpo"):
        names += [(name, None) for name in draft["sft_only_data_path"]]
        if not draft["sft_only_data_path"]:
            draft.drop("names no dataset", "sft_only_data_path")
    for name, part in names:
        more = {"share": part} if part else {}
        for target, path in zip((train, evaluation), _paths(draft, name, first, folder), strict=True):
            if path is not None:
                target.append({"path": path["path"], **_layout(path["path"], step, first), **path, **more})
    why = "DeepSpeed-Chat uses no chat template"
    if step != "sft":  # step 1 trains on prompt and answer as one text
        why = "texts are used as they are; in dialogues, each earlier answer ends with EOS"
    draft.set("data.template", "raw" if step == "sft" else BY_RECORD, why=why)
    words = ("data_path", "data_split", *(["sft_only_data_path"] if step in ("sft", "dpo") else []))
    if train:
        draft.set("data.train", short_sources(train), *words)
    if share is not None:
        draft.note("data_split", "carried", "", "data.train.share")
    if step == "ppo":
        return  # PPO only answers the prompts; nothing is held out
    if evaluation:
        draft.set("data.eval", short_sources(evaluation), *words)
    else:
        draft.set("data.eval", _HELD_OUT, "data_path", why="")
    draft.set("eval_at_start", True, why="DeepSpeed-Chat evaluates before the first step")


def _share(draft: Draft, step: Step) -> dict[str, Any] | None:
    """Return the share of every dataset that this step takes; None for all of it."""
    try:
        parts = [float(part) for part in str(draft["data_split"]).split(",")]
    except ValueError:
        parts = []
    if len(parts) != 3 or min(parts) < 0 or sum(parts) <= 0:
        draft.refuse("data_split", f"expected three shares such as 2,4,4, got {draft['data_split']}")
        return None
    take = TAKE[step]
    if parts[take - 1] == 0:
        draft.refuse("data_split", f"leaves nothing for step {take}", f"make number {take} of the three larger than 0")
        return None
    if parts[take - 1] == sum(parts):
        return None
    filled = [int(part) if part == int(part) else part for part in parts if part]
    return {"of": filled, "take": take - parts[:take].count(0)}


def _paths(
    draft: Draft, name: str, first: FirstRecord, folder: str
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the training source and the evaluation source of a dataset; None for what it does not have."""
    if name == _FILE:
        place = _data_folder(folder, first)
        return {"path": f"{place}/train.json"}, {"path": f"{place}/eval.json"}
    if known := next((one for one in _OTHER if one in name), None):
        what = f"surefoot does not support the records of {known}"
        fix = "write them to a file of records with prompt, chosen and rejected, and give that file"
        draft.refuse("data_path", what, fix)
        return None, None
    if known := next((one for one in _PLAIN if one in name), None):
        return {"path": name}, {"path": name, "split": _PLAIN[known]}
    if not is_hub_data(name) and not name.endswith(DATA_SUFFIXES) and first(f"{name.rstrip('/')}/eval.json"):
        return {"path": f"{name.rstrip('/')}/train.json"}, {"path": f"{name.rstrip('/')}/eval.json"}
    return {"path": name}, None


def _data_folder(folder: str, first: FirstRecord) -> str:
    """Return the application's data folder: next to `training/`, or in the working folder."""
    app = folder.partition("/training/")[0] if "/training/" in folder else ""
    above = "../" * folder.removeprefix(app).strip("/").count("/") + "../data" if app else "data"
    return above if app and first(f"{above}/train.json") else "data"


def _layout(path: str, step: Step, first: FirstRecord) -> dict[str, Any]:
    """Return format and columns if DeepSpeed-Chat reads the file differently from surefoot's own detection."""
    known = any(one in path for one in _PLAIN)
    record = _PLAIN_RECORD if known else first(path)
    if record is None or not isinstance(record.get("prompt", ""), str):
        return {}
    if step == "ppo":
        return {"format": "prompts"} if "prompt" in record else {}
    if step in ("reward", "dpo"):
        return {"format": "preference"} if known else {}
    answer = next((name for name in _ANSWERS if name in record), None)
    if "prompt" not in record or answer is None:
        return {}
    return {"format": "prompt-completion", "columns": {"completion": answer}}
