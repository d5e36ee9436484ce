"""Choose which parts of a vision model are trained besides the language model, and count them.

They are trained in full, in fp32, also with an adapter: each is then a copy of the frozen module, like PEFT's
`modules_to_save`, and is saved in the adapter's file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.families.pictures import PARTS, Part, modules_of, part_of
from surefoot.planning.notes import Notes
from surefoot.planning.optimizer import Tensor
from surefoot.planning.plan import AdapterPlan


@dataclass(frozen=True)
class Sight:
    """Trained vision parts. parts: their names. tensors: their parameters."""

    parts: tuple[Part, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(one.numbers for one in self.tensors)


def plan_vision(config: RunConfig, model: ModelFacts, notes: Notes) -> Sight:
    """Return the parts that `vision` requests; refuse parts that the model lacks, and stages without images."""
    parts: tuple[Part, ...] = tuple(part for part in PARTS if getattr(config.vision, part) == "trained")
    for part in parts:
        if not any(part_of(name) == part for name, _ in model.sight):
            notes.refuse(f"vision.{part}", "the model has no such part that surefoot knows", "leave it out")
        elif not config.method.pictures:
            notes.refuse(f"vision.{part}", f"stage {config.stage} trains on text only", "leave it out")
    return Sight(parts, tuple(Tensor(shape, inside=False) for name, shape in model.sight if part_of(name) in parts))


def with_sight(adapter: AdapterPlan | None, sight: Sight, model: ModelFacts) -> AdapterPlan | None:
    """Add the trained vision parts to the adapter."""
    if adapter is None or not sight.parts:
        return adapter
    names = [name for name, _ in model.sight]
    modules = [module for part in sight.parts for module in modules_of(part, names)]
    trainable = adapter.trainable + sight.parameters
    return replace(adapter, modules_to_save=(*adapter.modules_to_save, *modules), trainable=trainable)
