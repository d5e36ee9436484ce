"""Language models that stand in a wrapper: checkpoints that also see or hear, here trained on text.

transformers' class of such a checkpoint (`*ForConditionalGeneration`) holds a vision tower, what joins it to the text,
and the language model, under a prefix such as `model.language_model`. Text reaches the language model alone. All else
stays frozen and is saved as it was read, so that the whole checkpoint goes on working.

Some checkpoints hold weights that transformers has no modules for and leaves out on loading: the heads that predict
several tokens at once (`mtp.*`), which servers use for speculative decoding. `left_out` finds them; they are written
back bit for bit (`surefoot.models.save`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from surefoot.families.pictures import part_of
from surefoot.models.decoder import decoder_of
from surefoot.models.forward import causal_model

LEFT_OUT = "_left_out"  # attribute of a loaded model: those of its base, unread
_TABLES = re.compile(r"(.+\.)?inv_freq")  # of old checkpoints: computed, not learned


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Whether transformers has a class that sees or hears for it, around a language model that only decodes."""
    inside = config.get_text_config()
    return type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and inside is not config and not config.is_encoder_decoder


def auto_class(config: PreTrainedConfig) -> Any:
    """What opens the whole checkpoint: one of transformers' AutoModel classes."""
    if not is_wrapper(config):
        return AutoModelForCausalLM
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForMultimodalLM


def says_tied(config: PreTrainedConfig) -> bool:
    """Whether it ties the output head to the embedding: the outermost config decides, as in transformers."""
    own = getattr(config, "tie_word_embeddings", None)
    return bool(config.get_text_config().tie_word_embeddings if own is None else own)


def wrapper_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the transformers model that are not the language model's, by name; empty without a wrapper."""
    base = causal_model(model)
    if not is_wrapper(base.config):
        return {}
    inside = {
        id(parameter)
        for part in (decoder_of(base), base.get_input_embeddings(), base.get_output_embeddings())
        if part is not None
        for parameter in part.parameters()
    }
    return {name: parameter for name, parameter in base.named_parameters() if id(parameter) not in inside}


def freeze_wrapper(model: PreTrainedModel) -> None:
    """So that nothing but the language model trains."""
    for parameter in wrapper_parameters(model).values():
        parameter.requires_grad_(False)


def train_sight(model: PreTrainedModel, parts: Collection[str]) -> None:
    """So that these parts train as well. parts: of `surefoot.families.pictures.PARTS`."""
    for name, parameter in wrapper_parameters(model).items():
        if part_of(name) in parts:
            parameter.requires_grad_(True)


def left_out(model: PreTrainedModel, stored: Iterable[str]) -> list[str]:
    """Of the weights in the files those that transformers leaves out on loading, as it has no module for them."""
    patterns = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    modules = dict(model.named_modules())
    return sorted(
        name
        for name in stored
        if any(one.search(name) for one in patterns)
        and name.rpartition(".")[0] not in modules
        and not _TABLES.fullmatch(name)
    )
