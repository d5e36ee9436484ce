"""Write stored_integers.safetensors: layers as GPTQModel and compressed-tensors store them, and what these decode.

Run by hand, with the interpreter of an environment that has both (7.7.0 and 0.20.0 when this was last done):

    PYTHONPATH=tests OTHER/bin/python tests/equality/make_stored_integers.py

Of each case of `stored_integers` the file has a layer's tensors under CASE.NAME, as they lie in a model's files, and
under CASE.decoded the weight that the library computes from them.
"""

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from gptqmodel.nn_modules.qlinear.gemm_awq import AwqGEMMLinear
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import FORMAT
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file

from equality.stored_integers import CASES, GROUP, INPUTS, OUTPUTS

Layer = dict[str, torch.Tensor]


def main() -> None:
    found = {}
    for number, (name, stored) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(number)
        weight = torch.randn(OUTPUTS, INPUTS, generator=generator) / 8
        weight[:4] = weight[:4].abs()  # whose zeros are 0
        make = {"gptq": of_gptq, "awq": of_awq, "compressed-tensors": of_compressed}[stored["quant_method"]]
        found |= {f"{name}.{kind}": tensor.contiguous() for kind, tensor in make(stored, weight, generator).items()}
    about = {one: version(one) for one in ("gptqmodel", "compressed-tensors", "torch")}
    save_file(found, Path(__file__).with_name("stored_integers.safetensors"), metadata=about)


def affine(weight: torch.Tensor, groups: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors and zeros [outputs, groups] of numbers of so many bits."""
    columns = [weight[:, groups == group] for group in range(int(groups.max()) + 1)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in columns], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in columns], 1)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    factors = ((high - low) / (2**bits - 1)).half().float()
    return factors, (-low / factors).round().clamp(0, 2**bits - 1)


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    layer.weight.data = weight
    return layer


def of_gptq(stored: dict[str, Any], weight: torch.Tensor, generator: torch.Generator) -> Layer:
    bits, size = stored["bits"], stored["group_size"]
    groups = torch.arange(INPUTS) // (size if size > 0 else INPUTS)
    groups = groups[torch.randperm(INPUTS, generator=generator)] if stored["desc_act"] else groups
    factors, zeros = affine(weight, groups, bits, stored["sym"])
    settings = {key: stored[key] for key in ("bits", "group_size", "sym", "desc_act")}
    layer = TorchLinear(**settings, in_features=INPUTS, out_features=OUTPUTS, format=FORMAT.GPTQ_V2)
    layer.pack_original(linear(weight), factors, zeros, groups.int())
    layer.qzero_format(format=2)
    first = stored["checkpoint_format"] == "gptq"
    if first:
        convert_gptq_v2_to_v1_format_module(layer, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    parts = {kind: getattr(layer, kind).clone() for kind in ("qweight", "qzeros", "scales", "g_idx")}
    if first:
        convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
    layer.post_init()
    return parts | {"decoded": layer.dequantize_weight().t().contiguous()}


def of_awq(stored: dict[str, Any], weight: torch.Tensor, _: torch.Generator) -> Layer:
    factors, zeros = affine(weight, torch.arange(INPUTS) // GROUP, 4, False)
    layer = torch.nn.Module()  # their class asks for CUDA, its packing does not
    layer.bits, layer.group_size, layer.in_features = 4, GROUP, INPUTS
    AwqGEMMLinear.pack(layer, linear(weight), factors, zeros)
    parts = {kind: getattr(layer, kind) for kind in ("qweight", "qzeros", "scales")}
    return parts | {"decoded": dequantize_gemm(*parts.values(), 4, GROUP).t().contiguous()}


def of_compressed(stored: dict[str, Any], weight: torch.Tensor, _: torch.Generator) -> Layer:
    group = stored["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group, format=stored["format"])
    factors, zeros = grid(weight, scheme.weights)
    parts: Layer = {"weight": weight.bfloat16(), "weight_scale": factors}
    if zeros is not None:
        parts["weight_zero_point"] = zeros
    compressor = BaseCompressor.get_value_from_registry(stored["format"])
    parts = compressor.compress(parts, scheme)
    return parts | {"decoded": compressor.decompress(parts, scheme)["weight"]}


def grid(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Factors in bf16, and zeros where the scheme has some."""
    if args.strategy == "block":
        rows, columns = args.block_structure
        tall = [part.split(columns, 1) for part in weight.split(rows, 0)]
        return torch.stack([torch.stack([one.abs().max() for one in wide]) for wide in tall]).bfloat16() / 448, None
    size = {"group": GROUP, "channel": INPUTS}.get(args.strategy, INPUTS)
    low, high = (reduce(weight.unflatten(1, (-1, size)), -1) for reduce in (torch.amin, torch.amax))
    if args.strategy == "tensor":
        low, high = low.min().reshape(1), high.max().reshape(1)
    if args.symmetric:
        most = 448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
        return (torch.maximum(-low, high) / most).bfloat16(), None
    factors = ((high.clamp(min=0) - low.clamp(max=0)) / (2**args.num_bits - 1)).bfloat16()
    return factors, (-(2 ** (args.num_bits - 1)) - low.clamp(max=0) / factors).round().to(torch.int8)


if __name__ == "__main__":
    main()
