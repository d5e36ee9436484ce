"""Tiny models whose files hold weights in few bits, laid out as those of published models are."""

from __future__ import annotations

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
    """The experts of a gpt_oss, [experts, columns, rows] in the file, become any numbers of four bits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    return _write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def in_fp8(folder: Path, seed: int = 1) -> Path:
    """The linear layers of the decoder become e4m3 with a factor for each block."""
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
    """The linear layers of the decoder become integers of four bits, with the groups of columns in any order. twin:
    becomes the same model in plain numbers."""
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


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Eight numbers of a row in a word, the first in the lowest bits."""
    shifts = torch.tensor([1 << 4 * place for place in range(8)])
    return (numbers.unflatten(1, (-1, 8)) * shifts).sum(-1).to(torch.int32)


def _write(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder
