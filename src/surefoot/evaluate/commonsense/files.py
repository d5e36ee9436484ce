"""The files of answers: their names, and whether existing ones belong to the current evaluation.

A set's file is a plain list of records, as in the original scripts. Its identity (questions, model, and everything else
that an answer depends on) is in a separate file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.evaluate.commonsense.protocol import Record
from surefoot.evaluate.side_by_side import Side
from surefoot.families.bos_zero import BOS_FILE
from surefoot.families.files import read_json
from surefoot.methods.open_model import OpenModel
from surefoot.models.folder import ADAPTER_CONFIG, base_fingerprint
from surefoot.models.forward import causal_model
from surefoot.models.precision import CODES
from surefoot.models.save import ADAPTER_WEIGHTS
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError


def side_labels(
    opened: OpenModel,
    compared: Sequence[Side],
    names: tuple[str | None, str | None],
    model: str,
    adapter: str | None,
) -> dict[str, str]:
    """Side -> name in tables and files. Raises InputError if two sides would write the same files."""
    labels = {side.name: _side_label(opened, side, names, model, adapter) for side in compared}
    if len(set(labels.values())) < len(labels):
        what = f"the base and the adapter would both be called {labels['adapter']} and write the same files"
        raise InputError(Fault("--label", what, "give the adapter another name with --label", code="SF-EVALUATE"))
    return labels


def _side_label(
    opened: OpenModel, side: Side, names: tuple[str | None, str | None], model: str, adapter: str | None
) -> str:
    """<model>-<adapter>, the start of the file names. The base is called base with and without an adapter, because its
    answers are the same and are computed only once."""
    settings = read_json(opened.trained / ADAPTER_CONFIG) if opened.trained != opened.base else {}
    of_model = names[0] or _last_word(settings.get("base_model_name_or_path") or model if adapter is None else model)
    if side.name != "adapter":
        return f"{of_model}-base"
    return f"{of_model}-{names[1] or _last_word(adapter or model)}"


def _last_word(path: str) -> str:
    """Of a path or hub id; for `runs/x/checkpoint-7` the run as well."""
    parts = [part for part in Path(path).resolve().parts if part] if Path(path).is_dir() else path.split("/")
    name = "-".join(parts[-2:]) if parts[-1].startswith("checkpoint-") else parts[-1]
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)


def model_identity(opened: OpenModel, side: Side) -> dict[str, Any]:
    return {
        "base": base_fingerprint(opened.base),
        "adapter": _adapter_fingerprint(opened.trained) if side.name == "adapter" else None,
        "precision": _precision(opened),
    }


def _precision(opened: OpenModel) -> str:
    """How the base is held: the same whether or not an adapter lies over it."""
    embedding = causal_model(opened.model).get_input_embeddings().weight
    held = {parameter.dtype for parameter in opened.model.parameters()}
    packed = "".join(f", {name}" for name, dtype in CODES.items() if dtype in held)
    return f"{embedding.dtype}{packed} on {embedding.device.type}"


def _adapter_fingerprint(folder: Path) -> str:
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, BOS_FILE)
    parts = [durable.sha256_file(folder / name) for name in names if (folder / name).is_file()]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def identity_file(file: Path) -> Path:
    """What the answers in a set's file belong to; it stands apart, because the file itself is a plain list."""
    return file.parent / "identity" / file.name


def summary_file(out: Path, labels: Mapping[str, str]) -> Path:
    """The file with the results on all sets; the picture has the same stem. labels: from `side_labels`."""
    return out / f"{list(labels.values())[-1]}-commonsense.json"


def answered(file: Path, identity: Mapping[str, Any], records: Sequence[Record], overwrite: bool) -> list[Record]:
    """Answers of an earlier start, empty with `overwrite`. Raises InputError if the file belongs to something else."""
    if not os.path.lexists(file):
        return []
    if not identity_file(file).is_file():
        what = "already exists and was not written by `surefoot evaluate commonsense`"
        raise InputError(Fault(str(file), what, "name another --out or --label, or move it away", code="SF-EVALUATE"))
    if overwrite:
        return []
    anew = "name another --out or --label, or discard it with --overwrite"
    then = read_json(identity_file(file))
    if changed := [key for key in {**then, **identity} if then.get(key) != identity.get(key)]:
        what = f"contains answers of another evaluation (different: {', '.join(changed)})"
        raise InputError(Fault(str(file), what, anew, code="SF-EVALUATE"))
    done: list[Any] = []
    try:
        done = json.loads(file.read_text(encoding="utf-8"))
        same = all({**one, **record} == one for one, record in zip(done, records, strict=False))
        whole = len(done) <= len(records) and same and all("flag" in one for one in done)
    except (OSError, ValueError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise InputError(Fault(str(file), "was changed since it was written", anew, code="SF-EVALUATE"))
    return done
