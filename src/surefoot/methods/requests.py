"""What a command line asks of data and of a model, held against their config files.

    named = named_model("runs/one", None)
    require_positions("--max-length", 4096, named.facts.max_positions)

No torch is imported, so a wrong value is answered at once. Whoever opens the model from Python is told the same by the
same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from surefoot.config.load import check_config
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import parse_value
from surefoot.families.files import read_json, read_text
from surefoot.families.model_facts import ModelFacts
from surefoot.families.templates import OWN, is_file, named_row
from surefoot.methods.provenance import recorded_base
from surefoot.models.facts import facts_of
from surefoot.models.folder import ADAPTER_CONFIG, resolve_folder
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import size_text

_ANY_MODEL = "any/model"  # a hub id, which nobody looks up
_ARGUMENT = {
    "data.train.path": "DATA",
    "data.train": "DATA",
    "data.template": "--template",
    "data.max_length": "--max-length",
    "data.max_samples": "--max-samples",
}


@dataclass(frozen=True)
class DataRequest:
    """What a command line says of data.

    source: a path or hub id, or a YAML mapping (or list of them) with the keys of data.train.
    template, max_length: None takes the run's own, or else what a run on this model would take.
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
    """What `evaluate norms` is asked, as norms.json keeps it."""
    words = {"model": model, "adapter": adapter, "data": data, "template": template}
    first = {} if bos is None else {"bos": bos}  # left open, the request is that of earlier findings
    return {**words, "max_samples": max_samples, "generate_samples": generate_samples, **first}


def check_request(request: DataRequest) -> None:
    """Raises InputError for a source that does not exist or is not written as one, and for an unknown template."""
    if request.template not in (None, "auto", OWN) and not is_file(request.template):
        require_template(request.template)
    config_for(request, _ANY_MODEL, template=request.template or "auto", stage="sft", train_on="responses")


def require_template(name: str) -> None:
    """InputError for a name that no template has. Whether a tokenizer can write it, only the tokenizer tells."""
    if isinstance(fault := named_row(name, lambda text: True), Fault):
        raise InputError(_reworded(fault))


def config_for(
    request: DataRequest, model: str, *, template: str, stage: str, train_on: str, encoding: str = "parts"
) -> RunConfig:
    """The config under which a run would read this data. Raises InputError in the words of the command line."""
    written = request.source.lstrip().startswith(("{", "["))
    train = parse_value(request.source, "DATA") if written else request.source
    data = {"train": train, "template": template, "max_samples": request.max_samples, "train_on": train_on}
    data |= {"encoding": encoding}
    with words_of_the_command():
        return check_config({"stage": stage, "model": model, "data": data, "output": "none"})


@contextmanager
def words_of_the_command() -> Iterator[None]:
    """Nobody wrote a config here: an InputError that names a key of one names the argument it came from."""
    try:
        yield
    except InputError as error:
        raise InputError([_reworded(fault) for fault in error.faults]) from None


def _reworded(fault: Fault) -> Fault:
    where, fix = _ARGUMENT.get(fault.where, fault.where), fault.fix
    if where.startswith("data.train."):
        where = f"DATA{where.removeprefix('data.train')}"
    for key, argument in _ARGUMENT.items():
        fix = fix.replace(f"{key} ", f"{argument} ")
    return replace(fault, where=where, fix=fix)


Only = Literal["base", "adapter"]
_USUAL = 512  # tokens that are captured
_MAP_BYTES = 2 << 30  # attention maps of one layer


@dataclass(frozen=True)
class NamedModel:
    """What is known of a model that a command line names, without loading it.

    facts: of the base where an adapter lies over it, which `adapted` says.
    """

    facts: ModelFacts
    adapted: bool


def named_model(path: str, adapter: str | None) -> NamedModel | None:
    """The facts of the model that a command line names.

    path, adapter: as for `open_for_use`. None for an adapter whose base stands elsewhere than in PEFT's layout: the one
        who opens it finds it, and checks then.
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
    """A prompt has one token at least."""
    if tokens >= positions:
        what = f"{tokens} and a prompt are more than the model's {positions} positions"
        raise InputError(Fault("--max-new-tokens", what, "lower it", code="SF-DATA-LENGTH"))


def usual_tokens(positions: int) -> int:
    """Of a capture, where nobody says how many."""
    return min(_USUAL, positions)


def require_maps(facts: ModelFacts, tokens: int) -> None:
    """Attention maps of so many tokens, a layer at a time."""
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
    """A text to run a model on."""
    content = read_text(path)
    if not content.strip():
        raise InputError(Fault(str(path), "is empty", "write something into it", code="SF-DATA-EMPTY"))
    return content


def layer_numbers(spec: str, count: int) -> Sequence[int]:
    """The layers that --layers names, of so many. InputError says what is wrong with it."""
    try:
        return chosen_layers(spec, count)
    except ValueError as error:
        raise InputError(Fault("--layers", str(error), "such as all, 0 or 0,5-7", code="SF-USE-FLAG")) from None


def chosen_layers(spec: str, count: int) -> Sequence[int]:
    """ "all", or numbers and ranges such as "0,5-7", in order and once each. Raises ValueError with the reason."""
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
