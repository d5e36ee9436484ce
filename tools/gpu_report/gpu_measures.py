"""What a part of the report measures, in a process of its own.

    python gpu_measures.py probes --result FILE --out FOLDER [--small]

The result is written anew after each thing that was measured, so that a part which is cut off or crashes leaves what it
had. `--small`: shapes for the pretend GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

_PACKAGES = (
    "liger-kernel",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "bitsandbytes",
    "torchao",
    "triton",
    "unsloth",
    "trl",
    "deepspeed",
)
_SMI = "name,driver_version,vbios_version,power.limit,clocks.max.sm,ecc.mode.current,mig.mode.current"

Save = Callable[[Any], None]


def machine(asked: argparse.Namespace, save: Save) -> None:
    import torch

    from surefoot.system import hardware

    told = hardware.describe()
    found: dict[str, Any] = {
        key: told[key] for key in ("system", "machine", "libc", "cpu", "threads", "device", "versions")
    }
    found["free"] = hardware.detect().free
    found["packages"] = {name: version for name in _PACKAGES if (version := _version(name))}
    found["variables"] = sorted(told["environment"])  # their names; values may hold paths
    found["arch_list"] = torch.cuda.get_arch_list()
    found["smi"] = _smi()
    save(found)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _smi() -> dict[str, str]:
    """What nvidia-smi says; empty where there is none."""
    try:
        words = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_SMI.split(","), map(str.strip, done.stdout.splitlines()[0].split(",")), strict=True))


# heads, key heads, width of a head; tokens; rows; the largest weight; lengths of documents
_SHAPES = {
    "8B": ((32, 8, 128), 4096, 4, (4096, 14_336), (500, 1500, 4000)),
    "1B": ((32, 8, 64), 2048, 8, (2048, 8192), (100, 400, 900, 2000)),
}
_SMALL_SHAPES = {"small": ((4, 2, 16), 64, 1, (64, 128), (16, 40))}


def probes(asked: argparse.Namespace, save: Save) -> None:
    """As doctor and a plan take them: forms of attention in a process of their own, which a kernel may crash."""
    import torch

    from surefoot.planning.attention import ORDER
    from surefoot.planning.measurements import PADDED, PointwiseSizes
    from surefoot.planning.probes import child, matmul, timing
    from surefoot.planning.probes.documents import DocumentsRequest
    from surefoot.planning.probes.pointwise import PointwiseRequest
    from surefoot.planning.probes.sizes import AttentionRequest
    from surefoot.runs.kernel_probes import DOCUMENTS, POINTWISE
    from surefoot.system import hardware

    device, here = torch.device("cuda"), hardware.detect()
    dtype = "bf16" if here.bf16 else "fp16"
    found: dict[str, Any] = {"dtype": dtype, "copy": timing.copy_rate(device), "shapes": {}}
    for name, (heads, length, rows, weight, mix) in (_SMALL_SHAPES if asked.small else _SHAPES).items():
        one = found["shapes"][name] = {"products": matmul.product_rates([weight], device, dtypes=("fp32", dtype))}
        one["tf32"] = matmul.tf32_rate([weight], device)
        save(found)
        request = AttentionRequest((*ORDER, "eager"), *heads, length, dtype, "cuda", rows=rows)
        one["attention"] = [asdict(trial) for trial in child.run_in_child(request)]
        save(found)
        packed = DocumentsRequest(
            ("varlen", *here.packages, "sdpa", PADDED), mix, *heads, dtype, "cuda", tokens=rows * length
        )
        one["documents"] = [asdict(trial) for trial in child.run_in_child(packed, DOCUMENTS)]
        save(found)
        if here.liger:
            sizes = PointwiseSizes(weight[0], heads[0], heads[2], heads[1], weight[1], "silu")
            parts = PointwiseRequest(("norm", "rotary", "gated"), sizes, dtype, "cuda")
            one["pointwise"] = [asdict(trial) for trial in child.run_in_child(parts, POINTWISE)]
            save(found)


def cudnn(asked: argparse.Namespace, save: Save) -> None:
    """At which shapes cuDNN's attention is not finite or off float64 (PyTorch issue 196678)."""
    import torch

    from surefoot.planning.probes.attention import Case, check, eager, far_inputs, form_named, in_float64, random_inputs
    from surefoot.planning.probes.matmul import TORCH_DTYPE
    from surefoot.system import hardware

    types = ("bf16",) if asked.small else ("bf16", "fp16")
    widths, lengths = ((64,), (64, 96)) if asked.small else ((64, 128), (64, 128, 192, 333, 704, 1024))
    found: dict[str, Any] = {
        "cudnn": torch.backends.cudnn.version(),
        "tried": 0,
        "wrong": [],
        "refused": [],
        "begun": "",
    }
    for dtype in types if hardware.detect().bf16 else ("fp16",):
        for width in widths:
            for length in lengths:
                for far in (False, True):
                    inputs = random_inputs(1, 4, 1, length, width, TORCH_DTYPE[dtype], torch.device("cuda"))
                    if far:
                        far_inputs(inputs)
                    case = Case("these shapes", inputs, in_float64(eager, inputs))
                    for masked in (False, True):
                        shape = {"dtype": dtype, "head_dim": width, "tokens": length, "far_logits": far, "mask": masked}
                        save(found | {"begun": json.dumps(shape)})  # known, if the process crashes in it
                        failure, _ = check(form_named("cudnn", masked=masked), [case], dtype)
                        found["tried"] += 1
                        if failure:
                            kind = "refused" if failure.startswith("cannot run") else "wrong"
                            found[kind].append(shape | {"why": failure})
    save(found)


_STEPS, _DIES_AT = 6, 4
_CASES: Mapping[str, dict[str, Any]] = {
    "lora": {"adapter": {"kind": "lora", "rank": 16}, "data.packing": "off"},
    "dora": {"adapter": {"kind": "dora", "rank": 16, "dropout": 0.1}, "data.packing": "off"},
    "full": {"data.packing": "off"},
    "packed": {"adapter": {"kind": "lora", "rank": 16}, "data.packing": "on"},
}

_SMALL_CASES = ("lora", "packed")


def runs(asked: argparse.Namespace, save: Save) -> None:
    """Each case as it is planned here, beside its plain fp32 path on the same device; twice; and once with a death in
    the fourth step and a resume."""
    folder = asked.out / "runs"
    base, data = run_base(folder, small=asked.small)
    found: dict[str, Any] = {}
    for name in _SMALL_CASES if asked.small else _CASES:
        found[name] = one = {}
        try:
            _run_case(folder, name, base, data, one, lambda: save(found))
        except Exception as error:  # the others are still worth knowing
            one["fault"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        save(found)
    if not any("resumed" in one for one in found.values()):
        sys.exit("no case came to its end")


def _run_case(
    folder: Path,
    name: str,
    base: Path,
    data: Path,
    found: dict[str, Any],
    tell: Callable[[], None],
) -> None:
    from surefoot.planning.fast_paths import PLAINEST
    from surefoot.report.verification import compare_folders

    changes = _CASES[name]

    def config(label: str, **more: Any) -> Path:
        return write_run(folder, f"{name}-{label}", base, data, dict(changes) | more)

    plain = PLAINEST if "dropout" not in changes.get("adapter", {}) else {}  # with dropout other rows draw other masks
    reference = _train(config("plain", precision="fp32", **plain)) if plain else None
    straight = _train(config("straight"))
    plan = json.loads((straight / "plan.json").read_text())["plan"]
    (rank,) = json.loads((straight / "environment.json").read_text())["ranks"]
    found |= {
        "losses": _losses(straight),
        "attention": plan["attention"]["expected"]["value"],
        "kernels": {key: value["value"] for key, value in plan["kernels"].items()},
        "fast_paths": rank.get("fast_paths", {}),
    }
    if reference:
        found["plain"] = _losses(reference)
        pairs = zip(found["losses"], found["plain"], strict=True)
        found["off"] = max(abs(one - other) / abs(other) for one, other in pairs)
    tell()
    found["repeats"] = not compare_folders(straight, _train(config("again")))
    broken = config("broken")
    died = subprocess.run([sys.executable, __file__, "dies", "--config", str(broken)], capture_output=True, text=True)
    if died.returncode != 9:
        raise RuntimeError(f"the run that was to die ended with {died.returncode}: {died.stderr.strip()[-200:]}")
    resumed = _train(broken, resume=True)
    found["resumed"] = [str(difference) for difference in compare_folders(straight, resumed)][:5]


def run_base(folder: Path, *, small: bool) -> tuple[Path, Path]:
    """A random Llama of 125 M parameters, and instructions out of the repository's pages."""
    from bases import SIZES, Shape, build_base
    from gpu_data import write_data

    write_data(folder.parent / "data")
    data = folder.parent / "data" / "instructions.json"
    base = folder / "base"
    if not (base / "config.json").is_file():
        texts = [" ".join(record.values()) for record in json.loads(data.read_text())]
        build_base(base, texts, Shape(2, 64, 8_192) if small else SIZES["small"])
    return base, data


def write_run(folder: Path, name: str, base: Path, data: Path, changes: Mapping[str, Any]) -> Path:
    """changes: dotted keys among them."""
    import yaml

    config: dict[str, Any] = {
        "stage": "sft",
        "model": str(base),
        "output": str(folder / name),
        "data": {"train": str(data), "max_length": 256, "template": "alpaca"},
        "batch": {"size": 8, "micro": 4},
        "optim": {"lr": 2e-4},
        "duration": f"{_STEPS} steps",
        "checkpoint": {"every": "2 steps"},
    }
    for key, value in changes.items():
        section, _, field = key.partition(".")
        if field:
            config[section] = {**config.get(section, {}), field: value}
        else:
            config[section] = value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _train(path: Path, *, resume: bool = False) -> Path:
    import io

    import yaml

    import surefoot

    output = Path(yaml.safe_load(path.read_text())["output"])
    surefoot.train(path, resume=resume, overwrite=not resume, stream=io.StringIO())
    return output


def _losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def dies(asked: argparse.Namespace, save: Save) -> None:
    """Train, and end like a killed process in the middle of a step."""
    from surefoot.training import loop

    real = loop.train_step

    def train_step(*given: Any, **named: Any) -> Any:
        if named["step"] == _DIES_AT:
            os._exit(9)
        return real(*given, **named)

    loop.train_step = train_step
    _train(asked.config)


_REHEARSED = "1b-lora"


def cell(asked: argparse.Namespace, save: Save) -> None:
    """A comparison of benchmarks/gpu_cells.py, if it fits into memory, disk and minutes."""
    if asked.small and asked.cell != _REHEARSED:
        return save({"left out": f"{_REHEARSED} stands for all in a rehearsal"})
    import gpu_cells
    import peers
    from gpu_data import NAMES, write_data
    from surefoot.system import hardware
    from surefoot.system.errors import SurefootError
    from surefoot.system.messages import size_text

    known = gpu_cells.CELLS[asked.cell]
    if asked.small:
        words = [
            "--size",
            "tiny",
            "--adapter",
            "lora",
            "--league",
            "equal",
            "--length",
            "64",
            "--batch",
            "8",
            "--micro",
            "8",
        ]
        known = replace(known, words=[*words, "--sides", "PEFT,"])
    folder = asked.data or asked.out / "data"
    if asked.data is None:
        write_data(folder)
        known = replace(known, data=NAMES[known.data])
    if not (folder / known.data).is_file():
        return save({"left out": f"{folder / known.data} is not there"})
    words = [*gpu_cells.words_of(known, folder), *asked.words]
    if asked.small:
        words[words.index("--steps") + 1] = "3"
    here = hardware.detect()
    try:
        wanted = gpu_cells.expected(gpu_cells.asked_of(words), here)
    except SurefootError as error:  # the plan of a model that has no room
        return save({"left out": str(error).splitlines()[0]})
    if wanted.memory > here.memory:
        return save({"left out": f"needs {size_text(wanted.memory)}, the GPU has {size_text(here.memory)}"})
    if wanted.disk > hardware.free_disk(asked.out):
        return save({"left out": f"the base needs {size_text(wanted.disk)} of disk, which is not free"})
    least = wanted.least * slower(asked.out)
    if least > asked.minutes and not asked.small:
        return save({"left out": f"needs some {least:.0f} minutes, {asked.minutes:.0f} are left"})
    result = asked.result.with_suffix(".peers")
    words += [
        "--rounds",
        "1",
        "--keep",
        str(asked.out / "worlds"),
        "--minutes",
        f"{asked.minutes:.2f}",
        "--json",
        str(result),
    ]
    if code := subprocess.run([sys.executable, str(ROOT / "benchmarks" / "peers.py"), *words]).returncode:
        sys.exit(code)
    told = json.loads(result.read_text())
    told.pop("turns")
    for row in told["rows"]:
        row["has_parity"] = row["off"] <= peers.PARITY and row["norm_off"] <= peers.NORM_PARITY
    return save({**told, "aim": known.aim, "limit": wanted.limit, "forecast": wanted.plan.memory.total})


def slower(out: Path) -> float:
    """How much longer than on an H200 products take here, by the probes; 1 where nothing was measured."""
    import gpu_cells

    path = out / "parts" / "probes.json"
    known = (json.loads(path.read_text())["found"] if path.is_file() else None) or {"shapes": {}}
    rates: Iterator[float] = (one["products"].get(known["dtype"], 0.0) for one in known["shapes"].values())
    best = max(rates, default=0.0)
    return max(1.0, gpu_cells.PRODUCTS / best) if best else 1.0


MEASURES = {"machine": machine, "probes": probes, "cudnn": cudnn, "runs": runs, "dies": dies, "cell": cell}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--cell")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--minutes", type=float)
    asked, asked.words = parser.parse_known_args()  # the words are for peers.py

    def save(found: Any) -> None:
        unfinished = asked.result.with_suffix(".writing")
        unfinished.write_text(json.dumps(found, default=str), encoding="utf-8")
        unfinished.replace(asked.result)

    MEASURES[asked.measure](asked, save)


if __name__ == "__main__":
    main()
