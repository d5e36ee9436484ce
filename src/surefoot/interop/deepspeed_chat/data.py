"""Translate DeepSpeed-Chat's datasets: names, files and folders, and the share of each step.

It reads every dataset as text: a prompt that already contains `Human:` and `Assistant:`, then the answer and EOS. For
some it makes these texts of other columns. Facts: dschat/utils/data of DeepSpeedExamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Texts:
    """How DeepSpeed-Chat makes the texts of a dataset, with {{COLUMN}} for what a record has.

    rejected: "" if no record has a worse answer. asked: the prompt of step 3, if it is another than the others'.
    split: the evaluation split; "" for surefoot's default, None if a tenth of the training split is held out.
    """

    prompt: str
    chosen: str
    rejected: str = ""
    asked: str = ""
    split: str | None = None


def _question(column: str) -> str:
    return f" Human: {{{{{column}}}}} Assistant:"


_QUERIES = _Texts(_question("query"), " {{positive_passages.0.text}}", " {{negative_passages.0.text}}", split="")
_FILE_TEXTS = _Texts(" {{prompt}}", " {{chosen}}", " {{rejected}}")
_MADE: Mapping[str, _Texts] = {
    "Dahoas/synthetic-instruct-gptj-pairwise": _Texts(_question("prompt"), " {{chosen}}", " {{rejected}}"),
    "yitingxie/rlhf-reward-datasets": _Texts(
        "{{prompt}}", "{{chosen}}", "{{rejected}}", asked="{{prompt}}Assistant:", split="test"
    ),
    "wangrui6/Zhihu-KOL": _Texts(_question("INSTRUCTION"), " {{RESPONSE}}"),
    "Cohere/miracl-zh-queries-22-12": _QUERIES,
    "Cohere/miracl-ja-queries-22-12": _QUERIES,
}
_CHOOSES = "DeepSpeed-Chat chooses the better answer by a {}"
_SCRIPT = "a script builds them"
_NOT: Mapping[str, str] = {  # why surefoot does not read these
    "openai/webgpt_comparisons": f"{_CHOOSES.format('score')}, and takes the citations out",
    "stanfordnlp/SHP": _CHOOSES.format("label"),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": "DeepSpeed-Chat renames the speakers in every prompt",
    **dict.fromkeys(
        ("Hello-SimpleAI/HC3-Chinese", "mkqa-Chinese", "mkqa-Japanese", "lmqg/qg_jaquad", "lmqg/qag_jaquad"), _SCRIPT
    ),
}
_FILE = "local/jsonfile"
_HELD_OUT = 0.1  # fraction of a dataset without an evaluation split, as in DeepSpeed-Chat
_TENTHS = (9, 1)  # the same as a share: to train on, to evaluate on


def data_rule(step: Step) -> Callable[[Draft], None]:
    return partial(_set_data, step=step)


def _set_data(draft: Draft, step: Step) -> None:
    first, folder = draft.options.first, draft.folder
    share = _share(draft, step)
    train: list[dict[str, Any]] = []
    evaluation: list[dict[str, Any]] = []
    names = [(name, share) for name in draft["data_path"]]
    if step == "sft":
        names += [(name, None) for name in draft["sft_only_data_path"]]
        if not draft["sft_only_data_path"]:
            draft.drop("names no dataset", "sft_only_data_path")
    for name, part in names:
        for target, source in zip((train, evaluation), _sources(draft, name, step, part, first, folder), strict=True):
            target += source
    made = any("compose" in source for source in train)
    why = "DeepSpeed-Chat uses no chat template"
    if step != "sft" and not made:  # step 1 trains on prompt and answer as one text
        why = "texts are used as they are; in dialogues, each earlier answer ends with EOS"
    draft.set("data.template", "raw" if step == "sft" or made else BY_RECORD, why=why)
    words = ("data_path", "data_split", *(["sft_only_data_path"] if step == "sft" else []))
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


def _sources(
    draft: Draft, name: str, step: Step, share: Mapping[str, Any] | None, first: FirstRecord, folder: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training source and the evaluation source of a dataset; none for what it does not have."""
    more = {"share": share} if share else {}
    if name == _FILE:
        place = _data_folder(folder, first)
        made = {"compose": _composed(_FILE_TEXTS, step), **_format(step), **more}
        return [{"path": f"{place}/train.json", **made}], [{"path": f"{place}/eval.json", **made}]
    if known := next((one for one in _NOT if one in name), None):
        what = f"surefoot does not support the records of {known}: {_NOT[known]}"
        fix = "write them to a file of records with prompt, chosen and rejected, and give that file"
        draft.refuse(_setting(draft, name), what, fix)
        return [], []
    if known := next((one for one in _MADE if one in name), None):
        return _made(draft, name, _MADE[known], step, more)
    if known := next((one for one in _PLAIN if one in name), None):
        found = {"path": name, **_layout(name, step, first), **more}
        return [found], [{"path": name, "split": _PLAIN[known], **_layout(name, step, first), **more}]
    paths = [name]
    if not is_hub_data(name) and not name.endswith(DATA_SUFFIXES) and first(f"{name.rstrip('/')}/eval.json"):
        paths = [f"{name.rstrip('/')}/{part}.json" for part in ("train", "eval")]
    train, *evaluation = [{"path": path, **_layout(path, step, first), **more} for path in paths]
    return [train], evaluation


def _made(
    draft: Draft, name: str, texts: _Texts, step: Step, more: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the sources of a dataset whose texts DeepSpeed-Chat makes."""
    if step in ("reward", "dpo") and not texts.rejected:
        what = f"{name} has no worse answers, so DeepSpeed-Chat takes nothing of it in step 2"
        draft.refuse(_setting(draft, name), what, "leave it out")
        return [], []
    source = {"path": name, "compose": _composed(texts, step), **_format(step)}
    if texts.split is not None:
        split = {"split": texts.split} if texts.split else {}
        return [{**source, **more}], [{**source, **split, **more}]
    part = more.get("share", {"of": [1], "take": 1})
    of = [tenths * size for size in part["of"] for tenths in _TENTHS]
    shares = [{"of": of, "take": 2 * part["take"] - 1 + held} for held in (0, 1)]
    train, evaluation = ({**source, "share": one} for one in shares)
    return [train], [evaluation]


def _setting(draft: Draft, name: str) -> str:
    return "data_path" if name in draft["data_path"] else "sft_only_data_path"


def _format(step: Step) -> dict[str, str]:
    return {"format": {"sft": "prompt-completion", "ppo": "prompts"}.get(step, "preference")}


def _composed(texts: _Texts, step: Step) -> dict[str, str]:
    """Return the text of each field that the step reads."""
    if step == "ppo":
        return {"prompt": texts.asked or texts.prompt}
    if step == "sft":
        return {"prompt": texts.prompt, "completion": texts.chosen}
    return {"prompt": texts.prompt, "chosen": texts.chosen, "rejected": texts.rejected}


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
