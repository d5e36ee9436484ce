"""Quantisation-aware training: linear layers that compute with rounded weights, and what they are converted to.

    round_weights(model, "int4", 32)      # before training; torchao's FakeQuantizedLinear, whose weight stays whole
    convert(model, "int4", 32)            # after it: integers and scales
    save_converted(model, "int4", 32, folder)

The equations, of a row's group of weights w (of the whole row for int8), with integers from -2^(b-1) to 2^(b-1) - 1:

    scale = max |w| / (2^(b-1) - 1/2)
    w'    = scale * clamp(round(w / scale))

int8-int4 rounds the input too, for each token, to int8 with a zero point. The backward pass takes the rounding as the
identity where a number was within range (straight-through), and as 0 where it was clamped. torchao
(https://github.com/pytorch/ao) computes both halves; a test holds them against float64.

Layers inside the decoder are rounded; embeddings, output head and norms stay as they are.
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

_ROUNDS = "weight_fake_quantizer"  # of torchao's layer


def round_weights(model: nn.Module, to: str, group: int | None) -> None:
    """Every linear layer inside the decoder layers, in place. Parameters are the same ones, under the same names.

    to: int4, int8-int4 or int8.
    group: weights of a row that share a scale; None: all of it.
    """
    library = import_torchao()
    meant = {id(module) for module in decoder_layers(model).modules() if type(module) is nn.Linear}
    config = library.qat.QATConfig(_config(library, to, group), step="prepare")
    library.quantize_(model, config, filter_fn=lambda module, name: id(module) in meant)


def convert(model: nn.Module, to: str, group: int | None) -> int:
    """Every layer that rounds becomes one that holds integers, in place; how many. Arguments: `round_weights`."""
    library = import_torchao()
    count = sum(map(rounds, model.modules()))
    config = library.qat.QATConfig(_config(library, to, group), step="convert")
    library.quantize_(model, config, filter_fn=lambda module, name: rounds(module))
    return count


def save_converted(model: PreTrainedModel, to: str, group: int | None, folder: Path) -> None:
    """config.json and model*.safetensors, as `AutoModelForCausalLM.from_pretrained` reads them where torchao is
    installed. Integers take a byte each, int4 too. The model is of no further use: it says now that it is quantised.

    model: converted.
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
    """Whether it computes with rounded weights. Works where torchao is not installed."""
    return isinstance(module, nn.Linear) and getattr(module, _ROUNDS, None) is not None


def not_rounded(model: nn.Module) -> list[str]:
    """Linear layers inside the decoder layers that compute with whole weights. An adapter's own matrices are not
    meant."""
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
    """What torchao calls it."""
    if to == "int8":
        weights, size = torch.int8, library.PerAxis(0)
    else:
        weights, size = torch.int4, library.PerGroup(group)  # pyright: ignore[reportAttributeAccessIssue]
    if to == "int8-int4":
        return library.Int8DynamicActivationIntxWeightConfig(weight_dtype=weights, weight_granularity=size)
    return library.IntxWeightOnlyConfig(weight_dtype=weights, granularity=size)
