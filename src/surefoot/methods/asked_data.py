"""Data named on a command line, as a run's config would name it. No torch: a wrong path is answered at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from surefoot.config.load import check_config
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import parse_value
from surefoot.families.templates import OWN, is_file, named_row
from surefoot.system.errors import Fault, InputError

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
    """source: a path or hub id, or a YAML mapping (or list of them) with the keys of data.train. template, max_length:
    None takes the run's own, or else what a run on this model would take."""

    source: str
    template: str | None = None
    max_length: int | None = None
    max_samples: int | None = None


def norms_request(
    model: str,
    adapter: str | None,
    data: str | None,
    template: str | None,
    texts: int,
    samples: bool,
    bos: bool | None,
) -> dict[str, Any]:
    """What `evaluate norms` is asked, as norms.json keeps it."""
    words = {"model": model, "adapter": adapter, "data": data, "template": template}
    first = {} if bos is None else {"bos": bos}  # left open, the request is that of earlier findings
    return {**words, "max_samples": texts, "generate_samples": samples, **first}


def check_request(asked: DataRequest) -> None:
    """Raises InputError for a source that does not exist or is not written as one, and for an unknown template."""
    if asked.template not in (None, "auto", OWN) and not is_file(asked.template):
        require_template(asked.template)
    config_for(asked, _ANY_MODEL, template=asked.template or "auto", stage="sft", train_on="responses")


def require_template(name: str) -> None:
    """InputError for a name that no template has. Whether a tokenizer can write it, only the tokenizer tells."""
    if isinstance(fault := named_row(name, lambda text: True), Fault):
        raise InputError(_reworded(fault))


def config_for(
    asked: DataRequest, model: str, *, template: str, stage: str, train_on: str, encoding: str = "parts"
) -> RunConfig:
    """The config under which a run would read this data. Raises InputError in the words of the command line."""
    written = asked.source.lstrip().startswith(("{", "["))
    train = parse_value(asked.source, "DATA") if written else asked.source
    data = {"train": train, "template": template, "max_samples": asked.max_samples, "train_on": train_on}
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
    return Fault(where, fault.what, fix)
