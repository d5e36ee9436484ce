"""Translate scripts that measure a model: those of LLM-Adapters, DoRA, and the BOS experiment on Phi-3.

    commonsense_evaluate.py --dataset boolq --model LLaMA3-8B --adapter DoRA --base_model … --lora_weights …
    evaluate_rmsnorm_llamafactory.py --model_name … --adapter_path … --output_dir … --generate_samples
    capture_phi3_with_rmsnorm_weights.py --model-id … --output-dir … --seq-len 1024

Each becomes arguments of `surefoot evaluate` or `surefoot capture`. Facts: the argument parsers of LLM-Adapters
(Apache-2.0) and the BOS experiment's documents. The BOS embedding's scale is read from the adapter's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.launch import Command, Options
from surefoot.interop.settings import Row, by_name, joint, switches, text, whole
from surefoot.interop.tool import Tool
from surefoot.interop.translation import Translation
from surefoot.interop.words import read_only_flags

SETS = ("boolq", "piqa", "social_i_qa", "hellaswag", "winogrande", "ARC-Challenge", "ARC-Easy", "openbookqa")


def _commonsense(draft: Draft) -> None:
    base, adapter, name = draft["base_model"], draft["lora_weights"], draft["dataset"]
    if name is not None and name not in SETS:
        draft.refuse("dataset", f"{name} is not one of the eight sets", f"use one of {', '.join(SETS)}")
    if draft["load_8bit"]:
        draft.refuse("load_8bit", "surefoot loads the base in its stored dtype", "leave it out")
    draft.arguments += ["commonsense", str(base), "--adapter", str(adapter), "--only", "adapter"]
    draft.arguments += ["--data", ".", "--sets", str(name), "--mode", "published"]
    draft.arguments += ["--model-label", str(draft["model"]), "--label", str(draft["adapter"])]
    draft.arguments += ["--out", "experiment", "--batch-size", str(draft["batch_size"])]
    _carry(draft)
    draft.assume(
        "padding in a batch", "masked here; the original attends to it, which is why its batches held one question"
    )


def _norms(draft: Draft) -> None:
    draft.arguments += ["norms", str(draft["model_name"])]
    for word in ("adapter_path", "output_dir"):
        if draft[word] is not None:
            draft.arguments += [*draft.rows[word].keys, str(draft[word])]
    if draft["output_dir"] is not None:
        draft.arguments.append("--overwrite")
        draft.assume("earlier findings in --output_dir", "are replaced, as the script did", "--overwrite")
    if draft["generate_samples"]:
        draft.arguments.append("--generate-samples")
    _carry(draft)


def _capture(draft: Draft) -> None:
    draft.arguments += [str(draft["model_id"]), "--out", str(draft["output_dir"]), "--overwrite"]
    draft.arguments += ["--seq-len", str(draft["seq_len"])]
    draft.assume("an earlier capture in --output-dir", "is replaced, as the script did", "--overwrite")
    draft.drop("norm weights are captured with everything else", "rmsnorm_weights_path")
    _carry(draft)


def _needed(name: str, key: str, about: str = "") -> Row:
    return joint(name, None, (key,), about, type=text, required=f"write --{name} VALUE")


def _carry(draft: Draft) -> None:
    for row in draft.rows.values():
        if row.keys:
            draft.note(row.name, "carried", "", *row.keys)


def _tool(program: str, verb: str, rows: Mapping[str, Row], rule: Callable[[Draft], None]) -> Tool:
    dialect = Dialect(program, rows, (rule,))

    def from_command(command: Command, options: Options) -> Translation:
        words = read_only_flags(command.arguments, switches=switches(rows))
        return Draft(dialect, words, command, options).finish(verb)

    return Tool(program, lambda command: command.name == program, from_command, rows=rows)


COMMONSENSE = _tool(
    "commonsense_evaluate.py",
    "evaluate",
    by_name(
        _needed("dataset", "--sets"),
        _needed("model", "--model-label", "names the files"),
        _needed("adapter", "--label", "names the files"),
        _needed("base_model", "MODEL"),
        _needed("lora_weights", "--adapter"),
        joint("batch_size", 1, ("--batch-size",), type=whole),
        joint("load_8bit", False, ()),
    ),
    _commonsense,
)
NORMS_ROWS = by_name(
    _needed("model_name", "MODEL"),
    joint("adapter_path", None, ("--adapter",), type=text),
    joint("output_dir", None, ("--out",), type=text),
    joint("generate_samples", False, ("--generate-samples",)),
)
NORMS = _tool("evaluate_rmsnorm_llamafactory.py", "evaluate", NORMS_ROWS, _norms)
CAPTURE_ROWS = by_name(
    _needed("model_id", "MODEL"),
    _needed("output_dir", "--out"),
    joint("seq_len", 1024, ("--seq-len",), type=whole),
    joint("rmsnorm_weights_path", None, (), type=text),
)
CAPTURE = _tool("capture_phi3_with_rmsnorm_weights.py", "capture", CAPTURE_ROWS, _capture)
TOOLS = (COMMONSENSE, NORMS, CAPTURE)
