"""Layers as other libraries store them in few bits: the cases of stored_integers.safetensors."""

from typing import Any

OUTPUTS, INPUTS, GROUP = 32, 64, 16


def gptq(bits: int, size: int = GROUP, **more: Any) -> dict[str, Any]:
    plain = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False, "sym": True}
    return plain | {"checkpoint_format": "gptq"} | more


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


def integers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, "dynamic": False} | more


DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
# Name -> quantization_config, as config.json has it.
CASES: dict[str, dict[str, Any]] = {
    "gptq-4": gptq(4),
    "gptq-4-zeros": gptq(4, sym=False),
    "gptq-4-act-order": gptq(4, desc_act=True, sym=False),
    "gptq-4-v2": gptq(4, sym=False, checkpoint_format="gptq_v2"),
    "gptq-8": gptq(8),
    "gptq-2": gptq(2, sym=False),
    "gptq-4-rows": gptq(4, -1),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "packed-4": compressed("pack-quantized", integers(4, "group", group_size=GROUP)),
    "packed-4-zeros": compressed("pack-quantized", integers(4, "group", group_size=GROUP, symmetric=False)),
    "packed-8-rows": compressed("pack-quantized", integers(8, "channel")),
    "int8": compressed("int-quantized", integers(8, "channel"), DYNAMIC),
    "int8-zeros": compressed("naive-quantized", integers(8, "channel", symmetric=False)),
    "int8-one": compressed("naive-quantized", integers(8, "tensor")),
    "fp8": compressed("float-quantized", integers(8, "channel", type="float"), DYNAMIC | {"type": "float"}),
    "fp8-blocks": compressed("naive-quantized", integers(8, "block", type="float", block_structure=[16, 24])),
}
