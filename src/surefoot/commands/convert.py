"""`surefoot convert`: convert weights from any recognized layout to a normal folder, or to another layout.

The result is written completely or not at all. `convert.json` in its folder records the rules, the number of keys, and
the SHA-256 of every file read and written.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from surefoot.commands.terminal import echo
from surefoot.families.bos_zero import BOS_FILE
from surefoot.families.files import read_json
from surefoot.models.convert.layouts import ADAPTER_TARGETS, LAYOUTS, MODEL_TARGETS, TARGETS, adapter_rules_to, rules_to
from surefoot.models.convert.recognize import VALUE_HEAD, Target, recognize
from surefoot.models.convert.recognize_adapter import fit_to_base, halves, recognize_adapter
from surefoot.models.convert.rules import KINDS, Rule, apply
from surefoot.models.convert.safetensors_file import lazy_tensors, write_file, write_model
from surefoot.models.convert.source import VALUE_HEAD_FILE, Source, find_weights, open_source
from surefoot.models.convert.tensors import LazyTensor, Tensors, layout_error
from surefoot.models.facts import facts_of, model_config
from surefoot.models.folder import ADAPTER_CONFIG, stored_tensors
from surefoot.system import durable, hardware
from surefoot.system.errors import Fault, InputError
from surefoot.system.folders import require_replaceable


def _list(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    echo("layouts, with the rules that convert each to transformers' or PEFT's (*: can be written with --to)")
    for layout in LAYOUTS:
        rules = f"  [{', '.join(layout.rules)}]" if layout.rules else ""
        echo(f"  {'*' if layout.to else ' '} {layout.name:<15} {layout.recognized_by.replace('`', '')}{rules}")
    echo("rules and their inverses")
    for name, kind in KINDS.items():
        echo(f"    {name:<16} {kind.sentence}; undone by: {kind.inverse or 'nothing'}")
    ctx.exit()


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the result.")
@click.option("--to", type=click.Choice(TARGETS), help="Layout to write.  [default: hf for models, peft for adapters]")
@click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder for what SOURCE lacks: config, tokenizer, output head.",
)
@click.option(
    "--list", "show", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="Print layouts and rules."
)
@click.option("--dry-run", is_flag=True, help="Print what would be done and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier conversion in --out.")
def convert(source: Path, out: Path | None, to: str | None, base: Path | None, dry_run: bool, overwrite: bool) -> None:
    """Write the weights in SOURCE, a folder or a file, as a normal safetensors folder.

    The layout is recognized by names and shapes; every value stays bit for bit. Pickled files and ZeRO checkpoints are
    opened in a child process that cannot run code from them. convert.json records what was done.
    """
    from surefoot.config.paths import nearest_path

    if not source.exists():
        raise InputError(Fault(str(source), "no such file or folder", nearest_path(source, ()), code="SF-FILE-MISSING"))
    if out is None and not dry_run:
        raise click.UsageError("missing option '--out'; use --dry-run to write nothing")

    find_weights(source)
    result = convert_weights(source, None if dry_run else out, to=to, base=base, overwrite=overwrite)
    own = "transformers' own layout" if result.kind == "model" else "PEFT's own layout"
    found = ", ".join(result.layouts) or own
    echo(f"{source}: {result.kind}, {result.keys_in} weights; found: {found}")
    for rule in result.rules:
        echo(f"  {rule.kind}: {_settings_line(rule.settings)}")
    for note in result.notes:
        echo(f"note: {note}")
    count = len(result.tensors) + len(result.value_head)
    if dry_run:
        echo(f"{count} weights would be written as {result.to}; nothing was written")
    else:
        echo(f"{count} weights written as {result.to} to {out}: {', '.join(result.files)}, {RECORD}")


def _settings_line(settings: Mapping[str, Any]) -> str:
    """Format a rule's settings in one line, long lists by their first items."""
    shown = []
    for key, value in settings.items():
        if value == []:
            continue
        if isinstance(value, list):
            items = [repr(item) if item == "" else str(item) for item in value[:4]]
            value = "[" + ", ".join(items + ["…"] * (len(value) > 4)) + "]"
        shown.append(f"{key} {value}")
    return ", ".join(shown) or "all"


RECORD = "convert.json"
_COMPANIONS = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|.*\.model|chat_template\.jinja|"
    r"generation_config\.json"
)
_SCRATCH = ".scratch"  # inside the staging folder, and removed with it


@dataclass
class Converted:
    """The result of a conversion, or of a dry run. notes: sentences for the user."""

    kind: str  # model | adapter
    layouts: list[str]
    rules: list[Rule]
    to: str
    keys_in: int
    tensors: Mapping[str, LazyTensor]
    notes: list[str] = field(default_factory=list)
    value_head: Mapping[str, LazyTensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # adapter_config.json
    config: Path | None = None  # folder with config.json
    files: dict[str, str] = field(default_factory=dict)  # written, with SHA-256


def convert_weights(
    source: Path,
    out: Path | None,
    *,
    to: str | None = None,
    base: Path | None = None,
    overwrite: bool = False,
) -> Converted:
    """Convert `source` to the layout `to` in the folder `out`; with None, only report.

    source: a folder or a file.
    to: a name of `surefoot.models.convert.layouts.TARGETS`; None is hf for a model and peft for an adapter.
    base: a folder for what the source lacks: config, tokenizer, an output head.
    overwrite: replace an earlier conversion in `out`.

    Raises InputError if the source is not recognized, EnvironmentFault if the result cannot be written.
    """
    if out is not None:
        if out.resolve() == source.resolve() or out.resolve() in source.resolve().parents:
            raise InputError(
                Fault(str(out), "is the folder of the source", "choose another --out", code="SF-USE-OUTPUT")
            )
        require_replaceable(out, overwrite, RECORD, "conversion", lambda record: record["files_out"])
        durable.require_writable(out)
    with _staging(out, overwrite) as folder:
        opened = open_source(source, folder / _SCRATCH)
        result = _converted(opened, source, to, base)
        if out is not None:
            _write(result, folder, opened, base)
    return result


@contextmanager
def _staging(out: Path | None, overwrite: bool) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        with durable.staged_folder(out, replace=overwrite or (out.is_dir() and not any(out.iterdir()))) as folder:
            yield folder


def _converted(opened: Source, source: Path, to: str | None, base: Path | None) -> Converted:
    bare = {name: tensor for name, tensor in opened.tensors.items() if not name.startswith(VALUE_HEAD)}
    place = _adapter_config(opened.folder, base)
    model, adapter = halves(bare, read_json(place) if place else {})
    if adapter and model and to is None:
        what = f"holds a model of {len(model)} weights and an adapter of {len(adapter)}"
        raise layout_error(str(source), what, "convert them separately: --to hf and --to peft")
    if not adapter or (model and to == "hf"):
        heads = {name: tensor for name, tensor in opened.tensors.items() if name not in bare}
        result = _model({**model, **heads}, opened, source, to or "hf", base)
    else:
        result = _adapter(adapter, opened, source, to or "peft", base)
    if adapter and model:
        left = len(adapter) if result.kind == "model" else len(model)
        result.notes.append(f"{left} weights of the other part are not in the result")
    if base and (base / BOS_FILE).is_file() and not (opened.folder / BOS_FILE).is_file():
        what = f"{BOS_FILE} of {base} was not copied: nothing records whether {source} was trained with its factor"
        result.notes.append(f"{what}; copy the file if it was")
    if opened.zero:
        result.layouts.insert(0, "zero")
        result.notes.append("the weights are the optimizer's fp32 copies, whatever the model's type was")
    return result


def _adapter_config(folder: Path, base: Path | None) -> Path | None:
    """adapter_config.json of the source, or of --base for bare weights."""
    places = (one / ADAPTER_CONFIG for one in (folder, base) if one)
    return next((path for path in places if path.is_file()), None)


def _model(tensors: Tensors, opened: Source, source: Path, to: str, base: Path | None) -> Converted:
    from surefoot.models.load import expected_tensors

    if to not in MODEL_TARGETS:
        raise layout_error(f"--to {to}", "is a layout of adapters", f"of a model: {', '.join(MODEL_TARGETS)}")
    config = _config_folder(opened.folder, source, base)
    target = Target(expected_tensors(model_config(config)), facts_of(config))
    found = recognize(tensors, target, str(source))
    result = Converted("model", list(found.layouts), list(found.rules), to, len(tensors), found.tensors, config=config)
    faults = found.faults
    if target.expected.keys() - found.tensors.keys() == {target.head} and not target.facts.tied:
        result.tensors = {**found.tensors, target.head: _head_of(base, target, source)}
        result.notes.append(f"{target.head} was taken from {base}, because the source has none")
        faults = tuple(fault for fault in faults if "are missing" not in fault.what)
    if faults and (form := target.facts.stored_form):
        what = f"its weights are stored in {form}, and a conversion changes no value"
        raise layout_error(str(source), what, f"surefoot export {source} --out FOLDER writes what they stand for")
    if faults:
        raise InputError(faults)
    outgoing = rules_to(to, result.tensors, target, bool(found.value_head))
    after = {**result.tensors, **found.value_head}
    for rule in outgoing:
        after = apply(rule, after)
    result.rules += outgoing
    if any(rule.kind == "drop tied head" for rule in outgoing):
        result.layouts.append("tied-head")
    apart = to != "deepspeed-chat"
    result.value_head = {name: one for name, one in after.items() if apart and name.startswith(VALUE_HEAD)}
    result.tensors = {name: one for name, one in after.items() if name not in result.value_head}
    _note_dtype(result, target)
    return result


def _head_of(base: Path | None, target: Target, source: Path) -> LazyTensor:
    if base is None:
        what = f"has no {target.head}, and config.json does not tie it to the embedding"
        raise layout_error(str(source), what, "name the model it was trained from: --base FOLDER")
    head = lazy_tensors(stored_tensors(base)).get(target.head)
    if head is None or head.shape != target.expected[target.head]:
        raise layout_error(str(base), f"has no {target.head} of shape {list(target.expected[target.head])}")
    return head


def _note_dtype(result: Converted, target: Target) -> None:
    name = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[target.facts.stored]
    held = sorted({tensor.dtype for tensor in result.tensors.values()})
    if held != [name]:
        result.notes.append(
            f"config.json says {target.facts.stored}; the weights are {', '.join(held)} and were not cast"
        )


def _adapter(tensors: Tensors, opened: Source, source: Path, to: str, base: Path | None) -> Converted:
    if to not in ADAPTER_TARGETS:
        what = "is a layout of models, and this is an adapter"
        raise layout_error(f"--to {to}", what, f"of an adapter: {', '.join(ADAPTER_TARGETS)}")
    path = _adapter_config(opened.folder, base)
    if path is None:
        what = f"has no {ADAPTER_CONFIG}, and rank and alpha are not in the weights"
        raise layout_error(str(source), what, "put it into the same folder")
    found = recognize_adapter(tensors, read_json(path), str(source))
    target = _base_target(found.config, base)
    if target is not None and to not in ("fused", "split"):
        found = fit_to_base(found, target, str(path))
    outgoing, after, settings = adapter_rules_to(to, found.tensors, found.config, target, str(path))
    rules = [*found.rules, *outgoing]
    result = Converted("adapter", list(found.layouts), rules, to, len(tensors), after, settings=settings)
    heads = {name: tensor for name, tensor in opened.tensors.items() if name.startswith(VALUE_HEAD)}
    result.value_head = heads
    if target is None:
        result.notes.append("the base model was not found, so it was not checked that the adapter fits (give --base)")
    return result


def _base_target(config: Mapping[str, Any], base: Path | None) -> Target | None:
    """The target from --base, or from the base folder that the adapter names if it exists."""
    named = config.get("base_model_name_or_path")
    folder = base or (Path(named) if isinstance(named, str) and named else None)
    if folder is None or not (folder / "config.json").is_file():
        return None
    return Target({}, facts_of(folder))


def _config_folder(folder: Path, source: Path, base: Path | None) -> Path:
    """The folder with config.json: the weights' folder, --base, or the checkpoint's parent; never an adapter's
    folder."""
    for place in (folder, base, folder.parent):
        if place is not None and (place / "config.json").is_file() and not (place / ADAPTER_CONFIG).is_file():
            return place
    what = "has no config.json, and the weights' names do not tell the model's sizes"
    raise layout_error(str(source), what, "give a folder that has it: --base FOLDER")


def _write(result: Converted, folder: Path, opened: Source, base: Path | None) -> None:
    if result.kind == "model":
        assert result.config is not None
        shutil.copyfile(result.config / "config.json", folder / "config.json")
        write_model(folder, result.tensors)
    else:
        durable.write_json(folder / ADAPTER_CONFIG, dict(sorted(result.settings.items())))
        write_file(folder / "adapter_model.safetensors", result.tensors)
    if result.value_head:
        write_file(folder / VALUE_HEAD_FILE, result.value_head)
    for place in (opened.folder, *((base,) if base else ())):
        for path in sorted(place.iterdir()):
            # The factor belongs to the trained weights; the base's factor may not be the source's.
            companion = _COMPANIONS.fullmatch(path.name) or (path.name == BOS_FILE and place == opened.folder)
            if path.is_file() and companion and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
    shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
    result.files = {path.name: durable.sha256_file(path) for path in sorted(folder.iterdir())}
    durable.write_json(folder / RECORD, _record(result, opened))


def _record(result: Converted, opened: Source) -> dict[str, Any]:
    return {
        "kind": result.kind,
        "layouts": result.layouts or ["hf" if result.kind == "model" else "peft"],
        "to": result.to,
        "rules": [{"kind": rule.kind, "settings": dict(rule.settings)} for rule in result.rules],
        "keys": {"in": result.keys_in, "out": len(result.tensors) + len(result.value_head)},
        "notes": result.notes,
        "files_in": {path.name: durable.sha256_file(path) for path in opened.files},
        "files_out": result.files,
        "versions": hardware.versions(),
    }
