"""Facts about any model folder, from config.json if the family's structure is known, else from the module tree.

For the module tree transformers builds the model on the meta device, without memory or weights. This takes seconds,
mostly for the import, so it is done only for families whose structure is not in `surefoot.families`.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.families import find
from surefoot.families.family import OddHeads
from surefoot.families.model_facts import MatrixFact, ModelFacts, ModuleFact, ModuleTree, read_model_facts
from surefoot.families.vision_parts import part_of
from surefoot.models.folder import read_config
from surefoot.system.errors import EnvironmentFault, Fault, InputError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# Config keys for how many patches, in height and in width, become one image token.
_JOINED = ("spatial_merge_size", "scale_factor", "pooling_kernel_size", "downsample_factor")
# Config keys that facts are made of. Config classes with other names map these to their own (`attribute_map`).
_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "layer_types",
    "tie_word_embeddings",
    "hidden_act",
    "rope_parameters",
    "original_max_position_embeddings",
)
_UNBOUNDED = 2**20  # number of positions for a model without a limit
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def facts_of(folder: Path) -> ModelFacts:
    """Return the facts of the model in `folder`. Raises InputError for an invalid, unsafe or unknown config."""
    config = read_config(folder)  # rejects adapters and configs that would run code
    family = find(str(config.get("model_type")))
    return read_model_facts(folder, None if family and family.structure else module_tree(folder))


def model_config(folder: Path) -> PreTrainedConfig:
    """Load config.json as transformers' config class. Raises InputError if the model_type is unknown."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    from surefoot.models.quiet import quiet_libraries

    fields = read_config(folder)
    where = str(folder / "config.json")
    family = fields.pop("model_type", None)
    if family not in CONFIG_MAPPING:
        what = f"unknown model_type {family!r}; code that comes with a model is never run"
        raise InputError(Fault(where, what, "use a model that transformers knows", code="SF-MODEL-KIND"))
    try:
        with quiet_libraries():
            return CONFIG_MAPPING[family].from_dict(fields)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise InputError(Fault(where, one_line(error), code="SF-MODEL-KIND")) from error


def module_tree(folder: Path) -> ModuleTree:
    """Return the module tree that transformers would build for folder/config.json."""
    return _built(folder, (folder / "config.json").read_bytes())


@lru_cache(maxsize=8)  # a run asks some ten times, and building a large mixture takes a tenth of a second
def _built(folder: Path, content: bytes) -> ModuleTree:
    """content: of config.json, so that another one is built anew."""
    import torch

    from surefoot.models.quiet import quiet_libraries
    from surefoot.models.wrapped import auto_class

    config = model_config(folder)
    try:
        with quiet_libraries(), torch.device("meta"):
            model = auto_class(config).from_config(config)
            model.tie_weights()
    except ImportError as error:
        raise EnvironmentFault(_missing_library(error, str(folder / "config.json"))) from error
    except ValueError as error:
        what = f"model_type {config.model_type!r} is not a causal language model of transformers"
        raise InputError(Fault(str(folder / "config.json"), what, "use a text model", code="SF-MODEL-KIND")) from error
    return _tree(model, str(folder / "config.json"))


def _missing_library(error: ImportError, where: str) -> Fault:
    """Return the fault for a missing package that transformers needs for a model, such as timm for Gemma 3n's
    vision."""
    if found := re.search(r"requires the (\S+) library", str(error)):
        what = f"the model needs the package {found[1]}, which is not installed"
        return Fault(where, what, f"pip install {found[1]}", code="SF-MODEL-KIND")
    return Fault(where, one_line(error), code="SF-MODEL-KIND")


def _tree(model: PreTrainedModel, where: str) -> ModuleTree:
    from surefoot.models.wrapped import auto_class, wrapper_parameters

    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        what = f"{type(model).__name__} has no output head"
        raise InputError(Fault(where, what, "use a causal language model", code="SF-MODEL-KIND"))
    others = wrapper_parameters(model)
    names = _names(model, others)
    modules = _facts(names, model)
    widest = max((fact.linear[1] for fact in modules if fact.linear and fact.name != names[head]), default=1)
    dropouts = {key: value for key, value in config.to_dict().items() if _is_dropout(key, value)}
    attends, latent = _attends(config), _latent_width(config)
    without_sdpa = "" if model._supports_sdpa else f"transformers has no SDPA for {type(model).__name__}"
    # Llama 4's config.json has the key of a load-balancing loss, but its model has no such loss.
    balances = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    idle = {} if balances else {"router_aux_loss_coef": None}
    return ModuleTree(
        config=config.to_dict() | dropouts | _values(model, widest, tied=head.weight is embedding.weight) | idle,
        modules=modules,
        embedding=names[embedding],
        head=names[head],
        without_sdpa=without_sdpa if attends else "no layer of the model has attention",
        dropouts=tuple(dropouts),
        active=max((int(getattr(module, "top_k", 0)) for module in names if is_router(module)), default=0),
        attends=attends,
        odd_heads=_odd_heads(config, latent),
        recurrent=not attends or _is_recurrent(model),
        text_type=config.model_type,
        wrapper_parameters=sum(parameter.numel() for parameter in others.values()),
        both_ways=_sees_both_ways(model),
        states=getattr(config, "altup_num_inputs", 1),
        sparse=statistics.mean(map(bool, getattr(config, "activation_sparsity_pattern", None) or [0])),
        vision=tuple((name, tuple(one.shape)) for name, one in others.items() if part_of(name)),
        vision_linears=_vision_linears(model),
        patches=_patches(model.config),
        cross_layers=tuple(name for name, module in model.named_modules() if hasattr(module, "cross_attn")),
        spare_rows=max(0, embedding.get_parameter("weight").shape[0] - head.get_parameter("weight").shape[0]),
        opened_by=auto_class(model.config).__name__,
    )


def _vision_linears(model: PreTrainedModel) -> tuple[ModuleFact, ...]:
    return tuple(
        ModuleFact(name, sum(parameter.numel() for parameter in module.parameters()), linear)
        for name, module in model.named_modules()
        if (linear := _linear(module)) and part_of(f"{name}.weight")
    )


def _patches(config: PreTrainedConfig) -> float:
    """Return the patches for each image token. LLaVA-NeXT's tiles of padding are not counted."""
    tower: Any = getattr(config, "vision_config", None)
    if tokens := getattr(config, "mm_tokens_per_image", None):  # Gemma 3
        return (tower.image_size // tower.patch_size) ** 2 / tokens
    if tiles := getattr(tower, "max_num_tiles", None):  # Mllama: blank tiles, a class token, padding to whole eights
        return tiles * math.ceil(((tower.image_size // tower.patch_size) ** 2 + 1) / 8) * 8
    if ratio := getattr(config, "downsample_ratio", None) or getattr(tower, "pixel_shuffle_ratio", None):
        return 1 / ratio**2  # InternVL, Llama 4
    sides = [getattr(one, name, None) for one in (tower, config) for name in _JOINED]
    return float(next((side for side in sides if side), 1)) ** 2


def _names(model: PreTrainedModel, others: Mapping[str, nn.Parameter]) -> dict[nn.Module, str]:
    """Return module -> name for the language model's modules. others: parameters that belong to a wrapper."""
    outside = {id(parameter) for parameter in others.values()}
    return {
        module: name
        for name, module in model.named_modules()
        if not any(id(parameter) in outside for parameter in module.parameters(recurse=False))
    }


def _values(model: PreTrainedModel, widest: int, *, tied: bool) -> dict[str, Any]:
    """Return config values under Llama's names, with missing ones derived from the modules.

    widest: outputs of the widest linear layer other than the head.
    tied: whether head and embedding share their weight.
    """
    config = model.config.get_text_config()
    values = {key: value for key in _KEYS if (value := _value(config, key)) is not _NONE}
    stored = model.config.dtype or config.dtype or "float32"
    values |= {"model_type": model.config.model_type, "dtype": str(stored).removeprefix("torch.")}
    values["tie_word_embeddings"] = tied
    if values.get("intermediate_size") is None:
        values["intermediate_size"] = widest
    named = next((name for name in _ATTENTION_DROPOUT if hasattr(config, name)), None)
    values["attention_dropout"] = getattr(config, named) if named else 0.0
    values["word_embed_proj_dim"] = model.get_input_embeddings().get_parameter("weight").shape[1]
    if (latent := _latent_width(config)) is not None:
        values["head_dim"] = latent
    if not _attends(config):
        values["num_attention_heads"] = values["num_key_value_heads"] = 1
    if values.get("max_position_embeddings") is None:
        values["max_position_embeddings"] = _UNBOUNDED
    return values


def _latent_width(config: PreTrainedConfig) -> int | None:
    """Return the query/key head size of latent attention, whose value head size may differ (`v_head_dim`)."""
    width = getattr(config, "qk_head_dim", None)
    return width if isinstance(width, int) else None


def _odd_heads(config: PreTrainedConfig, latent: int | None) -> OddHeads:
    if latent is not None and latent != getattr(config, "v_head_dim", latent):
        return "values"
    # Falcon 7B; the larger ones expand their keys, and so do transformers' other models with one head of keys.
    shared = getattr(config, "multi_query", False) and getattr(config, "new_decoder_architecture", None) is False
    return "keys" if shared else ""


def _is_recurrent(model: PreTrainedModel) -> bool:
    """Whether the model has recurrent layers. State space models, gated linear attention and short convolutions all
    have a Conv1d; linear attention without one is listed in the config's layer_types."""
    from torch import nn

    from surefoot.models.decoder import decoder_of

    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return "linear_attention" in kinds or any(isinstance(module, nn.Conv1d) for module in decoder_of(model).modules())


def _attends(config: PreTrainedConfig) -> bool:
    """Whether any layer has softmax attention: by layer_types if the config has them, else by num_attention_heads."""
    kinds = getattr(config, "layer_types", None)
    if not isinstance(kinds, list | tuple):
        return hasattr(config, "num_attention_heads")
    return any(("attention" in kind and kind != "linear_attention") or kind == "hybrid" for kind in kinds)


_NONE = object()  # config.json's null is a value


def _value(config: PreTrainedConfig, key: str) -> Any:
    """Return a config value; the largest one if layers differ (`head_dim` in Gemma 4), because memory depends on it."""
    layers = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]
    found: list[Any] = [one.__dict__[key] if key in one.__dict__ else getattr(one, key, _NONE) for one in layers]
    if key == "intermediate_size" and isinstance(found[0], list):  # of each layer (Gemma 3n)
        found = found[0]
    return max(found) if len(found) > 1 and all(isinstance(one, int) for one in found) else found[0]


def _is_dropout(key: str, value: object) -> bool:
    """Whether a key is a dropout probability, except for attention's (a separate field) and classification heads'."""
    elsewhere = key in _ATTENTION_DROPOUT or key.startswith(("classifier", "summary"))
    return "drop" in key and not elsewhere and isinstance(value, float) and 0 < value < 1


def _facts(names: Mapping[nn.Module, str], model: PreTrainedModel) -> tuple[ModuleFact, ...]:
    """Return facts about the modules that have parameters of their own. names: module -> name in `model`."""
    from surefoot.models.adapter_targets import is_renamed

    routed = any(is_router(module) or _are_experts(module) for module in names)
    endings = {name.rpartition(".")[2] for name in names.values()} if routed else ()
    renamed = {ending for ending in endings if is_renamed(model, ending)}
    found = []
    for module, name in names.items():
        if own := sum(parameter.numel() for parameter in module.parameters(recurse=False)):
            routes = routed and (is_router(module) or not _ROUTERS.isdisjoint(name.split(".")))
            linear = _linear(module)
            as_parameter = linear is not None and name.rpartition(".")[2] in renamed
            found.append(ModuleFact(name, own, linear, _matrices(module), routes, as_parameter))
    return tuple(found)


def _linear(module: nn.Module) -> tuple[int, int] | None:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.nx, module.nf) if isinstance(module, Conv1D) else None


# Name components of routers in a model; for their class names see `is_router`.
_ROUTERS = frozenset({"router", "gate", "shared_expert_gate"})


def is_router(module: nn.Module) -> bool:
    """Whether the module is an MoE router, by its class name in transformers."""
    return any(word in type(module).__name__ for word in ("Router", "TopKGat", "MoEGate"))


_ADDED = re.compile(r"^(?:.*\.)?base_model\.model\.|^backbone\.|\.modules_to_save|\.default(?=\.)")


def plain_parameter(name: str) -> str:
    """Return a parameter's name in the model alone, without what PEFT and a value head's model add."""
    return _ADDED.sub("", name)


def layer_name(module: str) -> str:
    """Return the number of the layer that contains the module of this name, or the name if it is not in a layer."""
    return next((part for part in module.split(".") if part.isdigit()), module)


def _are_experts(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Experts")


def _matrices(module: nn.Module) -> tuple[MatrixFact, ...]:
    """Return the matrices of experts ([E, outputs, inputs] or transposed) and routers."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return ()
    own = list(module.named_parameters(recurse=False))
    if is_router(module):
        return tuple(MatrixFact(name, 1, one.shape[1], one.shape[0]) for name, one in own if one.ndim == 2)
    if not _are_experts(module):
        return ()
    turned = bool(getattr(module, "is_transposed", False))
    sizes = [(name, *one.shape) for name, one in own if one.ndim == 3]
    return tuple(MatrixFact(name, e, *((a, b) if turned else (b, a))) for name, e, a, b in sizes)


def one_line(error: BaseException) -> str:
    """Return a library's message in one line; if it is only a key or nothing, with what that means."""
    text = textwrap.shorten(str(error), 240, placeholder=" …")
    if isinstance(error, KeyError):
        return f"transformers looks for {text} and does not find it"
    return text or type(error).__name__


def _sees_both_ways(model: PreTrainedModel) -> bool:
    """Whether image tokens attend to each other bidirectionally: its module makes such masks, unless the language
    model's config disables them with None (small Gemma 4)."""
    makes = hasattr(sys.modules[type(model).__module__], "get_block_sequence_ids_for_mask")
    return makes and getattr(model.config.get_text_config(), "use_bidirectional_attention", None) is not None
