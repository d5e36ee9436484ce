"""Does the memory that the plan forecasts agree with what a run takes? CPU, resident memory, a fresh process per case.

    python benchmarks/memory.py [--out FILE.json] [--only TEXT]

A case is a model, a length, an adapter and whether layers are computed again. Its process builds the model as a run
does, by `surefoot`'s own set-up, and takes a few optimizer steps on random tokens, every one of them supervised. Peak:
the kernel's mark of resident memory, begun anew after set-up (while weights are read, their file is mapped and counts),
above what was resident after the imports and what of the libraries' code is read in a step. Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIZES = {
    "22 M": {"hidden": 384, "layers": 8, "vocabulary": 8_192},
    "95 M": {"hidden": 768, "layers": 10, "vocabulary": 32_000},
}
LENGTHS = (256, 1024)
ROWS = 2
ADAPTERS = ("full", "lora", "dora")
AGAIN = ("off", "on")
STEPS = 2
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "holes", "apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for size, length, adapter, again in itertools.product(SIZES, LENGTHS, ADAPTERS, AGAIN):
            case = {
                "name": f"{size} {length} {adapter} {again}",
                "size": size,
                "length": length,
                "adapter": adapter,
                "again": again,
                "precision": options.precision,
                "folder": temporary,
            }
            if options.only not in case["name"]:
                continue
            command = [sys.executable, __file__, "--case", json.dumps(case)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            row = case | json.loads(done.stdout.splitlines()[-1])
            row["off"] = row["forecast"] / row["peak"] - 1
            found.append(row)
            print(
                f"{case['name']:>22}  forecast {row['forecast'] / 2**20:7.0f} MiB  peak {row['peak'] / 2**20:7.0f} MiB"
                f"  {row['off']:+.1%}",
                flush=True,
            )
    worst = max(found, key=lambda row: abs(row["off"]))
    print(f"worst: {worst['name']} {worst['off']:+.1%} of {len(found)} cases")
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """In this process: the forecast of the plan, the peak, and what the parts of the forecast are."""
    import torch

    from surefoot import hardware, process
    from surefoot.config.load import load_config
    from surefoot.data.batch import Batch
    from surefoot.objectives.sft import sft_loss
    from surefoot.stages.fast_paths import planned_paths
    from surefoot.stages.planned import make_plan
    from surefoot.stages.setup import planned_tokenizer, set_up
    from surefoot.training.step import train_step

    folder = Path(case["folder"])
    base = folder / case["size"].replace(" ", "")
    if not base.exists():
        words = [sys.executable, "-c", _BUILD, str(base), json.dumps(SIZES[case["size"]])]
        subprocess.run(words, check=True, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)
    text = folder / "one.json"
    text.write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    adapter = "" if case["adapter"] == "full" else f"adapter: {{kind: {case['adapter']}, rank: 32}}\n"
    path = folder / "run.yaml"
    path.write_text(
        f"stage: sft\nmodel: {base}\noutput: {folder / 'run'}\nprecision: {case['precision']}\n{adapter}"
        f"data: {{train: {text}, max_length: {case['length']}}}\nbatch: {{size: {ROWS}, micro: {ROWS}}}\n"
        f"gradient_checkpointing: {case['again']}\nattention: sdpa\n"
    )
    config = load_config(path).config
    plan = make_plan(config, measure=False)
    tokenizer = planned_tokenizer(base, plan.tokenizer)
    process.bound_product_caches("cpu")
    torch.ones(8, 8).bfloat16() @ torch.ones(8, 8).bfloat16()  # the libraries' own buffers
    before, code = _status("VmRSS"), _status("RssFile")
    setup = set_up(config, plan, base, tokenizer, None)
    for one in planned_paths(plan):
        one.install(setup.engine.model)
    Path("/proc/self/clear_refs").write_text("5")  # the mark begins again
    draw = torch.Generator().manual_seed(0)
    vocabulary, length = SIZES[case["size"]]["vocabulary"], case["length"]
    for step in range(1, STEPS + 1):
        ids = torch.randint(0, vocabulary, (ROWS, length), generator=draw)
        batch = Batch(ids, ids.roll(-1, 1), None, ids.numel(), (length,) * ROWS, tuple(range(ROWS)))
        train_step(setup.engine, sft_loss, [batch], step=step, lr=1e-4, scale=None, settings=setup.settings)
    memory = plan.memory
    return {
        "forecast": memory.total,
        "peak": hardware.peak_memory("cpu") - before - max(0, _status("RssFile") - code),
        "parts": {key: getattr(memory, key) for key in PARTS},
        "kernels": {key: value.value for key, value in vars(plan.kernels).items()},
    }


def _status(field: str) -> int:
    """Bytes of this process, by the kernel's name."""
    fields = Path("/proc/self/status").read_text().split(f"{field}:")[1]
    return int(fields.split()[0]) * 1024


_BUILD = """
import json, sys
from pathlib import Path
from throughput import build_base
size = json.loads(sys.argv[2])
build_base(Path(sys.argv[1]), ["a b c"], size["layers"], size["hidden"], vocabulary=size["vocabulary"])
"""

if __name__ == "__main__":
    main()
