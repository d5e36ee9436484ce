"""Quantization-aware training: linear layers with fake-quantized weights, and their conversion to fewer bits.

    round_weights(model, "int4", 32)      # before training; the parameters stay unquantized
    with unrounded(model): ...            # the same layers without rounding
    convert(model, "int4", 32)            # after training: integers and scales
    save_converted(model, "int4", 32, folder)

For a group of weights w in a row (the whole row for int8), with integers from -2^(b-1) to 2^(b-1) - 1:

    scale = max |w| / (2^(b-1) - 1/2)
    w'    = scale * clamp(round(w / scale))

int8-int4 also quantizes the input, per token, to int8 with a zero point. In the backward pass the gradient of rounding
is 1 for values in range (straight-through) and 0 for clamped ones. Both parts are computed by torchao
(https://github.com/pytorch/ao); a test compares them with float64. nvfp4 and mxfp4 have layers of our own
(`models.block_floats`).

Only linear layers inside the decoder are quantized, not embeddings, output head and norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surefoot.models.block_floats import BlockFloatLinear, is_stored, store, stored_config
from surefoot.models.decoder import decoder_layers
from surefoot.models.forward import causal_model
from surefoot.models.quiet import quiet_libraries
from surefoot.planning.plan import QAT_BLOCKS
from surefoot.system.libraries import import_torchao

_ROUNDS = "weight_fake_quantizer"  # attribute of torchao's layer


def round_weights(model: nn.Module, to: str, group: int | None) -> None:
    """Fake-quantize every linear layer inside the decoder layers, in place. Parameters and their names do not change.

    to: int4, int8-int4, int8, nvfp4 or mxfp4.
    group: number of weights in a row that share a scale; None for the whole row.
    """
    layers = decoder_layers(model)
    if to in QAT_BLOCKS:
        for name, module in list(layers.named_modules()):
            if type(module) is nn.Linear:
                layers.set_submodule(name, BlockFloatLinear(module, to))
        return
    library = import_torchao()
    meant = {id(module) for module in layers.modules() if type(module) is nn.Linear}
    config = library.qat.QATConfig(_config(library, to, group), step="prepare")
    library.quantize_(model, config, filter_fn=lambda module, name: id(module) in meant)


@contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """Context in which fake-quantized layers compute with their parameters and inputs as they are."""
    rounding = [part for module in model.modules() if rounds(module) for part in _rounding_parts(module)]
    before = [part.enabled for part in rounding]
    for part in rounding:
        part.enabled = False
    try:
        yield
    finally:
        for part, enabled in zip(rounding, before, strict=True):
            part.enabled = enabled


def _rounding_parts(layer: nn.Module) -> list[Any]:
    if isinstance(layer, BlockFloatLinear):
        return [layer]
    return [part for name in (_ROUNDS, "activation_fake_quantizer") if (part := getattr(layer, name)) is not None]


def convert(model: nn.Module, to: str, group: int | None) -> int:
    """Convert every fake-quantized layer to numbers of fewer bits, in place; return their number. Arguments as in
    `round_weights`."""
    rounding = [module for module in model.modules() if rounds(module)]
    if to in QAT_BLOCKS:
        for module in rounding:
            store(module)  # pyright: ignore[reportArgumentType]
        return len(rounding)
    library = import_torchao()
    config = library.qat.QATConfig(_config(library, to, group), step="convert")
    library.quantize_(model, config, filter_fn=lambda module, name: rounds(module))
    return len(rounding)


def emulate(model: nn.Module, to: str) -> None:
    """Let a converted model that transformers loaded compute on any machine, in place: torchao multiplies nvfp4 and
    mxfp4 on GPUs that can, and only there."""
    for name, module in list(model.named_modules()):
        if to in QAT_BLOCKS and isinstance(module, nn.Linear) and is_stored(module):
            model.set_submodule(name, BlockFloatLinear(module, to))


def save_converted(model: PreTrainedModel, to: str, group: int | None, folder: Path) -> None:
    """Save config.json and model*.safetensors for `AutoModelForCausalLM.from_pretrained`, which needs torchao. Integers
    take one byte each, also int4; nvfp4 and mxfp4 half a byte. The model must not be used afterwards: its config now
    says that it is quantized.

    model: a converted model.
    """
    from transformers import TorchAoConfig
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    library = import_torchao()
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    whole = [name for name, module in linears if not is_stored(module)]
    settings = TorchAoConfig(_config(library, to, group), modules_to_not_convert=whole)
    model.config.quantization_config = settings
    model.hf_quantizer = TorchAoHfQuantizer(settings)  # pyright: ignore[reportArgumentType]
    with quiet_libraries():
        model.save_pretrained(folder)


def rounds(module: nn.Module) -> bool:
    """Whether the module has fake-quantized weights. Works without torchao."""
    if isinstance(module, BlockFloatLinear):
        return not module.stored
    return isinstance(module, nn.Linear) and getattr(module, _ROUNDS, None) is not None


def not_rounded(model: nn.Module) -> list[str]:
    """Return the linear layers inside the decoder layers without fake quantization, except for adapter matrices."""
    inside = decoder_layers(causal_model(model))
    return [
        name
        for name, module in inside.named_modules()
        if isinstance(module, nn.Linear) and not rounds(module) and not name.rpartition(".")[0].endswith(_ADAPTERS)
    ]


_ADAPTERS = ("lora_A", "lora_B")


def _config(library: Any, to: str, group: int | None) -> Any:
    """Return torchao's config."""
    if to in QAT_BLOCKS:
        return stored_config(to)
    if to == "int8":
        weights, size = torch.int8, library.PerAxis(0)
    else:
        weights, size = torch.int4, library.PerGroup(group)  # pyright: ignore[reportAttributeAccessIssue]
    if to == "int8-int4":
        return library.Int8DynamicActivationIntxWeightConfig(weight_dtype=weights, weight_granularity=size)
    return library.IntxWeightOnlyConfig(weight_dtype=weights, granularity=size)
