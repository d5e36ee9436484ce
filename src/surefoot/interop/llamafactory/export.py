"""`llamafactory-cli export` and `chat`, as words of `surefoot export` and `surefoot chat`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.rows import names, number, text, whole
from surefoot.interop.translation import Translation
from surefoot.interop.words import Word

_READ = (
    "model_name_or_path",
    "adapter_name_or_path",
    "export_dir",
    "export_size",
    "export_device",
    "export_legacy_format",
    "export_hub_model_id",
    "export_quantization_bit",
    "quantization_bit",
    "model_revision",
    "infer_dtype",
    "finetuning_type",
    "stage",
    "template",
    "max_new_tokens",
    "temperature",
    "top_p",
)
_TYPES = {
    "export_dir": text,
    "export_size": number,
    "export_device": text,
    "infer_dtype": text,
    "max_new_tokens": whole,
    "temperature": number,
    "top_p": number,
}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def export(words: Sequence[Word], verb: str, dialect: Dialect, *, allow_unknown: bool) -> Translation:
    """verb: export or chat. Every other word is about training and is listed."""
    rows = {  # none speaks for itself here
        name: replace(row, kind="joint", type=_TYPES.get(name, row.type)) for name, row in dialect.rows.items()
    }
    about = Dialect(dialect.tool, rows, (), dialect.aliases)
    draft = Draft(about, words, allow_unknown=allow_unknown)
    for word in words:
        name = dialect.aliases.get(word.name, word.name)
        if name not in _READ and name in dialect.rows:
            row = dialect.rows[name]
            other = "is not about exporting" if verb == "export" else "is not about a conversation"
            draft.drop(row.about if row.kind == "listed" else other, name)
    model, adapters = draft["model_name_or_path"], draft["adapter_name_or_path"]
    if not model:
        draft.refuse("model_name_or_path", "is required", "name a folder or hub id")
        return draft.finish(verb)
    chain = names(adapters) if adapters is not None else []
    if len(chain) > 1 and verb == "chat":
        draft.refuse("adapter_name_or_path", "surefoot talks to one adapter", "export them merged first")
    draft.note("model_name_or_path", "carried", "", "MODEL")
    draft.arguments = [model]
    if chain:
        draft.note("adapter_name_or_path", "carried", "", "--adapter")
        for adapter in chain:
            draft.arguments += ["--adapter", adapter]
    else:
        draft.drop("names no adapter", "adapter_name_or_path")
    draft.drop("is seen from the folder", "finetuning_type", "stage")
    draft.drop("is read from the tokenizer and the run", "template")
    if draft.given("model_revision") and draft["model_revision"] != "main":
        draft.refuse("model_revision", f"{verb} reads what lies on this machine", "download the revision first")
    draft.note("model_revision", "carried", "the hub's own default")
    if draft["quantization_bit"] is not None:
        draft.refuse("quantization_bit", "weights are merged into the un-quantised base", "leave it out")
    (_export if verb == "export" else _chat)(draft, bool(chain))
    return draft.finish(verb)


def _export(draft: Draft, merged: bool) -> None:
    target = draft["export_dir"]
    if not target:
        draft.refuse("export_dir", "is required", "name the folder of the merged model")
        return
    if merged:
        draft.arguments.append("--merge")
    draft.note("export_dir", "carried", "", "--out")
    draft.arguments += ["--out", target]
    if draft.given("export_size"):
        size = draft["export_size"]
        if size <= 0:
            draft.refuse("export_size", f"expected a number of GB above 0, got {size:g}")
        draft.arguments += ["--max-shard-size", f"{size:g}GB"]
        draft.note("export_size", "carried", "", "--max-shard-size")
    else:
        draft.arguments += ["--max-shard-size", "5GB"]
        draft.assume("export_size: 5", "the default of LLaMA-Factory", "--max-shard-size")
    dtype = draft["infer_dtype"]
    if dtype in _DTYPES:
        draft.arguments += ["--dtype", _DTYPES[dtype]]
        draft.note("infer_dtype", "carried", "", "--dtype")
    else:
        draft.drop("the type of the base", "infer_dtype")
    device = draft["export_device"]
    if device not in ("cpu", "auto"):
        draft.refuse("export_device", f"expected cpu or auto, got {device}")
        return
    draft.arguments += ["--device", device] if draft.given("export_device") else []
    draft.note("export_device", "carried", "", "--device")
    if draft["export_legacy_format"]:
        draft.refuse("export_legacy_format", "surefoot writes safetensors and pickles nothing", "leave it out")
    draft.drop("asks for nothing", "export_legacy_format")
    if draft["export_quantization_bit"] is not None:
        draft.refuse("export_quantization_bit", "surefoot quantises no exported model", "quantise the merged folder")
    if draft["export_hub_model_id"] is not None:
        draft.refuse("export_hub_model_id", "export writes a folder", "upload it afterwards: surefoot push")
    draft.drop("is about answering", "max_new_tokens", "temperature", "top_p")


def _chat(draft: Draft, merged: bool) -> None:
    for name, flag in (("max_new_tokens", "--max-new-tokens"), ("temperature", "--temperature"), ("top_p", "--top-p")):
        value = draft[name]
        draft.arguments += [flag, f"{value:g}" if name != "max_new_tokens" else str(value)]
        draft.note(name, "carried", "", flag)
    draft.assume("temperature: 0.95, top_p: 0.7, max_new_tokens: 1024", "where the words give no others")
    exports = [name for name in _READ if name.startswith("export_")]
    draft.drop("is not about a conversation", "infer_dtype", *exports)
