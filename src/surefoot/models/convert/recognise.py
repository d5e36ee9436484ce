"""From the names and shapes of a state dict to its layouts, and to the rules that lead to the family's own layout.

No tensor is read. Each step looks at one thing and adds a rule; in the end every name and shape must be one that the
model has (`Target`), else the error counts what is missing and what is left over and shows the first of each.
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

QKV_NAMES = ("qkv_proj", "qkv", "Wqkv", "c_attn", "in_proj")  # q, k, v one after the other
GATE_UP_NAMES = ("gate_up_proj", "gate_up")
QKV_PARTS = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"))
GATE_UP_PARTS = (("gate_proj", "up_proj"),)


@dataclass(frozen=True)
class Target:
    """expected: name -> shape of every weight of the model, as transformers builds it; a tied head too."""

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
        """Name of the list of decoder layers; empty where no row has the structure."""
        return self.facts.structure.layers if self.facts.structure else ""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.facts.structure.linears if self.facts.structure else ()

    @property
    def transposed(self) -> bool:
        """Whether the family's own linear layers hold [inputs, outputs]."""
        return any(linear.transposed for linear in self.linears)


@dataclass(frozen=True)
class Group:
    """Matrices that are one in some layouts and several in others, in the order of their rows.

    fused, parts: paths within a decoder layer, the family's own first, then what others call them.
    """

    fused: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    inputs: int
    own_is_fused: bool


def groups(target: Target) -> list[Group]:
    """q, k, v and gate, up of this family. Empty where no row has the structure."""
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
    """self_attn.q_proj, qkv_proj -> self_attn.qkv_proj"""
    front, dot, _ = path.rpartition(".")
    return f"{front}{dot}{leaf}"


WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # anywhere in a name; no module's name
FRONTS = (*WRAPPERS, "module", "_forward_module", "base_model.model", "rwtransformer")
VALUE_HEAD = "v_head."
_GROUPED = ("query_key_value", "wqkv")  # rows by head group, Megatron's and InternLM2's order
_BUFFERS = re.compile(r"(.+\.)?(rotary_emb\.inv_freq|attn\.masked_bias|attn\.rotary_emb\.inv_freq)")
_MASK = re.compile(r"(.+\.)?attn\.bias")  # a causal mask, by its shape or type; else it could have been learned
_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|weight_m_wdecomp|modules_to_save|original_module)\b")


@dataclass(frozen=True)
class Recognised:
    """What a state dict was recognised as.

    layouts: names from `models.convert.layouts`, in the order found; () for the family's own.
    rules: in order to apply.
    tensors: after them.
    value_head: those of a reward model's head, under `v_head.summary`.
    faults: what still differs from the model, counted.
    """

    layouts: tuple[str, ...]
    rules: tuple[Rule, ...]
    tensors: Mapping[str, LazyTensor]
    value_head: Mapping[str, LazyTensor]
    faults: tuple[Fault, ...]


class Conversion:
    """Tensors on their way to another layout, with the rules that were applied and the layouts that they lead from."""

    def __init__(self, tensors: Tensors, layouts: Iterable[str] = (), rules: Iterable[Rule] = ()):
        self.tensors: dict[str, LazyTensor] = dict(tensors)
        self.layouts = list(layouts)
        self.rules = list(rules)

    def change(self, layout: str, rule: Rule) -> None:
        """Apply the rule, which leads away from `layout`."""
        self.tensors = apply(rule, self.tensors)
        self.rules.append(rule)
        if layout not in self.layouts:
            self.layouts.append(layout)


def recognise(tensors: Tensors, target: Target, where: str) -> Recognised:
    """The way from `tensors` to the layout that transformers gives the model.

    where: for messages.

    A head that the config ties may be there or not. Raises InputError for what is ambiguous.
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
    return Recognised(tuple(conversion.layouts), tuple(conversion.rules), kept, value_head, faults)


def misfits(tensors: Tensors, target: Target, where: str) -> list[Fault]:
    """Missing, surplus and ill-shaped weights: one fault for each kind, with the count and the first names."""
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
    """Prefixes that every name bears, from the outside in; wrappers' pieces elsewhere; `.base_layer`."""
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
    """The first known wrapper in front of every name; a value head stands beside the model and has none."""
    names = [name for name in tensors if not name.startswith(VALUE_HEAD)]
    return next((one for one in FRONTS if names and all(name.startswith(f"{one}.") for name in names)), None)


def places(name: str, piece: str) -> list[str]:
    """Modules of `name`, without the piece, behind which it stands."""
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
    """A base model saved without its causal class bears no `model.`; the head, if there, never does."""
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
    """Whether an `attn.bias` is GPT-2's table of which positions see which: [1, 1, n, n], or of true and false."""
    shape = tensor.shape
    square = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return bool(_MASK.fullmatch(name)) and (square or tensor.dtype in ("U8", "BOOL"))


def _refuse_adapters(conversion: Conversion, where: str) -> None:
    if names := [name for name in conversion.tensors if _ADAPTER.search(name)]:
        what = f"holds an adapter as well as the model, {len(names)} weights: {some(names)}"
        raise layout_error(where, what, "convert its two halves apart: --to peft and --to hf")


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
    """What the file has of a group: the fused path, or the parts'. Raises InputError where it has several names."""
    first = f"{target.layers}.0."
    fused = [path for path in group.fused if f"{first}{path}.weight" in tensors]
    parts = [paths for paths in group.parts if any(f"{first}{path}.weight" in tensors for path in paths)]
    if len(fused) + len(parts) > 1:
        names = [f"{first}{path}.weight" for path in (*fused, *(path for paths in parts for path in paths))]
        raise layout_error(where, f"holds the same matrices more than once: {some(names)}")
    if not fused and not parts:
        unclear = [n for n in tensors if n.startswith(first) and n.split(".")[-2] in _GROUPED]
        if unclear:
            what = f"{unclear[0]} holds its rows by groups of heads, in an order that the file does not record"
            raise layout_error(where, what, "convert it to transformers' layout with the tool that wrote it")
    return (fused[0] if fused else ""), (parts[0] if parts else ())


def _turned(tensors: Tensors, target: Target, plan: list[tuple[Group, str, tuple[str, ...]]], where: str) -> bool:
    """Whether the linear layers hold their weights the other way round than the family. Square ones do not show it."""
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
        what = f"some linear weights are turned and others not: {some(votes[True])}, but not {some(votes[False])}"
        raise layout_error(where, what)
    return bool(votes[True])
