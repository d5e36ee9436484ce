"""Rules for settings of a script that rows alone do not translate."""

from __future__ import annotations

from typing import Any

from surefoot.interop import trainer, trl
from surefoot.interop.draft import Draft
from surefoot.interop.script.machine import KERNELS
from surefoot.interop.script.reader import Reader
from surefoot.interop.shared_rules import NEW_ROWS, set_added, set_patience, short_sources
from surefoot.interop.trl.data import set_examples


def set_tokens(draft: Draft) -> None:
    set_added(draft, draft["added_tokens"] or (), "added_tokens", why=NEW_ROWS)


SHARED = (trainer.set_do_train, set_tokens)


def data_rule(reader: Reader) -> Any:
    def rule(draft: Draft) -> None:
        assert reader.train is not None
        draft.set(
            "data.train", short_sources([_trained(reader.train.source)]), why=f"load_dataset at {reader.train.where}"
        )
        test = reader.evaluation
        if test is not None and test.share is not None and test.is_test:
            draft.set("data.eval", test.share, why=f"train_test_split at {test.where}")
        elif test is not None:
            draft.set("data.eval", short_sources([test.source]), why=f"load_dataset at {test.where}")
        draft.set("stage", "sft")
        set_stopping(draft)
        if reader.is_trl:
            set_examples(draft, None)
            draft.note("dataset_text_field", "listed", "surefoot detects the format of the records")
            draft.drop("the script defines its data", *_TRL_DATA)
        else:
            collator = "as in a causal LM collator; data.train_on=responses masks prompts"
            draft.set("data.train_on", "everything", why=collator)
            draft.set("data.encoding", "whole", why="texts are tokenized in one piece and truncated at the end")
        if reader.learned not in (None, "everything"):
            draft.config["data"]["train_on"] = reader.learned  # in place of what the trainer alone would learn
            draft.assume("data.train_on", "as DataCollatorForCompletionOnlyLM masks labels", "data.train_on")

    return rule


def set_stopping(draft: Draft) -> None:
    """Set early stopping, after data.eval."""
    set_patience(draft, "early_stopping_patience", "name an eval_dataset")
    if draft.written("early_stopping") is not None:
        draft.set("early_stopping.min_delta", draft["early_stopping_threshold"], "early_stopping_threshold")


_TRL_DATA = (
    "dataset_name",
    "datasets",
    "dataset_train_split",
    "dataset_test_split",
    "test_split_size",
    "dataset_config",
)


def set_kernels(draft: Draft) -> None:
    """Set the attention kernels, after attention.implementation. The plan chooses among allowed ones, as torch does."""
    named = [f"enable_{kernel}_sdp" for kernel in KERNELS]
    if draft["attn_implementation"] not in (None, "sdpa"):
        draft.drop(f"{draft['attn_implementation']} attention has no choice of kernels", *named)
        return
    for kernel, name in zip(KERNELS, named, strict=True):
        if draft.given(name):
            allowed = draft[name]
            checked = "allowed, but used only if it passes the accuracy check" if kernel == "cudnn" else ""
            value = allowed if allowed == "on" else "auto" if allowed else "off"
            draft.set(f"attention.{kernel}", value, name, why=checked if allowed is True else "")


def precision_rule(reader: Reader) -> Any:
    def rule(draft: Draft) -> None:
        if reader.undecided & {"bf16", "fp16"} and not (draft.given("bf16") and draft["bf16"]):
            if draft["fp16"]:
                draft.set("precision.compute", "fp16", "fp16")
        elif reader.is_trl:
            trl.set_compute(draft)
        else:
            trainer.set_precision(draft)
        trl.set_weights(draft)

    return rule


def _trained(source: dict[str, Any]) -> dict[str, Any]:
    """Return the source without its default split; evaluation sources keep theirs."""
    return {key: value for key, value in source.items() if (key, value) != ("split", "train")}
