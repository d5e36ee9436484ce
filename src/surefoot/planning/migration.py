"""Move a config to another model family: which keys change, to what, and why. Pure; the config stays a plain mapping.

Only keys that depend on the old model change: names of its modules and tokens, its padding, templates, and rates and
sizes that suit its size. What no rule can convert (such as a reward model of the old family) becomes a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from surefoot.config.methods import RewardTerm
from surefoot.config.overrides import set_at, value_at
from surefoot.families import FAMILIES, counterpart
from surefoot.families.family import Family, Structure
from surefoot.families.model_facts import ModelFacts
from surefoot.method_facts.methods import METHODS
from surefoot.system.locations import is_address, is_function

# Learning rates for full fine-tuning of an 8 B Llama, from a guide for moving from OPT to Llama 3.1: each method's
# `large_rate`, and 5e-6 for the critic. Adapters keep their rate: it depends on rank and alpha.
_CRITIC_RATE = 5e-6
_LARGE = 10**9  # number of parameters from which they apply


@dataclass(frozen=True)
class Move:
    """One key that changes.

    key: dotted key.
    old, new: plain values; None for a key that was absent or is removed.
    """

    key: str
    old: Any
    new: Any
    why: str


@dataclass(frozen=True)
class Migration:
    """A config for another model family.

    config: the config for the new model.
    moves: the keys that changed.
    notes: sentences about what the user must do.
    """

    config: dict[str, Any]
    moves: tuple[Move, ...]
    notes: tuple[str, ...]


def migrate(given: Mapping[str, Any], path: str, model: ModelFacts) -> Migration:
    """Move a config to another model.

    given: the config's keys as the user set them, short forms expanded.
    path: path or name of the new model, as given by the user.
    model: its facts.
    """
    moves, notes = [], []
    for rule in _RULES:
        for found in rule(given, path, model):
            (notes if isinstance(found, str) else moves).append(found)
    config = deepcopy(dict(given))
    for move in moves:
        set_at(config, move.key, move.new)
    return Migration(config, tuple(moves), tuple(notes))


_Found = Iterator[Move | str]


def _model(given: Mapping[str, Any], path: str, model: ModelFacts) -> _Found:
    yield Move("model.path", value_at(given, "model.path"), path, "the new model")
    if (revision := value_at(given, "model.revision")) is not None:
        yield Move("model.revision", revision, None, "it is a revision of the old model")


def _targets(given: Mapping[str, Any], path: str, model: ModelFacts) -> _Found:
    """Map modules by role: the new family's layer with the same role."""
    for key in ("adapter.targets", "adapter.modules_to_save"):
        names = value_at(given, key)
        if not isinstance(names, list):
            continue
        if model.family is None or model.structure is None:
            yield f"{key}: {model.model_type} is not described: check {', '.join(names)} with `surefoot plan`"
            continue
        new, unknown = _renamed(names, model.family, model.structure)
        for name in unknown:
            yield f"{key}: {name} has no counterpart that is known in {model.family.name}; see `surefoot plan`"
        if new != names:
            yield Move(key, names, new, f"the names of {model.family.name}'s modules")


def _renamed(names: list[str], family: Family, structure: Structure) -> tuple[list[str], list[str]]:
    own = {linear.path.rpartition(".")[2] for linear in structure.linears}
    ends = {path.rpartition(".")[2] for path in (structure.embedding, structure.head)}
    new: list[str] = []
    unknown: list[str] = []
    for name in names:
        last = name.rpartition(".")[2]
        found = last if last in own else _end_of(last, structure) if last not in ends else last
        found = found or counterpart(last, family)
        if found is None:
            unknown.append(name)
        new += [found] if found and found not in new else []
    gate = next((linear.path.rpartition(".")[2] for linear in structure.linears if linear.role == "gate"), None)
    up = next((linear.path.rpartition(".")[2] for linear in structure.linears if linear.role == "up"), None)
    if gate and up in new and gate not in new and not any(name.rpartition(".")[2] == gate for name in names):
        new.insert(new.index(up), gate)  # the old MLP without a gate has one matrix, this one has two
    return new, unknown


def _end_of(name: str, structure: Structure) -> str | None:
    """Return the new family's name of the embedding or head."""
    for other in (family.structure for family in FAMILIES if family.structure):
        for end in ("embedding", "head"):
            if getattr(other, end).rpartition(".")[2] == name:
                return str(getattr(structure, end)).rpartition(".")[2]
    return None


def _padding(given: Mapping[str, Any], path: str, model: ModelFacts) -> _Found:
    pad = value_at(given, "tokenizer.pad")
    if pad not in (None, "auto", "add"):
        yield Move("tokenizer.pad", pad, "auto", "a token of the old tokenizer; the plan says which one it takes")
    count = value_at(given, "reward.num_padding_at_beginning")
    if isinstance(count, int):
        yield Move(
            "reward.num_padding_at_beginning", count, "auto", "1 is right for OPT only; auto follows the tokenizer"
        )


def _template(given: Mapping[str, Any], path: str, model: ModelFacts) -> _Found:
    name = value_at(given, "data.template")
    of_families = {template for family in FAMILIES for template in family.templates}
    own = model.family.templates if model.family else ()
    if name in of_families and name not in own:
        yield Move("data.template", name, "auto", "the old model's; the plan says which one it takes")


def _length(given: Mapping[str, Any], path: str, model: ModelFacts) -> _Found:
    length = value_at(given, "data.max_length")
    if isinstance(length, int) and length > model.max_positions:
        yield Move("data.max_length", length, model.max_positions, "all positions of the new model")


def _rates(given: Mapping[str, Any], path: str, model: ModelFacts) -> _Found:
    stage = value_at(given, "stage")
    method = METHODS.get(stage) if isinstance(stage, str) else None
    if value_at(given, "adapter") is not None:
        if value_at(given, "optim.lr") is not None:
            yield "optim.lr stays: an adapter's rate depends on its rank and alpha more than on the model"
    elif (usual := method.large_rate if method else None) is not None and model.parameters >= _LARGE:
        rate = value_at(given, "optim.lr")
        if rate != usual:
            yield Move("optim.lr", rate, usual, f"usual for stage {stage} on all weights of some 8 B")
    critic = value_at(given, "ppo.critic_lr")
    if method is not None and method.critic and critic not in (None, _CRITIC_RATE) and model.parameters >= _LARGE:
        yield Move("ppo.critic_lr", critic, _CRITIC_RATE, "usual for a critic of about 8 B")


def _batch(given: Mapping[str, Any], path: str, model: ModelFacts) -> _Found:
    micro = value_at(given, "batch.micro")
    if isinstance(micro, int):
        why = "an example needs another share of the memory now; the plan takes as many as fit, at the same batch.size"
        yield Move("batch.micro", micro, "auto", why)


def _output(given: Mapping[str, Any], path: str, model: ModelFacts) -> _Found:
    old = value_at(given, "output")
    name = path.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    yield Move("output", old, f"{old}-{name}", "the old run keeps its folder")


def _others(given: Mapping[str, Any], path: str, model: ModelFacts) -> _Found:
    for key in ("reward.init", "ppo.reward", "ppo.critic"):
        name = value_at(given, key)
        if name is not None and not is_address(str(name)) and not is_function(str(name)):
            yield f"{key}: {name} belongs to the old model (its tokenizer must be the policy's): train it anew"
    for term in value_at(given, "grpo.rewards") or ():
        name = term["name"] if isinstance(term, Mapping) else term
        if RewardTerm(name=name).is_model:
            yield f"grpo.rewards: {name} belongs to the old model (its tokenizer must be the policy's): train it anew"
    reference = value_at(given, "alignment.reference")
    if reference not in (None, "auto", "adapter-off", "model", "cached"):
        yield f"alignment.reference: {reference} must have the new model's tokenizer"


_RULES: tuple[Callable[[Mapping[str, Any], str, ModelFacts], _Found], ...] = (
    _model,
    _targets,
    _padding,
    _template,
    _length,
    _rates,
    _batch,
    _output,
    _others,
)
