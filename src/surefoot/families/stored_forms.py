"""Recognize the quantization format of a model's files from quantization_config in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Supported values of compressed-tensors' `format`, for the model or a group of modules.
_COMPRESSED = ("pack-quantized", "naive-quantized", "int-quantized", "float-quantized")


def stored_form(stored: Any) -> str:
    """Return the name of the format if `surefoot.models.convert.decoded` supports it, else "".

    stored: quantization_config of config.json.
    """
    if not isinstance(stored, dict):
        return ""
    match stored.get("quant_method"):
        case "mxfp4":
            return "MXFP4"
        case "fp8" if _in_blocks(stored):
            return "FP8"
        case "gptq" if _bits(stored) in (2, 4, 8) and _layout(stored, "gptq") in ("gptq", "gptq_v2"):
            return "GPTQ"
        case "awq" if _bits(stored) == 4 and _layout(stored, "gemm") == "gemm":
            return "AWQ"
        case "compressed-tensors" if _compressed(stored):
            return "compressed-tensors"
        case _:
            return ""


def _in_blocks(stored: Mapping[str, Any]) -> bool:
    blocks = stored.get("weight_block_size")
    sized = isinstance(blocks, list) and len(blocks) == 2 and all(isinstance(one, int) and one > 0 for one in blocks)
    plain = stored.get("fmt", "e4m3") == "e4m3" and stored.get("expert_dtype", "fp8") == "fp8"
    dynamic = stored.get("activation_scheme", "dynamic") == "dynamic"  # other schemes have activation scales
    return sized and plain and dynamic


def _bits(stored: Mapping[str, Any]) -> Any:
    return stored.get("bits", stored.get("w_bit"))


def _layout(stored: Mapping[str, Any], default: str) -> str:
    """Return the packing layout: `version` in AWQ, `checkpoint_format` in GPTQ."""
    return str(stored.get("checkpoint_format") or stored.get("version") or stored.get("format") or default).lower()


def _compressed(stored: Mapping[str, Any]) -> bool:
    groups = stored.get("config_groups")
    if stored.get("kv_cache_scheme") or stored.get("transform_config") or not isinstance(groups, dict):
        return False
    sparse = stored.get("sparsity_config") or {}
    if not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense":
        return False
    return all(isinstance(group, dict) and _plain_group(group, stored.get("format")) for group in groups.values())


def _plain_group(group: Mapping[str, Any], of_all: Any) -> bool:
    """Return whether weights are 4- or 8-bit integers or e4m3, with activations not or dynamically quantized."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or (isinstance(inputs, dict) and inputs.get("dynamic") is not True):
        return False
    rounded = (weights.get("type"), weights.get("num_bits"))
    return (group.get("format") or of_all) in _COMPRESSED and rounded in (("int", 4), ("int", 8), ("float", 8))
