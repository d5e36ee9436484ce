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
        case "compressed-tensors" if not obstacle(stored):
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


def obstacle(stored: Mapping[str, Any]) -> str:
    """Return what of a compressed-tensors model is not supported, e.g. "format nvfp4-pack-quantized"; "" if nothing, or
    for another method."""
    if stored.get("quant_method") != "compressed-tensors":
        return ""
    if stored.get("kv_cache_scheme"):
        return "a rounded key-value cache"
    if stored.get("transform_config"):
        return "rotations"
    sparse = stored.get("sparsity_config") or {}
    if not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense":
        return "sparsity"
    groups = stored.get("config_groups")
    if not isinstance(groups, dict):
        return "no config_groups"
    return next(filter(None, (_of_group(group, stored.get("format")) for group in groups.values())), "")


def _of_group(group: Any, of_all: Any) -> str:
    """Weights must be 4- or 8-bit integers or e4m3, and activations not or dynamically quantized."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return "a group without weights"
    if (form := group.get("format") or of_all) not in _COMPRESSED:
        return f"format {form}"
    if (kind := (weights.get("type"), weights.get("num_bits"))) not in (("int", 4), ("int", 8), ("float", 8)):
        return f"weights of type {kind[0]} in {kind[1]} bits"
    inputs = group.get("input_activations")
    static = isinstance(inputs, dict) and inputs.get("dynamic") is not True
    return "static factors of activations" if static else ""
