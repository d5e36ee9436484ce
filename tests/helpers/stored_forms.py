"""Tiny models with quantized weight files in the layout of published ones."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 16  # rows and columns of a block of FP8; published models have 128
_DENSE = re.compile(r".*\.(?:[qkvo]_proj|gate_proj|up_proj|down_proj|kv_b_proj)\.weight")


def in_mxfp4(folder: Path, seed: int = 1) -> Path:
    """Replace the experts of a gpt_oss, [experts, columns, rows] in the file, by random 4-bit values."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    return _write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def in_fp8(folder: Path, seed: int = 1) -> Path:
    """Convert the decoder's linear layers to e4m3 with a scale per block."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if _DENSE.fullmatch(name)]:
        rows, columns = tensors[name].shape
        numbers = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        grid = (-(-rows // BLOCK), -(-columns // BLOCK))
        tensors[name] = numbers
        tensors[f"{name}_scale_inv"] = 0.02 + 0.1 * torch.rand(grid, generator=generator)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return _write(folder, tensors, settings)


def in_gptq(folder: Path, twin: Path, seed: int = 1) -> Path:
    """Convert the decoder's linear layers to 4-bit integers, with columns in groups in any order.

    twin: receives the same model in plain numbers.
    """
    shutil.copytree(folder, twin)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if _DENSE.fullmatch(name)]:
        rows, columns = tensors.pop(name).shape
        count, stem = columns // BLOCK, name.removesuffix("weight")
        numbers = torch.randint(16, (columns, rows), generator=generator)
        zeros = torch.randint(1, 16, (count, rows), generator=generator)
        factors = (0.005 + 0.01 * torch.rand(count, rows, generator=generator)).half()
        groups = (torch.arange(columns) // BLOCK)[torch.randperm(columns, generator=generator)]
        plain[name] = ((numbers - zeros[groups]) * factors.float()[groups]).t().contiguous()
        tensors[f"{stem}qweight"] = _words(numbers.t()).t().contiguous()
        tensors[f"{stem}qzeros"], tensors[f"{stem}scales"] = _words(zeros - 1), factors
        tensors[f"{stem}g_idx"] = groups.int()
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "gptq", "bits": 4, "group_size": BLOCK, "desc_act": True, "sym": False}
    return _write(folder, tensors, settings)


def in_awq(folder: Path, twin: Path, seed: int = 1) -> Path:
    """Like `in_gptq`, with AWQ's order of columns."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        return _words(numbers.unflatten(1, (-1, 8))[:, :, order].flatten(1))

    def parts(numbers: torch.Tensor, zeros: torch.Tensor, factors: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"qweight": packed(numbers.t()), "qzeros": packed(zeros.t()), "scales": factors.t().contiguous()}

    settings = {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "zero_point": True, "version": "gemm"}
    return _write(folder, _in_groups(folder, twin, seed, parts), settings)


def in_packed(folder: Path, twin: Path, seed: int = 1) -> Path:
    """Like `in_gptq`, packed as in compressed-tensors (pack-quantized)."""

    def parts(numbers: torch.Tensor, zeros: torch.Tensor, factors: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "weight_packed": _words(numbers),
            "weight_shape": torch.tensor(numbers.shape),
            "weight_scale": factors,
            "weight_zero_point": _words(zeros.t()).t().contiguous(),
        }

    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": BLOCK, "symmetric": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": "pack-quantized"}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return _write(folder, _in_groups(folder, twin, seed, parts), settings)


def _in_groups(folder: Path, twin: Path, seed: int, parts: Any) -> dict[str, torch.Tensor]:
    """All tensors of the folder, those of linear layers as `parts` writes them: of numbers [outputs, inputs], zeros and
    factors [outputs, groups], which twin has multiplied."""
    shutil.copytree(folder, twin)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name, one in tensors.items() if _DENSE.fullmatch(name) and one.shape[1] % BLOCK == 0]:
        rows, columns = tensors.pop(name).shape
        numbers = torch.randint(16, (rows, columns), generator=generator)
        zeros = torch.randint(1, 16, (rows, columns // BLOCK), generator=generator)
        factors = (0.005 + 0.01 * torch.rand(zeros.shape, generator=generator)).half()
        wide = [one.repeat_interleave(BLOCK, 1) for one in (zeros, factors.float())]
        plain[name] = (numbers - wide[0]) * wide[1]
        found = parts(numbers, zeros, factors)
        tensors |= {name.removesuffix("weight") + kind: one for kind, one in found.items()}
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    return tensors


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Pack eight values of a row into a word, the first in the lowest bits."""
    shifts = torch.tensor([1 << 4 * place for place in range(8)])
    return (numbers.unflatten(1, (-1, 8)) * shifts).sum(-1).to(torch.int32)


def _write(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder
