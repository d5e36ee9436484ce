"""Choose which parts of a vision model are trained besides the language model, and count them.

They are trained in full, in fp32, also with an adapter: each is then a copy of the frozen module, like PEFT's
`modules_to_save`, and is saved in the adapter's file. Or the adapter's targets reach their linear layers.

Also what a vision tower that trains keeps for its backward pass, from the shapes of its parameters. Per patch of a
picture, in bytes, with b bytes of the compute dtype; norms and what goes from layer to layer are fp32:

    norms           their input 4n each; an RMSNorm keeps the normalized input as well
    linear inputs   those of attention's and the MLP's first layers: under autocast a cast copy for each layer, else
                    the norm's output once for all that share it
    outputs         b * outputs of queries, keys and values and of the MLP's first layers, which attention and the
                    activation keep; a fused `qkv` stays whole behind the rotated queries and keys
    second layers   b * inputs: attention's output, and the activation's (with a gate times `up`, and both)
    layer scales    their input 4n each (InternVL)
    patches         the pixels, 4 bytes each, and their cast copy

Attention computes no scores at once (SDPA). A projector keeps, for each feature of a picture, inputs and outputs of its
linear layers. Of a frozen tower nothing is kept.

A language model that reads pictures by cross-attention (Llama 3.2 Vision) keeps of each patch, also of a frozen tower:

    states          b * hidden, once
    each layer      keys and values repeated for all heads, 2b * q; of the norm of keys its input and result, as
                    in full fine-tuning, (4 + b) * k
    mask            b for each token of the text, once
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts, ModuleFact
from surefoot.families.vision_parts import PARTS, Part, modules_of, part_of
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.notes import Notes
from surefoot.planning.optimizer import Tensor
from surefoot.planning.plan import AdapterPlan, ParallelPlan
from surefoot.system.messages import counted


@dataclass(frozen=True)
class TrainedVision:
    """Vision parts that learn.

    parts: trained in full. tensors: their parameters.
    adapted: parts whose linear layers may get an adapter.
    """

    parts: tuple[Part, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    adapted: tuple[Part, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(one.numbers for one in self.tensors)


def plan_vision(config: RunConfig, model: ModelFacts, notes: Notes) -> TrainedVision:
    """Return the parts that `vision` requests; refuse parts that the model lacks, and stages without images."""
    parts: tuple[Part, ...] = tuple(part for part in PARTS if getattr(config.vision, part) == "trained")
    adapted: tuple[Part, ...] = tuple(part for part in PARTS if getattr(config.vision, part) == "adapter")
    for part in (*parts, *adapted):
        if part in adapted and config.adapter is None:
            notes.refuse(f"vision.{part}", "adapter needs one on the language model", "add adapter, or use trained")
        elif not any(part_of(name) == part for name, _ in model.vision):
            notes.refuse(f"vision.{part}", "the model has no such part that surefoot knows", "leave it out")
        elif part == "tower" and part in parts and not any(_embeds(name) for name, _ in model.vision):
            what = "the tower has no patches, and what it would keep for the backward pass is not known"
            notes.refuse("vision.tower", what, "leave it frozen")
        elif not config.method.pictures:
            notes.refuse(f"vision.{part}", f"stage {config.stage} trains on text only", "leave it out")
    tensors = tuple(Tensor(shape, False, name) for name, shape in model.vision if part_of(name) in parts)
    return TrainedVision(parts, tensors, adapted)


def adaptable(model: ModelFacts, vision: TrainedVision) -> list[ModuleFact]:
    """Return the linear layers of the parts that may get an adapter."""
    return [module for module in model.vision_linears if part_of(f"{module.name}.weight") in vision.adapted]


def parts_reached(adapter: AdapterPlan | None) -> tuple[Part, ...]:
    """Return the parts in which the adapter has targets."""
    reached = {part_of(f"{name}.weight") for name in adapter.targets.value} if adapter else ()
    return tuple(part for part in PARTS if part in reached)


def check_adapted(adapter: AdapterPlan, vision: TrainedVision, notes: Notes) -> None:
    """Refuse a part without a target."""
    for part in vision.adapted:
        if part not in parts_reached(adapter):
            what = "adapter.targets name no linear layer of this part"
            notes.refuse(f"vision.{part}", what, "name one, or leave it out", "SF-ADAPTER-TARGETS")


def check_pictures(learns: Iterable[str], model: ModelFacts, lengths: LengthFacts | None, notes: Notes) -> None:
    """Refuse examples without pictures where only what reads pictures learns: they would have no gradient.

    learns: names of the trained parameters.
    """
    inside = tuple(f"{layer}." for layer in model.cross_layers)
    if lengths and lengths.texts and all(part_of(name) or name.startswith(inside) for name in learns):
        what = f"{counted(lengths.texts, 'example')} without a picture, which nothing that trains reads"
        notes.refuse("data.train", what, "leave them out, or train more of the language model", "SF-DATA-PICTURE")


def check_engine(config: RunConfig, lengths: LengthFacts | None, notes: Notes) -> None:
    """Refuse a server that draws answers to prompts with pictures: it gets token ids alone."""
    draws = config.method.rollouts or config.draws
    if draws and config.rollout.engine != "embedded" and lengths and lengths.pictures:
        what = "gets token ids alone, and prompts have pictures"
        notes.refuse(f"{config.method.section}.engine", what, "leave it out: this process draws", "SF-DATA-PICTURE")


# Their projector is called once for each tile, in transformers.
_BY_TILE = ("lfm2_vl",)


def check_calls(parallel: ParallelPlan, model: ModelFacts, lengths: LengthFacts | None, notes: Notes) -> None:
    """Refuse ZeRO 3 where ranks would gather weights of a vision part different numbers of times."""
    if parallel.zero_stage == 3 and lengths and lengths.pictures and model.model_type in _BY_TILE:
        what = f"{model.model_type} projects each tile on its own, and ranks have different numbers of tiles"
        notes.refuse("parallel.zero_stage", what, "use 2, or parallel.engine: fsdp2")


def with_trained_vision(adapter: AdapterPlan | None, vision: TrainedVision, model: ModelFacts) -> AdapterPlan | None:
    """Add the trained vision parts to the adapter."""
    if adapter is None or not vision.parts:
        return adapter
    names = [name for name, _ in model.vision]
    modules = [module for part in vision.parts for module in modules_of(part, names)]
    trainable = adapter.trainable + vision.parameters
    return replace(adapter, modules_to_save=(*adapter.modules_to_save, *modules), trainable=trainable)


# Linear layers whose output is added to what goes from layer to layer, by the last part of their name.
_MLP_ENDS = ("fc2", "linear_fc2", "down_proj")
_SECOND = ("out_proj", "o_proj", "proj", "projection_layer", *_MLP_ENDS)


@dataclass(frozen=True)
class Kept:
    """Bytes, with the tower's layers computed once, and where they are computed again for the backward pass."""

    once: int
    recomputed: int


NOTHING = Kept(0, 0)


def picture_bytes(model: ModelFacts, parts: Sequence[Part], features: int, tokens: int, width: int) -> Kept:
    """For the pictures of one row.

    parts: that train.
    features: tokens of pictures in the row.
    tokens: all tokens of the row.
    width: bytes of a number of the compute dtype.
    """
    seen, read = _of_tower(model, parts, features, width), _of_cross_attention(model, features, tokens, width)
    return Kept(seen.once + read.once, seen.recomputed + read.recomputed)


def _of_cross_attention(model: ModelFacts, features: int, tokens: int, width: int) -> Kept:
    if not model.cross_layers:
        return NOTHING
    patches = int(features * model.patches)
    layer = patches * (2 * width * model.size("query") + (4 + width) * model.size("key_value"))
    shared = patches * width * (model.hidden + tokens)
    return Kept(shared + len(model.cross_layers) * layer, shared + layer)


def _of_tower(model: ModelFacts, parts: Sequence[Part], features: int, width: int) -> Kept:
    patches = features * model.patches
    shapes = dict(model.vision)
    of_pixels = [shape for name, shape in model.vision if _embeds(name)]
    pixels = max((math.prod(shape[1:]) for shape in of_pixels), default=0)
    projected = patches if model.cross_layers else features
    kept = projected * _projector(shapes, width) if parts else 0
    if "tower" not in parts or not of_pixels:
        return Kept(int(kept), int(kept))
    kept += patches * pixels * (4 + (width if width < 4 else 0))
    kept += features * model.patches**2 * width if model.cross_layers else 0  # the mask of blank tiles
    layers, per_patch = _layers(shapes), _tower(shapes, width)
    again = layers * 4 * of_pixels[0][0] + per_patch / max(layers, 1)  # inputs, and one layer while it is there
    return Kept(int(kept + patches * per_patch), int(kept + patches * again))


def _embeds(name: str) -> bool:
    return "patch" in name and name.endswith("weight") and part_of(name) == "tower"


def _projector(shapes: dict[str, tuple[int, ...]], width: int) -> int:
    """Per feature."""
    return sum(width * sum(shape) for name, shape in shapes.items() if part_of(name) == "projector" and len(shape) == 2)


def _layers(shapes: dict[str, tuple[int, ...]]) -> int:
    """Of the tower: those that hold a second layer of an MLP."""
    return sum(
        part_of(name) == "tower" and any(f".{one}." in name and name.endswith("weight") for one in _MLP_ENDS)
        for name in shapes
    )


def _tower(shapes: dict[str, tuple[int, ...]], width: int) -> int:
    """Per patch, of all layers: these stand in a list, so that a name holds a number."""
    kept = 0
    for name, shape in shapes.items():
        *path, last = name.split(".")
        if part_of(name) != "tower" or not any(part.isdigit() for part in path):
            continue
        if last in ("lambda_1", "lambda_2"):
            kept += 4 * shape[0]
        if last != "weight":
            continue
        own = path[-2] if path[-1] == "linear" else path[-1]
        if len(shape) == 1:
            layer_norm = ".".join((*path, "bias")) in shapes
            kept += 4 * shape[0] * (1 if layer_norm else 2)
            kept += 0 if width < 4 else 4 * shape[0]  # its output, which linear layers share
        elif own in _SECOND:
            kept += width * shape[1]
        else:
            kept += width * shape[0] + (width * shape[1] if width < 4 else 0)
            kept += width * shape[0] if own.startswith("gate") else 0
            kept += width * shape[0] * 2 // 3 if own == "qkv" else 0
    return kept
