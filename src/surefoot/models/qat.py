"""Quantization-aware training: linear layers with fake-quantized weights, and their conversion to integers.

    round_weights(model, "int4", 32)      # before training; torchao's FakeQuantizedLinear, with unquantized parameters
    convert(model, "int4", 32)            # after training: integers and scales
    save_converted(model, "int4", 32, folder)

For a group of weights w in a row (the whole row for int8), with integers from -2^(b-1) to 2^(b-1) - 1:

    scale = max |w| / (2^(b-1) - 1/2)
    w'    = scale * clamp(round(w / scale))

int8-int4 also quantizes the input, per token, to int8 with a zero point. In the backward pass the gradient of rounding
is 1 for values in range (straight-through) and 0 for clamped ones. Both parts are computed by torchao
(https://github.com/pytorch/ao); a test compares them with float64.

Only linear layers inside the decoder are quantized, not embeddings, output head and norms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surefoot.models.decoder import decoder_layers
from surefoot.models.forward import causal_model
from surefoot.models.quiet import quiet_libraries
from surefoot.system.libraries import import_torchao

_ROUNDS = "weight_fake_quantizer"  # attribute of torchao's layer


def round_weights(model: nn.Module, to: str, group: int | None) -> None:
    """Fake-quantize every linear layer inside the decoder layers, in place. Parameters and their names do not change.

    to: int4, int8-int4 or int8.
    group: number of weights in a row that share a scale; None for the whole row.
    """
    library = import_torchao()
    meant = {id(module) for module in decoder_layers(model).modules() if type(module) is nn.Linear}
    config = library.qat.QATConfig(_config(library, to, group), step="prepare")
    library.quantize_(model, config, filter_fn=lambda module, name: id(module) in meant)


def convert(model: nn.Module, to: str, group: int | None) -> int:
    """Convert every fake-quantized layer to integers, in place; return their number. Arguments as in
    `round_weights`."""
    library = import_torchao()
    count = sum(map(rounds, model.modules()))
    config = library.qat.QATConfig(_config(library, to, group), step="convert")
    library.quantize_(model, config, filter_fn=lambda module, name: rounds(module))
    return count


def save_converted(model: PreTrainedModel, to: str, group: int | None, folder: Path) -> None:
    """Save config.json and model*.safetensors for `AutoModelForCausalLM.from_pretrained`, which needs torchao. Integers
    take one byte each, also int4. The model must not be used afterwards: its config now says that it is quantized.

    model: a converted model.
    """
    from transformers import TorchAoConfig
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    library = import_torchao()
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    whole = [name for name, module in linears if not _holds_integers(module)]
    settings = TorchAoConfig(_config(library, to, group), modules_to_not_convert=whole)
    model.config.quantization_config = settings
    model.hf_quantizer = TorchAoHfQuantizer(settings)  # pyright: ignore[reportArgumentType]
    with quiet_libraries():
        model.save_pretrained(folder)


def rounds(module: nn.Module) -> bool:
    """Whether the module has fake-quantized weights. Works without torchao."""
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


def _holds_integers(linear: nn.Linear) -> bool:
    return type(linear.weight.data) is not torch.Tensor


def _config(library: Any, to: str, group: int | None) -> Any:
    """Return torchao's config."""
    if to == "int8":
        weights, size = torch.int8, library.PerAxis(0)
    else:
        weights, size = torch.int4, library.PerGroup(group)  # pyright: ignore[reportAttributeAccessIssue]
    if to == "int8-int4":
        return library.Int8DynamicActivationIntxWeightConfig(weight_dtype=weights, weight_granularity=size)
    return library.IntxWeightOnlyConfig(weight_dtype=weights, granularity=size)
