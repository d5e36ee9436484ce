"""What the tensors of a model should be called, and the family's facts that lead there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.families.family import Linear
from surefoot.families.model_facts import ModelFacts

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
        """Name of the list of decoder layers; empty for a family that no row describes."""
        return self.facts.family.layers if self.facts.family else ""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.facts.family.linears if self.facts.family else ()

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
    """q, k, v and gate, up of this family. Empty for a family that no row describes."""
    found = []
    for roles, fused_names, part_names in (
        (("q", "k", "v"), QKV_NAMES, QKV_PARTS),
        (("gate", "up"), GATE_UP_NAMES, GATE_UP_PARTS),
    ):
        whole = next((linear for linear in target.linears if linear.roles == list(roles)), None)
        single = {linear.role: linear for linear in target.linears}
        if whole is not None:
            sizes = tuple(target.facts.size(part) for part in whole.outputs)
            parts = tuple(tuple(beside(whole.path, leaf) for leaf in leaves) for leaves in part_names)
            found.append(Group((whole.path,), parts, sizes, target.facts.size(whole.inputs), own_is_fused=True))
        elif all(role in single for role in roles):
            members = [single[role] for role in roles]
            sizes = tuple(target.facts.size(member.outputs[0]) for member in members)
            own = tuple(member.path for member in members)
            fused = tuple(beside(own[0], leaf) for leaf in fused_names)
            found.append(Group(fused, (own,), sizes, target.facts.size(members[0].inputs), own_is_fused=False))
    return found


def beside(path: str, leaf: str) -> str:
    """self_attn.q_proj, qkv_proj -> self_attn.qkv_proj"""
    front, dot, _ = path.rpartition(".")
    return f"{front}{dot}{leaf}"
