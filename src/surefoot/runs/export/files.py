"""The files next to the weights of an export: tokenizer, model card, Modelfile and, written last, the certificate.

A Modelfile needs the chat template in Ollama's syntax. A run with a named template records its name. The tokenizer's
own template is a Jinja program and is recognized by its output: if a named template produces the same tokens for every
test conversation, with and without a system message, it is used for the Modelfile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.tokenize.segments import Template, TextEncoder, prompt_ids
from surefoot.families.files import PROCESSOR_FILES, TOKENIZER_FILES, read_json_if_there
from surefoot.families.gguf_rows import is_sentencepiece, ollama_puts_bos
from surefoot.families.template_row import Dialogue, Row, as_one_text
from surefoot.families.templates import OWN, ROWS, find_row
from surefoot.models.convert.source import VALUE_HEAD_FILE
from surefoot.models.folder import ADAPTER_CONFIG, stored_tensors
from surefoot.models.save import ADAPTER_WEIGHTS
from surefoot.report.cards.export import CERTIFICATE, ExportFacts, Served, export_card, modelfile_text
from surefoot.runs.export.certificate import FORMAT, hashes
from surefoot.runs.export.parts import ExportParts
from surefoot.system import durable, hardware
from surefoot.system.errors import InputError
from surefoot.system.folders import run_of

MODELFILE = "Modelfile"
_TRAINED = ("## Data", "## Training", "## Results")  # sections of a run's card that remain true


def copy_value_head(parts: ExportParts, folder: Path) -> bool:
    """Copy a reward model's value head, byte for byte. Returns whether there was one."""
    there = (parts.trained / VALUE_HEAD_FILE).is_file()
    if there:
        durable.copy_file(parts.trained / VALUE_HEAD_FILE, folder / VALUE_HEAD_FILE)
    return there


def copy_tokenizer(parts: ExportParts, folder: Path) -> None:
    """Copy the tokenizer and the image and audio processors byte for byte: loading and saving a tokenizer can change
    it."""
    for place, names in ((parts.with_tokenizer, TOKENIZER_FILES), (parts.base, PROCESSOR_FILES)):
        for name in names:
            if (place / name).is_file():
                durable.copy_file(place / name, folder / name)


def write_guides(
    parts: ExportParts, folder: Path, record: Mapping[str, Any], *, name: str, modelfile: bool
) -> list[str]:
    """Write README.md and the Modelfile. Returns warnings for the user."""
    cautions = []
    if modelfile:
        served = _served(parts, folder)
        durable.write_text(folder / MODELFILE, modelfile_text(served))
        if served.row is None:
            cautions.append(f"the Modelfile has no TEMPLATE: {served.without}")
        cautions += [f"Modelfile: {note}" for note in served.notes]
    facts = ExportFacts(
        name=name,
        base=parts.base_name,
        opened_by=parts.facts.opened_by,
        base_is_hub_id=parts.base_is_hub_id,
        base_revision=parts.base_revision,
        adapters=tuple(adapter_line(saved.folder.resolve().name, saved.settings) for saved in parts.chain),
        record=record,
        has_template=(folder / "chat_template.jinja").is_file(),
        modelfile=modelfile,
        trained=_trained_sections(parts.trained),
        puts_bos_itself=parts.bos_id is not None and not parts.tokenizer_writes_bos,
    )
    durable.write_text(folder / "README.md", export_card(facts))
    return cautions


def write_certificate(folder: Path, record: dict[str, Any], inputs: Mapping[str, Any]) -> None:
    """Write export.json, with the hash of every other file in the folder."""
    outputs = hashes({path.name: path for path in folder.iterdir() if path.name != CERTIFICATE})
    content = {"format": FORMAT, "versions": hardware.versions(), "inputs": inputs, "outputs": outputs, **record}
    record.update(content)
    durable.write_json(folder / CERTIFICATE, content)


def input_record(parts: ExportParts) -> dict[str, Any]:
    """Names and hashes of the inputs of an export. Folder names only, no paths: the file may be published."""
    weights = {tensor.file.name: tensor.file for tensor in stored_tensors(parts.base).values()}
    tokenizer = {name: parts.with_tokenizer / name for name in TOKENIZER_FILES}
    return {
        "base": {
            "name": public_name(parts.base_name, parts.base_is_hub_id),
            "revision": parts.base_revision,
            "files": hashes({"config.json": parts.base / "config.json", **weights}),
        },
        "adapters": [
            {
                "name": saved.folder.resolve().name,
                "about": adapter_line("", saved.settings),
                "files": hashes({name: saved.folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}),
            }
            for saved in parts.chain
        ],
        "tokenizer": hashes({name: path for name, path in tokenizer.items() if path.is_file()}),
    }


def public_name(name: str, is_hub_id: bool) -> str:
    """A hub id unchanged; for a folder, its name without the path."""
    return name if is_hub_id else Path(name).resolve().name


def adapter_line(name: str, settings: Mapping[str, Any]) -> str:
    """ "DoRA of rank 16, alpha 32, rslora", preceded by the name if there is one."""
    kind = "DoRA" if settings.get("use_dora") else "LoRA"
    line = f"{kind} of rank {settings.get('r', 8)}, alpha {settings.get('lora_alpha', 8):g}"
    line += ", rslora" if settings.get("use_rslora") else ""
    return f"{name} ({line})" if name else line


def _served(parts: ExportParts, folder: Path) -> Served:
    if parts.plan is None and parts.template.name != OWN:
        row, without = None, "the model has no chat template, and the one used in training is unknown"
    else:
        row, without = served_row(parts.template, parts.encoder, parts.tokens.stop.value)
    tokenizer = parts.encoder.tokenizer
    stops = tuple(str(tokenizer.convert_ids_to_tokens(number)) for number in parts.tokens.stop.value)
    found = sorted(path.name for path in folder.glob("*.gguf"))
    bos = "" if parts.bos_id is None else str(tokenizer.convert_ids_to_tokens(parts.bos_id))
    begins, notes = ("", ()) if found else _ollama_bos(folder, bos)
    return Served(
        source=f"./{found[0]}" if found else ".",
        row=row,
        without=without,
        eos=stops[0] if stops else "",
        bos=str(tokenizer.bos_token or ""),
        stops=stops,
        begins=begins,
        notes=notes,
    )


def _ollama_bos(folder: Path, bos: str) -> tuple[str, tuple[str, ...]]:
    """Return the BOS text that the template must write, and warnings where Ollama differs from training. A GGUF file
    defines this in its metadata; from a safetensors folder Ollama derives it.

    bos: BOS text used in training, "" for none.
    """
    tokenizer = read_json_if_there(folder / "tokenizer.json")
    puts = ollama_puts_bos(read_json_if_there(folder / "tokenizer_config.json"), tokenizer)
    notes = []
    if puts and not bos:
        notes.append("Ollama puts BOS before every prompt, but training did not; a GGUF file (--gguf) prevents it")
    if is_sentencepiece(tokenizer) and not (folder / "tokenizer.model").is_file():
        what = "Ollama reads this kind of tokenizer from tokenizer.model"
        notes.append(f"{what}: copy the base's to here, or `surefoot export` with --gguf")
    return ("" if puts else bos), tuple(notes)


def _trained_sections(trained: Path) -> str:
    """The sections on data, training and results of the run's card, without images."""
    run = run_of(trained)
    if run is None or not (run / "README.md").is_file():
        return ""
    sections = (run / "README.md").read_text(encoding="utf-8").split("\n## ")
    kept = [f"## {section}" for section in sections[1:] if f"## {section}".startswith(_TRAINED)]
    lines = "\n".join(kept).splitlines()
    return "\n".join(line for line in lines if not line.startswith("![")).strip()


_SYSTEM, _ASK = Turn("system", "Be brief."), Turn("user", "What is a heron?")
_MORE = (Turn("assistant", "A bird."), Turn("user", "And a trout?"))
_TRIED = ((_ASK,), (_SYSTEM, _ASK), (_ASK, *_MORE), (_SYSTEM, _ASK, *_MORE))


def served_row(template: Template, encoder: TextEncoder, stop_ids: Sequence[int]) -> tuple[Row | None, str]:
    """Return the template row, or None and the reason."""
    row = find_row(template.name)
    if row is not None:
        return (as_one_text(row) if isinstance(row, Dialogue) else row), ""
    wanted = _written(template, encoder)
    if wanted is None:
        return None, "the model's chat template cannot write a system text and two questions"
    for candidate in ROWS:
        if isinstance(candidate, Dialogue) and _same(candidate, wanted, encoder, stop_ids):
            return candidate, ""
    return None, "the model's chat template is not equivalent to any of surefoot's named templates"


def _same(row: Dialogue, wanted: list[list[int]], encoder: TextEncoder, stop_ids: Sequence[int]) -> bool:
    try:
        return _written(make_template(row.name, encoder, stop_ids), encoder) == wanted
    except InputError:  # the tokenizer lacks a token that the row needs
        return False


def _written(template: Template, encoder: TextEncoder) -> list[list[int]] | None:
    try:
        return [prompt_ids(Conversation(turns), template, encoder, None) for turns in _TRIED]
    except RowFault:
        return None
