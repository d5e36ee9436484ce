"""Multimodal checkpoints: language models inside a wrapper with vision or audio parts.

transformers' class of such a checkpoint (`*ForConditionalGeneration`) contains a vision tower, a projector, and the
language model under a prefix such as `model.language_model`. Text uses only the language model. All other parts are
frozen and saved unchanged, so that the whole checkpoint keeps working.

Some checkpoints contain weights for which transformers has no modules and which it does not load: multi-token
prediction heads (`mtp.*`), which servers use for speculative decoding. `left_out` finds them; they are saved again
bit-exactly (`surefoot.models.save`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
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

from surefoot.families.vision_parts import TOWERS, part_of
from surefoot.models.decoder import decoder_of
from surefoot.models.forward import causal_model
from surefoot.planning.trained import trains

LEFT_OUT = "_left_out"  # attribute of a loaded model: lazily read tensors of its base that were not loaded
_TABLES = re.compile(r"(.+\.)?inv_freq")  # buffers in old checkpoints


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Whether transformers has a multimodal class for the config, around a decoder-only language model."""
    inside = config.get_text_config()
    return type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and inside is not config and not config.is_encoder_decoder


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the AutoModel class of transformers that loads the whole checkpoint."""
    if not is_wrapper(config):
        return AutoModelForCausalLM
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForMultimodalLM


def says_tied(config: PreTrainedConfig) -> bool:
    """Whether the config ties head and embedding; the outermost config decides, as in transformers."""
    own = getattr(config, "tie_word_embeddings", None)
    return bool(config.get_text_config().tie_word_embeddings if own is None else own)


def wrapper_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter outside of the language model; empty without a wrapper."""
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


def attending_to_pictures(model: nn.Module) -> list[nn.Module]:
    """Return the vision towers of a model and what attends to their output (Llama 3.2 Vision); none without a
    wrapper."""
    names = (*TOWERS, "cross_attn")
    return [module for name, module in causal_model(model).named_modules() if name.rpartition(".")[2] in names]


def freeze_wrapper(model: PreTrainedModel) -> None:
    """Freeze all parameters outside of the language model."""
    for parameter in wrapper_parameters(model).values():
        parameter.requires_grad_(False)


def train_vision(model: PreTrainedModel, parts: Collection[str]) -> None:
    """Make vision parts trainable. parts: names from `surefoot.families.vision_parts.PARTS`."""
    for name, parameter in wrapper_parameters(model).items():
        if part_of(name) in parts:
            parameter.requires_grad_(True)


def freeze_others(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze the modules whose names no pattern matches; none are given for a model that trains whole."""
    seen: set[int] = set()
    for name, module in model.named_modules() if patterns else ():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen and not trains(name, patterns):  # a tied head comes after its embedding
                parameter.requires_grad_(False)
            seen.add(id(parameter))


def left_out(model: PreTrainedModel, stored: Iterable[str]) -> list[str]:
    """Return the stored weights that transformers does not load because it has no modules for them."""
    patterns = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    modules = dict(model.named_modules())
    return sorted(
        name
        for name in stored
        if any(one.search(name) for one in patterns)
        and name.rpartition(".")[0] not in modules
        and not _TABLES.fullmatch(name)
    )
