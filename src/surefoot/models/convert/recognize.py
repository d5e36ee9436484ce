"""Recognize the layout of a state dict from names and shapes, and find the rules that convert it to transformers'.

No tensor is read. Each step checks one property and adds a rule. In the end every name and shape must match the model
(`Target`); otherwise the errors count missing and surplus weights and show the first of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surefoot.families.family import Linear
from surefoot.families.model_facts import ModelFacts
from surefoot.models.convert.rules import Rule, apply
from surefoot.models.convert.tensors import LazyTensor, Tensors, in_layers, layout_error, some
from surefoot.system.errors import Fault

QKV_NAMES = ("qkv_proj", "qkv", "Wqkv", "c_attn", "in_proj")  # rows of q, then of k, then of v
GATE_UP_NAMES = ("gate_up_proj", "gate_up")
QKV_PARTS = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"))
GATE_UP_PARTS = (("gate_proj", "up_proj"),)


@dataclass(frozen=True)
class Target:
    """The model that the weights are converted for.

    expected: name -> shape of every weight as transformers builds the model, including a tied head.
    """

    expected: Mapping[str, tuple[int, ...]]
    facts: ModelFacts

    @property
    def embedding(self) -> str:
        return f"{self.facts.embedding}.weight"

    @property
    def head(self) -> str:
        return f"{self.facts.head}.weight"

    @property
    def layers(self) -> str:
        """Name of the list of decoder layers; empty if the family's structure is unknown."""
        return self.facts.structure.layers if self.facts.structure else ""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.facts.structure.linears if self.facts.structure else ()

    @property
    def transposed(self) -> bool:
        """Whether the family's linear layers are stored as [inputs, outputs]."""
        return any(linear.transposed for linear in self.linears)


@dataclass(frozen=True)
class Group:
    """Matrices that some layouts store fused and others separately.

    fused, parts: paths within a decoder layer: the family's own first, then those of other layouts.
    sizes: output rows of each part, in order.
    inputs: input columns.
    own_is_fused: whether the family stores them fused.
    """

    fused: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    inputs: int
    own_is_fused: bool


def groups(target: Target) -> list[Group]:
    """Return the family's groups: q, k, v, and gate, up. Empty if its structure is unknown."""
    found = []
    for roles, fused_names, part_names in (
        (("q", "k", "v"), QKV_NAMES, QKV_PARTS),
        (("gate", "up"), GATE_UP_NAMES, GATE_UP_PARTS),
    ):
        whole = next((linear for linear in target.linears if linear.roles == list(roles)), None)
        single = {linear.role: linear for linear in target.linears}
        if whole is not None:
            sizes = tuple(target.facts.size(part) for part in whole.outputs)
            parts = tuple(tuple(sibling(whole.path, leaf) for leaf in leaves) for leaves in part_names)
            found.append(Group((whole.path,), parts, sizes, target.facts.size(whole.inputs), own_is_fused=True))
        elif all(role in single for role in roles):
            members = [single[role] for role in roles]
            sizes = tuple(target.facts.size(member.outputs[0]) for member in members)
            own = tuple(member.path for member in members)
            fused = tuple(sibling(own[0], leaf) for leaf in fused_names)
            found.append(Group(fused, (own,), sizes, target.facts.size(members[0].inputs), own_is_fused=False))
    return found


def sibling(path: str, leaf: str) -> str:
    """Replace the last component: self_attn.q_proj, qkv_proj -> self_attn.qkv_proj."""
    front, dot, _ = path.rpartition(".")
    return f"{front}{dot}{leaf}"


WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # may be anywhere in a name
FRONTS = (*WRAPPERS, "module", "_forward_module", "base_model.model", "rwtransformer")
VALUE_HEAD = "v_head."
_GROUPED = ("query_key_value", "wqkv")  # rows interleaved by head group, as in Megatron and InternLM2
_BUFFERS = re.compile(r"(.+\.)?(rotary_emb\.inv_freq|attn\.masked_bias|attn\.rotary_emb\.inv_freq)")
_MASK = re.compile(r"(.+\.)?attn\.bias")  # a causal mask if its shape or dtype fits, otherwise perhaps a learned bias
_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|weight_m_wdecomp|modules_to_save|original_module)\b")


@dataclass(frozen=True)
class Recognized:
    """Result of `recognize`.

    layouts: names in `models.convert.layouts`, in the order found; () for the family's own layout.
    rules: conversion rules, in the order of application.
    tensors: the weights after these rules.
    value_head: weights of a reward model's head, under `v_head.summary`.
    faults: remaining differences from the model.
    """

    layouts: tuple[str, ...]
    rules: tuple[Rule, ...]
    tensors: Mapping[str, LazyTensor]
    value_head: Mapping[str, LazyTensor]
    faults: tuple[Fault, ...]


class Conversion:
    """State of a conversion: the tensors, the rules applied so far, and the layouts recognized."""

    def __init__(self, tensors: Tensors, layouts: Iterable[str] = (), rules: Iterable[Rule] = ()):
        self.tensors: dict[str, LazyTensor] = dict(tensors)
        self.layouts = list(layouts)
        self.rules = list(rules)

    def change(self, layout: str, rule: Rule) -> None:
        """Apply a rule. layout: the layout that it converts from."""
        self.tensors = apply(rule, self.tensors)
        self.rules.append(rule)
        if layout not in self.layouts:
            self.layouts.append(layout)


def recognize(tensors: Tensors, target: Target, where: str) -> Recognized:
    """Find how to convert `tensors` to transformers' layout of the model. A tied head may be stored or not.

    where: the place that errors name.

    Raises InputError if the layout is ambiguous.
    """
    conversion = Conversion(tensors)
    _unwrap(conversion, target)
    value_head = _value_head(conversion)
    _backbone(conversion, target)
    _buffers(conversion, target)
    _refuse_adapters(conversion, where)
    _orientation_and_groups(conversion, target, where)
    kept = {name: tensor for name, tensor in conversion.tensors.items() if not name.startswith(VALUE_HEAD)}
    faults = tuple(misfits(kept, target, where))
    return Recognized(tuple(conversion.layouts), tuple(conversion.rules), kept, value_head, faults)


def misfits(tensors: Tensors, target: Target, where: str) -> list[Fault]:
    """Return a fault each for missing weights, surplus weights and wrong shapes, with count and first names."""
    free = {target.head} if target.facts.tied else set()
    missing, surplus = target.expected.keys() - tensors.keys() - free, tensors.keys() - target.expected.keys()
    shapes = [n for n in tensors.keys() & target.expected.keys() if tensors[n].shape != target.expected[n]]
    faults = []
    if missing:
        what = f"{len(missing)} weights required by the config are missing: {some(missing)}"
        faults.append(Fault(where, what, code="SF-MODEL-KEYS"))
    if surplus:
        what = f"{len(surplus)} weights that are not part of the model: {some(surplus)}"
        faults.append(Fault(where, what, code="SF-MODEL-KEYS"))
    if shapes:
        first = min(shapes)
        what = f"{len(shapes)} weights do not fit config.json, first {first}: {list(tensors[first].shape)} in the file"
        faults.append(Fault(where, f"{what}, {list(target.expected[first])} by the config", code="SF-MODEL-KEYS"))
    return faults


def _unwrap(conversion: Conversion, target: Target) -> None:
    """Remove prefixes common to all names, from the outside in; then wrappers within names, and `.base_layer`."""
    while (front := _front(conversion.tensors)) is not None:
        layout = "deepspeed-chat" if front == "rwtransformer" else "wrapped"
        conversion.change(layout, Rule("unwrap", {"piece": front, "at": [""], "but": [VALUE_HEAD]}))
    for piece, layout in (*((piece, "wrapped") for piece in WRAPPERS), ("base_layer", "base-layer")):
        at = sorted({place for name in conversion.tensors for place in places(name, piece)})
        if at:
            conversion.change(layout, Rule("unwrap", {"piece": piece, "at": at, "but": []}))
    fronts = {
        name.removesuffix(target.embedding)[:-1] for name in conversion.tensors if name.endswith(f".{target.embedding}")
    }
    if len(fronts) == 1 and target.embedding not in conversion.tensors:
        piece = fronts.pop()
        if all(name.startswith((f"{piece}.", VALUE_HEAD)) for name in conversion.tensors):
            conversion.change("wrapped", Rule("unwrap", {"piece": piece, "at": [""], "but": [VALUE_HEAD]}))


def _front(tensors: Tensors) -> str | None:
    """Return the known wrapper that prefixes every name, except those of a value head, which is not wrapped."""
    names = [name for name in tensors if not name.startswith(VALUE_HEAD)]
    return next((one for one in FRONTS if names and all(name.startswith(f"{one}.") for name in names)), None)


def places(name: str, piece: str) -> list[str]:
    """Return the modules in `name` that `piece` directly follows. The returned names do not contain `piece`."""
    places, kept = [], []
    for component in name.split("."):
        if component == piece:
            places.append(".".join(kept))
        else:
            kept.append(component)
    return places


def _value_head(conversion: Conversion) -> dict[str, LazyTensor]:
    if "v_head.weight" in conversion.tensors:
        conversion.change("deepspeed-chat", Rule("add value bias", {}))
    head = {name: tensor for name, tensor in conversion.tensors.items() if name.startswith(VALUE_HEAD)}
    if head and "deepspeed-chat" not in conversion.layouts:
        conversion.layouts.append("value-head")
    return head


def _backbone(conversion: Conversion, target: Target) -> None:
    """Add the prefix (`model.`) that a model saved without its causal-LM class lacks. The head never has it."""
    if target.embedding in conversion.tensors:
        return
    parts = target.facts.embedding.split(".")
    for number in range(1, len(parts)):
        piece, rest = ".".join(parts[:number]), ".".join(parts[number:])
        if f"{rest}.weight" in conversion.tensors:
            settings = {"piece": piece, "at": [""], "but": [VALUE_HEAD, target.facts.head + "."]}
            conversion.change("backbone", Rule("wrap", settings))
            return


def _buffers(conversion: Conversion, target: Target) -> None:
    surplus = sorted(conversion.tensors.keys() - target.expected.keys())
    names = [name for name in surplus if _BUFFERS.fullmatch(name) or is_mask(name, conversion.tensors[name])]
    if names:
        conversion.change("buffers", Rule("drop buffers", {"names": names}))


def is_mask(name: str, tensor: LazyTensor) -> bool:
    """Whether an `attn.bias` is GPT-2's causal mask: shape [1, 1, n, n], or boolean."""
    shape = tensor.shape
    square = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return bool(_MASK.fullmatch(name)) and (square or tensor.dtype in ("U8", "BOOL"))


def _refuse_adapters(conversion: Conversion, where: str) -> None:
    if names := [name for name in conversion.tensors if _ADAPTER.search(name)]:
        what = f"contains an adapter in addition to the model, {len(names)} weights: {some(names)}"
        raise layout_error(where, what, "convert them separately, with --to peft and --to hf")


def _orientation_and_groups(conversion: Conversion, target: Target, where: str) -> None:
    plan = [(group, *_stored_as(conversion.tensors, target, group, where)) for group in groups(target)]
    turned = _turned(conversion.tensors, target, plan, where)
    dim = int(target.transposed != turned)
    for group, fused, parts in plan:
        settings = {"layers": target.layers, "sizes": list(group.sizes), "dim": dim}
        if fused and not group.own_is_fused:
            own = list(group.parts[0])
            conversion.change("fused", Rule("split", {**settings, "fused": fused, "parts": own}))
        elif parts and group.own_is_fused:
            conversion.change("split", Rule("fuse", {**settings, "fused": group.fused[0], "parts": list(parts)}))
    if turned:
        modules = [linear.path for linear in target.linears]
        conversion.change("transposed", Rule("transpose", {"layers": target.layers, "modules": modules}))


def _stored_as(tensors: Tensors, target: Target, group: Group, where: str) -> tuple[str, tuple[str, ...]]:
    """Return (fused path or "", paths of the parts or ()) of the group in the file.

    Raises InputError if the file has its matrices under several names, or in an unknown order of rows.
    """
    first = f"{target.layers}.0."
    fused = [path for path in group.fused if f"{first}{path}.weight" in tensors]
    parts = [paths for paths in group.parts if any(f"{first}{path}.weight" in tensors for path in paths)]
    if len(fused) + len(parts) > 1:
        names = [f"{first}{path}.weight" for path in (*fused, *(path for paths in parts for path in paths))]
        raise layout_error(where, f"contains the same matrices more than once: {some(names)}")
    if not fused and not parts:
        unclear = [n for n in tensors if n.startswith(first) and n.split(".")[-2] in _GROUPED]
        if unclear:
            what = f"{unclear[0]} has rows interleaved by head groups, in an order that the file does not record"
            raise layout_error(where, what, "convert it to transformers' layout with the tool that wrote it")
    return (fused[0] if fused else ""), (parts[0] if parts else ())


def _turned(tensors: Tensors, target: Target, plan: list[tuple[Group, str, tuple[str, ...]]], where: str) -> bool:
    """Whether linear weights are transposed relative to the family's layout; square ones cannot show it.

    Raises InputError if some are and others are not.
    """
    shapes: dict[str, tuple[int, int]] = {}  # path -> (outputs, inputs)
    for linear in target.linears:
        outputs = sum(target.facts.size(part) for part in linear.outputs)
        shapes[linear.path] = outputs, target.facts.size(linear.inputs)
    for group, fused, parts in plan:
        if fused:
            shapes[fused] = (sum(group.sizes), group.inputs)
        shapes.update({path: (size, group.inputs) for path, size in zip(parts, group.sizes, strict=False)})
    votes: dict[bool, list[str]] = {True: [], False: []}
    pattern = in_layers(target.layers, shapes) if shapes else None
    for name, tensor in tensors.items():
        found = pattern.fullmatch(name) if pattern else None
        if found is None or found["kind"] != "weight":
            continue
        outputs_first, inputs_first = shapes[found["path"]], shapes[found["path"]][::-1]
        if outputs_first != inputs_first and tensor.shape in (outputs_first, inputs_first):
            votes[(tensor.shape == inputs_first) != target.transposed].append(name)
    if votes[True] and votes[False]:
        what = f"some linear weights are transposed and others not: {some(votes[True])}, but not {some(votes[False])}"
        raise layout_error(where, what)
    return bool(votes[True])
