"""Translate the flags of `train_sft.py`, a hand-written training loop of which only notes remain.

The notes name --micro-bsz, --accum, --torch-compile, --compile-mode and --workers, and say that it ran in bf16 or fp16
and printed `[profile] forward … backward …`. They do not name the other flags that a command needs: --dtype and the
flags from --model on are surefoot's choice. Whatever no flag decides is left to surefoot's plan, which measures
attention kernels; the script chose one by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from surefoot.interop.adapters import module_names
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.launch import Command, Options
from surefoot.interop.settings import Row, by_name, carried, joint, number, one_of, switches, text, whole
from surefoot.interop.shared_rules import counted, on_or_auto, resume_argument, set_batch
from surefoot.interop.tool import Tool
from surefoot.interop.trainer import set_compile
from surefoot.interop.translation import Translation
from surefoot.interop.words import read_only_flags

TOOL = "train_sft.py"
_NOTED = 8  # micro-batch size and accumulation steps in the notes


_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
           "float32": "fp32", "float": "fp32"}  # fmt: skip


def _epochs(value: Any) -> str | None:
    return None if value is None else counted(value, "epoch")


_ROWS = (
    joint("micro_bsz", _NOTED, ("batch.micro", "batch.size"), "examples per forward pass"),
    joint("accum", _NOTED, ("batch.size",), "forward passes per optimizer step"),
    joint("torch_compile", False, ("compile",)),
    joint("compile_mode", None, ("compile",), "default, reduce-overhead or max-autotune", type=text),
    carried("workers", 0, "data.workers"),
    joint("bf16", False, ("precision.compute",)),
    joint("fp16", False, ("precision.compute",)),
    carried(
        "dtype", None, "precision.compute", one_of(_DTYPES), "dtype of matrix products: bf16, fp16 or fp32", type=text
    ),
    carried("tf32", False, "precision.tf32", on_or_auto),
    joint("resume", None, (), "becomes --resume"),
    carried("model", None, "model.path", None, "the base model", type=text, required="write --model PATH"),
    carried("data", None, "data.train", None, "the training data", type=text, required="write --data PATH"),
    carried("out", None, "output", None, "the run folder", type=text, required="write --out PATH"),
    carried("lr", None, "optim.lr", None, "peak learning rate", type=number),
    carried("epochs", None, "duration", _epochs, "passes over the data", type=number),
    carried("max_len", None, "data.max_length", None, "maximum tokens per example", type=whole),
    carried("seed", None, "seed", None, "seed of data order and new weights", type=whole),
    carried("lora_r", None, "adapter.rank", None, "the adapter's rank", type=whole),
    carried("lora_alpha", None, "adapter.alpha", None, "the adapter's alpha", type=number),
    carried("lora_targets", None, "adapter.targets", None, "modules that get an adapter", type=module_names),
)
ROWS: Mapping[str, Row] = by_name(*_ROWS)


def _precision(draft: Draft) -> None:
    given = [name for name in ("bf16", "fp16") if draft[name]]
    if len(given) + draft.given("dtype") > 1:
        draft.refuse("fp16" if draft["fp16"] else "bf16", "another dtype is given as well", "give one of them")
    elif given:
        draft.set("precision.compute", given[0], given[0])
    elif not draft.given("dtype") and (launched := draft.facts.get("mixed_precision")):
        draft.set("precision.compute", launched, why="accelerate's mixed_precision")


def _rest(draft: Draft) -> None:
    draft.set("stage", "sft")
    set_batch(draft, "micro_bsz", "accum")
    if "adapter" in draft.config:
        draft.set("adapter.kind", "lora")
    draft.arguments += ["--time-every", "1"]
    draft.assume("[profile] lines", "printed at every step, as the script did")
    resume_argument(draft, "resume", str(draft["out"] or ""))


_DIALECT = Dialect(TOOL, ROWS, (partial(set_compile, mode="compile_mode"), _precision, _rest))


def from_command(command: Command, options: Options) -> Translation:
    """Translate a command. Raises InputError with every fault."""
    words = read_only_flags(command.arguments, switches=switches(ROWS) | {"resume"}, lists=("lora_targets",))
    return Draft(_DIALECT, words, command, options).finish("train")


def claims(command: Command) -> bool:
    return command.name == "train_sft.py"


TRAIN_SFT = Tool(name=TOOL, claims_command=claims, from_command=from_command, rows=ROWS)
