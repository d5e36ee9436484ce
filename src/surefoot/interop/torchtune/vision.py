"""Llama 3.2 Vision: which modules torchtune's decoder, encoder and fusion are, by transformers' names.

decoder   the layers of Llama 3.1
fusion    the layers between them that read pictures; the last part of the tower and the projector, which torchtune
          calls projection head; the embedding of <|image|>
encoder   the tower. In full fine-tuning the projection head is part of it as well
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surefoot.config.sections import PATTERN
from surefoot.interop.draft import Draft
from surefoot.interop.torchtune.rows import TRAINABLE, family, last_name

FAMILY = "llama3_2_vision"
CAULDRON = "the_cauldron_dataset"
_LAYERS = r"model\.language_model\.layers\."
_FUSION, _DECODER = r"\d*[38]", r"\d*[0124-79]"  # of 11B and 90B every fifth layer reads pictures, from number 3 on
_TOWER = r"model\.vision_model\."
_TEXT_MLP, _TOWER_MLP = r"mlp\.(gate|up|down)_proj", r"mlp\.fc[12]"
_BY_NAME = "named as modules of the model, those that read pictures by their layer"
_IMAGE_ROW = "the embedding of <|image|>, which torchtune counts to the fusion, stays frozen"


def sees(draft: Draft) -> bool:
    """Whether the model is Llama 3.2 Vision and learns from pictures."""
    return family(draft["model._component_"]) == FAMILY and last_name(draft["dataset._component_"]) == CAULDRON


def trainable(draft: Draft) -> dict[str, bool]:
    """Return which of decoder, encoder and fusion train."""
    usual = {"decoder": False, "encoder": True, "fusion": True}
    given = {part: draft[name] for part, name in zip(usual, TRAINABLE, strict=True)}
    return {part: usual[part] if value is None else value in (True, "lora") for part, value in given.items()}


def set_adapted(draft: Draft, attention: Sequence[str], *, mlp: bool, output: bool) -> None:
    """Set adapter.targets and vision.*.

    attention: names of the adapted matrices of attention.
    mlp, output: apply_lora_to_mlp and apply_lora_to_output.
    """
    learns = trainable(draft)
    targets = list(_targets(learns, attention, mlp=mlp, output=output))
    if not any(learns.values()):
        draft.refuse(TRAINABLE[0], "no part has an adapter", "give one of the parts lora")
        return
    draft.set("adapter.targets", targets, *TRAINABLE, why=_BY_NAME)
    if learns["encoder"] or learns["fusion"]:
        draft.set("vision.tower", "adapter", *TRAINABLE[1:])
    if output and learns["fusion"]:
        draft.set("vision.projector", "adapter", TRAINABLE[2])


def _targets(learns: dict[str, bool], attention: Sequence[str], *, mlp: bool, output: bool) -> Iterator[str]:
    def inside(front: str, kind: str, own_mlp: str) -> str:
        names = [rf"{kind}\.({'|'.join(attention)})"] if attention else []
        return f"{PATTERN}{front}({'|'.join([*names, *([own_mlp] if mlp else [])])})"

    if learns["decoder"]:
        yield inside(rf"{_LAYERS}{_DECODER}\.", "self_attn", _TEXT_MLP)
    if learns["fusion"]:
        yield inside(rf"{_LAYERS}{_FUSION}\.", "cross_attn", _TEXT_MLP)
    for part, name in (("encoder", "transformer"), ("fusion", "global_transformer")):
        if learns[part]:
            yield inside(rf"{_TOWER}{name}\.layers\.\d+\.", "self_attn", _TOWER_MLP)
    if output:
        yield from (
            name for part, name in (("decoder", "lm_head"), ("fusion", "multi_modal_projector")) if learns[part]
        )


def set_trained(draft: Draft) -> None:
    """Set model.trained and vision.* of full fine-tuning."""
    learns = trainable(draft)
    if not (learns["encoder"] and learns["fusion"]):
        what = "surefoot trains the tower with its last part, the projector and the layers that read pictures, or none"
        draft.refuse(TRAINABLE[1], what, "make encoder and fusion trainable, or train with LoRA")
        return
    for part in ("tower", "projector"):
        draft.set(f"vision.{part}", "trained", *TRAINABLE[1:])
    if learns["decoder"]:
        draft.note(TRAINABLE[0], "carried", "all weights train", "model.path")
    else:
        draft.set("model.trained", [rf"{_LAYERS}{_FUSION}(\..*)?"], TRAINABLE[0], TRAINABLE[2], why=_IMAGE_ROW)
