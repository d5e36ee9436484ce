"""Write the GGUF file of an export and verify it with the GGUF reader of transformers, which shares no code with the
writer. For architectures that the writer does not support, the user gets the command of llama.cpp's converter.
"""

from __future__ import annotations

import shlex
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from surefoot.families.gguf_rows import CONVERTER
from surefoot.models.gguf import ChatSettings, NotInGguf, write_gguf
from surefoot.models.load import load_tokenizer
from surefoot.models.quiet import quiet_libraries
from surefoot.models.verify import compare_logits, logits_of
from surefoot.planning.plan import DType
from surefoot.runs.export.certificate import MERGED_LIMIT, check_record
from surefoot.runs.export.merge import BUILT_IN, PromptSet
from surefoot.runs.export.parts import ExportParts
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.system.libraries import is_installed

# Metadata that transformers reads back and that affects what the model computes.
_CHECKED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
)
_OUT_TYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def require_gguf_package() -> None:
    """Raise EnvironmentFault if the gguf package is not installed."""
    if not is_installed("gguf"):
        what = "needs the gguf package, which is not installed"
        raise EnvironmentFault(
            Fault("--gguf", what, "pip install 'surefoot[gguf]', or leave --gguf out", code="SF-PACKAGE")
        )


def add_gguf(
    parts: ExportParts, folder: Path, model: PreTrainedModel, prompts: PromptSet, record: dict[str, Any], out: Path
) -> list[str]:
    """Write and verify `folder`/NAME-dtype.gguf; `record` gets the result. model: the model in the folder, loaded.

    Returns warnings; for an unsupported model, the command that converts it.
    Raises EnvironmentFault if the file loads as a different model.
    """
    dtype: DType = record["dtype"]
    file = folder / f"{out.name}-{_OUT_TYPES[dtype]}.gguf"
    tokenizer = load_tokenizer(folder)
    requested = ChatSettings(
        bos_id=parts.bos_id,
        stops=parts.tokens.stop.value,
        pad_id=parts.tokens.pad_id,
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )
    try:
        write_gguf(folder, file, tokenizer, requested, name=out.name, window=parts.facts.window)
        cautions = _check_tokenizer(folder, file, parts)
    except NotInGguf as reason:
        file.unlink(missing_ok=True)
        command = CONVERTER.format(
            folder=shlex.quote(str(out)), file=shlex.quote(str(out / file.name)), outtype=_OUT_TYPES[dtype]
        )
        return [f"no GGUF file: {reason}; convert it with llama.cpp: {command}"]
    record["checks"]["reloaded_and_gguf"] = _check_model(folder, file, model, prompts)
    return cautions


def _check_model(folder: Path, file: Path, model: PreTrainedModel, prompts: PromptSet) -> dict[str, Any]:
    """Compare the weights bit for bit, and the logits."""
    config = model.config
    with quiet_libraries(), redirect_stderr(StringIO()):  # its progress bar cannot be switched off
        described = AutoConfig.from_pretrained(folder, gguf_file=file.name)
        wrong = [key for key in _CHECKED if getattr(described, key) != getattr(config, key)]
        # Scaled rotary positions and the width of Qwen3's heads are in the file, but transformers does not read them.
        plain = config.rope_parameters["rope_type"] == "default" and config.model_type != "qwen3"
        given = {} if plain else {"config": config}
        again = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=model.dtype, **given).eval()
    again.to(model.device)  # pyright: ignore[reportArgumentType]  # a decorator of transformers hides the signature
    ours, theirs = model.state_dict(), again.state_dict()
    wrong += sorted(ours.keys() ^ theirs.keys())
    wrong += [name for name in ours if name in theirs and not torch.equal(ours[name], theirs[name])]
    found = compare_logits(logits_of(model, prompts.ids), logits_of(again, prompts.ids))
    if wrong or not found.share <= MERGED_LIMIT:
        names = ", ".join(wrong[:3])
        what = f"loads as a different model: {len(wrong)} values differ ({names}), logits by {found.share:.2g}"
        raise EnvironmentFault(Fault(file.name, what, "nothing was published; please report it", code="SF-EXPORT"))
    return check_record(found, MERGED_LIMIT)


def _check_tokenizer(folder: Path, file: Path, parts: ExportParts) -> list[str]:
    """Compare token ids for texts of several languages and control tokens. Raises NotInGguf if they differ.

    SentencePiece-like tokenizers differ in whether text after a control token gets a leading space. The file format
    cannot express this, and its readers disagree, so such texts are not compared and the user gets a warning.
    """
    with quiet_libraries():
        again = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    own = parts.encoder.tokenizer
    control = "".join(parts.encoder.control.values())
    mixed = [] if parts.encoder.puts_blank else [f"a  b\n\n c\t12345 {control} d"]
    for text in (*BUILT_IN, control, *mixed):
        wanted, found = (one(text, add_special_tokens=False)["input_ids"] for one in (own, again))
        if wanted != found:
            raise NotInGguf(f"its tokenizer would encode {text[:40]!r} as {found[:8]}, not {wanted[:8]}")
    if mixed:
        return []
    return [f"{file.name}: the format cannot express whether text after a control token begins with a space"]
