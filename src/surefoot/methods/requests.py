"""Check arguments of the command line about data and models against their config files.

    named = named_model("runs/one", None)
    require_positions("--max-length", 4096, named.facts.max_positions)

No torch is imported, so errors appear at once. Python callers get the same errors from the same functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from surefoot.config.load import check_config
from surefoot.config.schema import RunConfig
from surefoot.config.sections import SourceConfig
from surefoot.config.yaml_reader import parse_value
from surefoot.families.files import read_json, read_text
from surefoot.families.model_facts import ModelFacts
from surefoot.families.templates import OWN, is_users_own, named_row
from surefoot.methods.provenance import recorded_base
from surefoot.models.facts import facts_of
from surefoot.models.folder import ADAPTER_CONFIG, resolve_folder
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import size_text

_ANY_MODEL = "any/model"  # a hub id that is never looked up
_ARGUMENT = {
    "data.train.path": "DATA",
    "data.train": "DATA",
    "data.template": "--template",
    "data.max_length": "--max-length",
    "data.max_samples": "--max-samples",
}


@dataclass(frozen=True)
class DataRequest:
    """Data arguments of a command line.

    source: a path or hub id, or a YAML mapping (or list of them) with the keys of data.train.
    template, max_length: None: the run's own, or what a run on this model would use.
    """

    source: str
    template: str | None = None
    max_length: int | None = None
    max_samples: int | None = None


def norms_request(
    model: str,
    adapter: str | None,
    data: str | None,
    template: str | None,
    *,
    max_samples: int,
    generate_samples: bool,
    bos: bool | None,
) -> dict[str, Any]:
    """The request of `evaluate norms`, as stored in norms.json."""
    words = {"model": model, "adapter": adapter, "data": data, "template": template}
    first = {} if bos is None else {"bos": bos}  # omitted if unset, as in earlier versions
    return {**words, "max_samples": max_samples, "generate_samples": generate_samples, **first}


def check_request(request: DataRequest) -> None:
    """Raise InputError for a missing or malformed source, and for an unknown template."""
    if request.template not in (None, "auto", OWN) and not is_users_own(request.template):
        require_template(request.template)
    config_for(request, _ANY_MODEL, template=request.template or "auto", stage="sft", train_on="responses")


def require_template(name: str) -> None:
    """Raise InputError for an unknown template name. Whether a tokenizer supports it is checked elsewhere."""
    if isinstance(fault := named_row(name, lambda text: True), Fault):
        raise InputError(_reworded(fault))


def config_for(
    request: DataRequest,
    model: str,
    *,
    template: str,
    stage: str,
    train_on: str,
    encoding: str = "parts",
    max_pixels: int | None = None,
) -> RunConfig:
    """Return the config with which a run would read this data. Raises InputError in terms of the command line."""
    data = {
        "train": _train(request.source),
        "template": template,
        "max_samples": request.max_samples,
        "train_on": train_on,
        "encoding": encoding,
        "max_pixels": max_pixels,
    }
    with words_of_the_command():
        return check_config({"stage": stage, "model": model, "data": data, "output": "none"})


def sources_of(source: str) -> tuple[SourceConfig, ...]:
    """Return the sources that DATA names, as of a stage that answers prompts. Raises InputError in terms of the command
    line."""
    with words_of_the_command():
        checked = check_config(
            {"stage": "grpo", "model": _ANY_MODEL, "data": {"train": _train(source)}, "output": "none"}
        )
    return checked.data.train


def _train(source: str) -> Any:
    """The value of data.train."""
    return parse_value(source, "DATA") if source.lstrip().startswith(("{", "[")) else source


@contextmanager
def words_of_the_command() -> Iterator[None]:
    """Rename config keys in errors to the arguments they came from, because the user wrote no config."""
    try:
        yield
    except InputError as error:
        raise InputError([_reworded(fault) for fault in error.faults]) from None


def _reworded(fault: Fault) -> Fault:
    where, fix = _ARGUMENT.get(fault.where, fault.where), fault.fix
    if where.startswith("data.train."):
        where = f"DATA{where.removeprefix('data.train')}"
    for key, argument in _ARGUMENT.items():
        # "data.template: plain" is "--template plain".
        fix = re.sub(rf"(?<![\w.]){re.escape(key)}(: |=| )", f"{argument} ", fix)
    return replace(fault, where=where, fix=fix)


Only = Literal["base", "adapter"]
_USUAL = 512  # tokens to capture
_MAP_BYTES = 2 << 30  # attention maps of one layer


@dataclass(frozen=True)
class NamedModel:
    """What is known of a model named on the command line, without loading it.

    facts: facts of the model, or of the adapter's base.
    adapted: whether there is an adapter.
    """

    facts: ModelFacts
    adapted: bool


def named_model(path: str, adapter: str | None) -> NamedModel | None:
    """Return the facts of the model named on the command line.

    path, adapter: as for `open_for_use`. None for an adapter that records its base in another layout than PEFT's; it is
        checked when it is opened.
    """
    folder = resolve_folder(path, weights=True)
    if adapter is not None or not (folder / ADAPTER_CONFIG).is_file():
        return NamedModel(facts_of(folder), adapter is not None)
    saved = read_json(folder / ADAPTER_CONFIG)
    base, revision = saved.get("base_model_name_or_path"), saved.get("revision")
    if not isinstance(base, str) or not base or not isinstance(revision, str | None):
        return None
    return NamedModel(facts_of(recorded_base(path, folder, base, revision)), True)


def require_side(only: Only | None, adapted: bool) -> None:
    if only == "adapter" and not adapted:
        raise InputError(Fault("--only", "asks for an adapter, and there is none", "leave it out", code="SF-USE-FLAG"))


def require_positions(flag: str, tokens: int, positions: int) -> None:
    if tokens > positions:
        raise InputError(
            Fault(flag, f"{tokens} is more than the model's {positions} positions", "lower it", code="SF-DATA-LENGTH")
        )


def require_room_for_answers(tokens: int, positions: int) -> None:
    """Check that a prompt of at least one token fits too."""
    if tokens >= positions:
        what = f"{tokens} and a prompt are more than the model's {positions} positions"
        raise InputError(Fault("--max-new-tokens", what, "lower it", code="SF-DATA-LENGTH"))


def usual_tokens(positions: int) -> int:
    """Default number of tokens to capture."""
    return min(_USUAL, positions)


def require_maps(facts: ModelFacts, tokens: int) -> None:
    """Raise InputError if the attention maps of one layer would need too much memory."""
    if (size := 4 * facts.heads * tokens**2) > _MAP_BYTES:
        what = f"the maps of one layer would take {size_text(size)} of memory"
        raise InputError(Fault("--attention", what, "lower --seq-len", code="SF-MEMORY"))


def require_mergeable(path: str, *, merge: bool, gguf: bool, adapted: bool) -> None:
    if merge and not adapted:
        raise InputError(
            Fault(path, "is a whole model, so there is nothing to merge", "leave --merge out", code="SF-USE-FLAG")
        )
    if gguf and adapted and not merge:
        raise InputError(
            Fault("--gguf", "is for whole models, and this is an adapter", "give --merge as well", code="SF-USE-FLAG")
        )


def written_text(path: Path) -> str:
    """Read the text to run a model on. Raises InputError if it is empty."""
    content = read_text(path)
    if not content.strip():
        raise InputError(Fault(str(path), "is empty", "write something into it", code="SF-DATA-EMPTY"))
    return content


def layer_numbers(spec: str, count: int) -> Sequence[int]:
    """Parse --layers for `count` layers. Raises InputError."""
    try:
        return chosen_layers(spec, count)
    except ValueError as error:
        raise InputError(Fault("--layers", str(error), "such as all, 0 or 0,5-7", code="SF-USE-FLAG")) from None


def chosen_layers(spec: str, count: int) -> Sequence[int]:
    """ "all", or numbers and ranges such as "0,5-7"; sorted, without duplicates. Raises ValueError with the reason."""
    if spec.strip() == "all":
        return range(count)
    chosen: set[int] = set()
    for part in spec.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither a layer's number nor a range such as 5-7")
        start, end = int(first), int(last or first)
        if end < start:
            raise ValueError(f"{part.strip()!r} ends before it begins")
        if end >= count:
            raise ValueError(f"there is no layer {end}: this model has layers 0 to {count - 1}")
        chosen.update(range(start, end + 1))
    return sorted(chosen)
