"""DeepSpeed-Chat's data sets in surefoot's words: names, files and folders, and the share of each step.

It reads every set as texts: a prompt that already holds its `Human:` and `Assistant:`, an answer behind it, and EOS.
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
_ANSWERS = ("chosen", "response", "completion")  # what may hold the answer to a prompt, the better one of pairs first
# Sets with prompt, chosen and rejected whose prompts hold their `Human:` and `Assistant:` -> the split to evaluate on.
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
_HELD = 0.1  # of a set without a split to evaluate on, as there


def data_rule(step: Step) -> Callable[[Draft], None]:
    return partial(_set_data, step=step)


def _set_data(draft: Draft, step: Step) -> None:
    first, folder = draft.options.first, draft.folder
    share = _share(draft, step)
    train: list[dict[str, Any]] = []
    held: list[dict[str, Any]] = []
    names = [(name, share) for name in draft["data_path"]]
    if step in ("sft", "dpo"):
        names += [(name, None) for name in draft["sft_only_data_path"]]
        if not draft["sft_only_data_path"]:
            draft.drop("names no set", "sft_only_data_path")
    for name, part in names:
        more = {"share": part} if part else {}
        for target, path in zip((train, held), _paths(draft, name, first, folder), strict=True):
            if path is not None:
                target.append({"path": path["path"], **_layout(path["path"], step, first), **path, **more})
    why = "its texts go through no template"
    if step != "sft":  # which learns prompt and answer as one text
        why = "the texts as they stand; where they are dialogues, each earlier answer ends with EOS"
    draft.set("data.template", "raw" if step == "sft" else BY_RECORD, why=why)
    words = ("data_path", "data_split", *(["sft_only_data_path"] if step in ("sft", "dpo") else []))
    if train:
        draft.set("data.train", short_sources(train), *words)
    if share is not None:
        draft.note("data_split", "carried", "", "data.train.share")
    if step == "ppo":
        return  # the prompts are only answered, and nothing is held out there
    if held:
        draft.set("data.eval", short_sources(held), *words)
    else:
        draft.set("data.eval", _HELD, "data_path", why="")
    draft.set("eval_at_start", True, why="it evaluates before the first step")


def _share(draft: Draft, step: Step) -> dict[str, Any] | None:
    """What this step takes of every set; None for all of it."""
    try:
        parts = [float(part) for part in str(draft["data_split"]).split(",")]
    except ValueError:
        parts = []
    if len(parts) != 3 or min(parts) < 0 or sum(parts) <= 0:
        draft.refuse("data_split", f"expected three shares such as 2,4,4, got {draft['data_split']}")
        return None
    take = TAKE[step]
    if parts[take - 1] == 0:
        draft.refuse("data_split", f"leaves nothing to step {take}", f"give its part (the {take}.) a share above 0")
        return None
    if parts[take - 1] == sum(parts):
        return None
    filled = [int(part) if part == int(part) else part for part in parts if part]
    return {"of": filled, "take": take - parts[:take].count(0)}


def _paths(
    draft: Draft, name: str, first: FirstRecord, folder: str
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Source to train on and source to evaluate on."""
    if name == _FILE:
        place = _beside(folder, first)
        return {"path": f"{place}/train.json"}, {"path": f"{place}/eval.json"}
    if known := next((one for one in _OTHER if one in name), None):
        what = f"{known} has records of a form of its own"
        fix = "write them to a file of records with prompt, chosen and rejected, and name that"
        draft.refuse("data_path", what, fix)
        return None, None
    if known := next((one for one in _PLAIN if one in name), None):
        return {"path": name}, {"path": name, "split": _PLAIN[known]}
    if not is_hub_data(name) and not name.endswith(DATA_SUFFIXES) and first(f"{name.rstrip('/')}/eval.json"):
        return {"path": f"{name.rstrip('/')}/train.json"}, {"path": f"{name.rstrip('/')}/eval.json"}
    return {"path": name}, None


def _beside(folder: str, first: FirstRecord) -> str:
    """The app's own data folder: beside `training/`, above the folder of the step, or here."""
    app = folder.partition("/training/")[0] if "/training/" in folder else ""
    above = "../" * folder.removeprefix(app).strip("/").count("/") + "../data" if app else "data"
    return above if app and first(f"{above}/train.json") else "data"


def _layout(path: str, step: Step, first: FirstRecord) -> dict[str, Any]:
    """format and columns, where the tool reads a file otherwise than surefoot would by itself."""
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
