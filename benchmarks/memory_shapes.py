"""The memory that the plan forecasts for 1B, 8B and 70B models on a GPU, and what torch would allocate there.

    PYTHONPATH=tests python -m helpers.pretend_gpu python benchmarks/memory_shapes.py [--only TEXT] [--out FILE.json]

It needs no GPU and no weights. The pretend GPU (tests/helpers/pretend_gpu) runs the code of a training step with
operators on real numbers that give shapes alone, and counts bytes in blocks as CUDA's allocator does: so this is what
surefoot's, PEFT's and transformers' code keeps and frees, in the order of a real step. It knows nothing of what a GPU's
kernels take for themselves (workspaces), nor of fragments between blocks.

The base is a safetensors file of the right size with nothing in it, in the type in which the run holds it, so that
loading maps the file and takes no memory. `offloaded` is all weights with parallel.offload; its sums and moments, which
would be real memory of the host, are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import memory
from bases import SIZES, Shape, write_config
from fresh import told_by

MODELS = ("1b", "8b", "70b")
ADAPTERS = ("lora", "dora", "full", "offloaded")
AGAIN = ("on", "off")
LAYOUTS = ("", " packed")
LENGTH = 2048
EDGE = 8 << 40  # bytes of the device: nothing is refused
SHARD = 4 << 30  # bytes


Cases = Iterable[tuple[str, dict[str, Any]]]


def main() -> None:
    run_cases(__doc__, __file__, _cases, measure)


def _cases(folder: str) -> Cases:
    for size, adapter, again, layout in itertools.product(MODELS, ADAPTERS, AGAIN, LAYOUTS):
        name = f"{size} {adapter} {again}{layout}"
        case = {"name": name, "size": size, "adapter": adapter, "again": again, "folder": folder}
        rest = {"packed": bool(layout), "device": "cuda", "length": LENGTH, "precision": "bf16", "data": None}
        yield name, case | rest


def run_cases(
    about: str, program: str, cases: Callable[[str], Cases], measure: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Read the arguments, measure each case in a process of its own, and print forecast and peak.

    cases: folder for what cases share -> name and settings of each.
    measure: of one case, in this process; its `rollout` is printed besides.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, case in cases(temporary):
            if options.only not in name:
                continue
            row = case | told_by([sys.executable, program, "--case", json.dumps(case)])
            row["off"] = row["forecast"] / row["peak"] - 1
            found.append(row)
            forecast, peak = (row[key] / 2**30 for key in ("forecast", "peak"))
            drawn = f"  rollout {row['rollout'] / 2**30:7.2f}" if row.get("rollout") else ""
            shown = f"forecast {forecast:7.2f} GiB  peak {peak:7.2f} GiB  {row['off']:+.1%}{drawn}"
            print(f"{name:>28}  {shown}", flush=True)
    if not found:
        sys.exit(f"--only: no case has {options.only!r} in its name")
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """In this process, by the program for machines that have the weights."""
    from pretend_cuda import device

    from surefoot.models import adapter_targets, load
    from surefoot.runs import load_models
    from surefoot.system import hardware
    from surefoot.training.engine.offloaded import OffloadedEngine

    device().set_limit(EDGE)
    device().set_shapes_only(True)
    shape = SIZES[case["size"]]
    full = case["adapter"] in ("full", "offloaded")
    case["size"] += " whole" * full
    base = Path(case["folder"]) / case["size"].replace(" ", "")
    if not base.exists():
        build_empty(base, shape, 4 if full else 2)
    memory.SIZES[case["size"]] = shape
    adapter_targets.zero_norm_rows = lambda model, targets: {}  # of weights that are not there
    hardware.host_memory = lambda: (EDGE, EDGE)
    load._non_finite = lambda *given: []  # it would read every page of a file that is a hole
    if case["adapter"] == "offloaded":
        load_models.verify_head = lambda model, device: 0.0  # on the CPU, with numbers that are not there
        OffloadedEngine._add = lambda self, name, gradient, arrived, *rest: arrived()
        OffloadedEngine._send = lambda *given: None  # it takes no memory of the device, and its time
        case |= {"adapter": "full", "more": "parallel: {offload: optimizer}\n"}
    return memory.measure(case)


def build_empty(folder: Path, shape: Shape, width: int) -> None:
    """Config, tokenizer, and weights in files of which only the headers are written; the rest of each is a hole.

    width: bytes of a weight, 2 or 4.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = write_config(folder, ["a b c"], shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    write_empty(folder, model, width, tied=bool(config.tie_word_embeddings))


def write_empty(folder: Path, model: Any, width: int, *, tied: bool) -> None:
    """The weights alone. model: on the meta device. tied: whether its head is its embedding."""
    shards: list[dict[str, Any]] = [{}]
    end = 0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        if end > SHARD:
            shards.append({})
            end = 0
        size = width * tensor.numel()
        shards[-1][name] = {
            "dtype": "BF16" if width == 2 else "F32",
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    places = {}
    for number, header in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with open(file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + max(one["data_offsets"][1] for one in header.values()))
        places |= dict.fromkeys(header, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


if __name__ == "__main__":
    main()
