"""Rules: exact changes of names and shapes, each with an exact inverse.

A rule is a kind and its settings, plain JSON, so that `convert.json` records what was done and `inverse` undoes it with
the same settings. `apply` maps names to tensors that are not read (`surefoot.models.convert.tensors`). A rule that does
not fit its tensors raises InputError and changes nothing: no name is dropped and no value rounded.

    rule = Rule("unwrap", {"piece": "_orig_mod", "at": [""], "but": []})
    apply(inverse(rule), apply(rule, tensors)) == tensors
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surefoot.models.convert.adapter_rules import (
    fuse_adapter,
    name_adapter,
    new_magnitude,
    old_magnitude,
    split_adapter,
    unname_adapter,
)
from surefoot.models.convert.model_rules import (
    Settings,
    add_value_bias,
    copy_head,
    drop_buffers,
    drop_head,
    drop_value_bias,
    fuse,
    split,
    transpose,
    unwrap,
    wrap,
)
from surefoot.models.convert.tensors import LazyTensor, Tensors
from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class Rule:
    """kind: a row of KINDS. settings: its parameters, JSON-able; the inverse has the same."""

    kind: str
    settings: Settings


@dataclass(frozen=True)
class Kind:
    """inverse: the kind that undoes it; None where what is left out cannot be had back. sentence: what it does."""

    inverse: str | None
    sentence: str
    change: Callable[[Tensors, Settings], dict[str, LazyTensor]]


def apply(rule: Rule, tensors: Tensors) -> dict[str, LazyTensor]:
    """The tensors after `rule`. Raises InputError where it does not fit."""
    return KINDS[rule.kind].change(tensors, rule.settings)


def inverse(rule: Rule) -> Rule:
    """The rule that undoes it, bit for bit. Raises InputError where there is none."""
    kind = KINDS[rule.kind].inverse
    if kind is None:
        raise InputError(Fault(rule.kind, "has no inverse: what it leaves out is not kept"))
    return Rule(kind, rule.settings)


KINDS: dict[str, Kind] = {
    "unwrap": Kind("wrap", "takes a wrapper's piece out of the names", unwrap),
    "wrap": Kind("unwrap", "puts a wrapper's piece into the names", wrap),
    "split": Kind("fuse", "splits a fused matrix and its bias into their parts", split),
    "fuse": Kind("split", "puts the parts of a fused matrix and its bias together", fuse),
    "transpose": Kind("transpose", "turns the weights of linear layers, as Conv1D has them", transpose),
    "drop tied head": Kind("copy tied head", "leaves out an output head that is the embedding", drop_head),
    "copy tied head": Kind("drop tied head", "writes the embedding a second time, as output head", copy_head),
    "add value bias": Kind("drop value bias", "gives a value head without bias one of zero", add_value_bias),
    "drop value bias": Kind("add value bias", "leaves out a value head's bias of zero", drop_value_bias),
    "drop buffers": Kind(None, "leaves out tables that the model computes by itself", drop_buffers),
    "unname adapter": Kind("name adapter", "takes the adapter's name out of the names", unname_adapter),
    "name adapter": Kind("unname adapter", "puts the adapter's name into the names", name_adapter),
    "new magnitude": Kind("old magnitude", "renames DoRA's magnitudes, [outputs, 1] to [outputs]", new_magnitude),
    "old magnitude": Kind("new magnitude", "renames DoRA's magnitudes, [outputs] to [outputs, 1]", old_magnitude),
    "split adapter": Kind("fuse adapter", "splits the adapter of a fused matrix", split_adapter),
    "fuse adapter": Kind("split adapter", "puts the adapters of its parts together", fuse_adapter),
}
