"""Full fine-tuning, LoRA and DoRA, each in fp32, bf16 and fp16, as a user runs them: nine runs of `surefoot train`.

Each run is one epoch over an alpaca file. It passes when the command exits with 0, every logged loss is finite, the
loss falls, `surefoot verify` finds every byte as written, and transformers and PEFT load the output with the weights
of the last checkpoint.

    python benchmarks/alpaca_matrix.py [--data FILE.json] [--max-samples N] [--layers 2] [--hidden 256] [--keep FOLDER]

The base is a small random Llama with a tokenizer trained on the data, so nothing is downloaded and the losses are those
of a model that knows nothing yet. It proves that the nine ways run and hold together, not that a model got good.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from bases import Shape, build_base

ADAPTERS = ("full", "lora", "dora")
PRECISIONS = ("fp32", "bf16", "fp16")
COMBINATIONS = tuple(itertools.product(ADAPTERS, PRECISIONS))
LEARNING_RATE = {"full": 1e-3, "lora": 2e-3, "dora": 2e-3}  # high: a random base has everything to learn
ENDS = 10  # steps at the start and at the end whose mean losses are compared
COLUMNS = ("adapter", "precision", "steps", "first loss", "last loss", "scaler skips", "tokens/s", "seconds", "faults")


@dataclass(frozen=True)
class Finding:
    """One run. first, last: mean loss over the steps at either end. faults: what did not hold; empty when all did."""

    adapter: str
    precision: str
    steps: int
    first: float
    last: float
    scaler_skips: int
    tokens_per_second: float
    seconds: float
    faults: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        figures = (str(self.steps), f"{self.first:.3f}", f"{self.last:.3f}", str(self.scaler_skips))
        speed = (f"{self.tokens_per_second:,.0f}", f"{self.seconds:.0f}")
        return (self.adapter, self.precision, *figures, *speed, "; ".join(self.faults) or "none")


def run_config(
    base: Path, data: Path, output: Path, adapter: str, precision: str, max_samples: int | None = None, **changes: Any
) -> dict[str, Any]:
    """The config of one run as plain data."""
    config = {
        "stage": "sft",
        "model": str(base),
        "data": {"train": str(data), "max_samples": max_samples, "max_length": 512, "template": "alpaca"},
        "precision": precision,
        "batch": {"size": 16},
        "optim": {"lr": LEARNING_RATE[adapter]},
        "duration": "1 epoch",
        "output": str(output),
    }
    if adapter != "full":
        config["adapter"] = {"kind": adapter, "rank": 16, "alpha": 32}
    return config | changes


def examine(base: Path, output: Path, adapter: str, precision: str) -> Finding:
    """What a finished run left, held against what it should be. Commands are not run here."""
    rows = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    plan = json.loads((output / "plan.json").read_text(encoding="utf-8"))
    results = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
    finite = [loss for loss in losses if loss is not None]
    ends = max(1, min(ENDS, len(finite) // 2))  # the two stretches never overlap
    first, last = (sum(part) / len(part) for part in (finite[:ends], finite[-ends:]))
    faults = {
        f"{len(losses) - len(finite)} losses are not finite": len(finite) < len(losses),
        f"the loss does not fall: {first:.3f}, then {last:.3f}": not last < first,
        f"computed in {plan['plan']['precision']['compute']['value']}": (
            plan["plan"]["precision"]["compute"]["value"] != precision
        ),
        f"trained {plan['verified']['trainable_dtypes']}": plan["verified"]["trainable_dtypes"] != ["float32"],
        **reload_faults(base, output, adapter),
    }
    return Finding(
        adapter,
        precision,
        len(losses),
        first,
        last,
        results["scaler_skipped_steps"],
        results["steps_tokens_per_second"],
        results["steps_runtime"],
        tuple(what for what, wrong in faults.items() if wrong),
    )


def reload_faults(base: Path, output: Path, adapter: str) -> dict[str, bool]:
    """Load the run folder as anybody would, without surefoot: what -> whether it is wrong."""
    tokenizer = AutoTokenizer.from_pretrained(output)
    (checkpoint,) = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))[-1:]
    if adapter == "full":
        model: nn.Module = AutoModelForCausalLM.from_pretrained(output)
        loaded, saved = model.state_dict(), load_file(checkpoint / "model.safetensors")
    else:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), output)
        loaded, saved = get_peft_model_state_dict(model), load_file(checkpoint / "adapter_model.safetensors")
    with torch.no_grad():
        logits = model(**tokenizer("Give three tips for staying healthy.", return_tensors="pt")).logits
    same = saved.keys() <= loaded.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
    return {"reloaded weights differ": not same, "reloaded logits are not finite": not logits.isfinite().all()}


def run_all(base: Path, data: Path, folder: Path, max_samples: int | None) -> Iterator[Finding]:
    for adapter, precision in COMBINATIONS:
        output = folder / f"{adapter}-{precision}"
        path = output.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(run_config(base, data, output, adapter, precision, max_samples)))
        log = output.with_suffix(".txt")
        started = time.perf_counter()
        for command in (["train", str(path)], ["verify", str(output)]):
            if code := surefoot(command, log):
                sys.exit(f"surefoot {' '.join(command)}: exit {code}\n{log.read_text(encoding='utf-8')[-4000:]}")
        finding = examine(base, output, adapter, precision)
        print(f"{adapter} {precision}: {time.perf_counter() - started:.0f} s in all", file=sys.stderr, flush=True)
        yield finding


def surefoot(arguments: Sequence[str], log: Path) -> int:
    """The command in a process of its own; what it prints goes to `log`."""
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, "-m", "surefoot", *arguments]
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode


def table(findings: Sequence[Finding]) -> str:
    """As Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(finding.cells() for finding in findings)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--max-samples", type=int, help="only the first N records")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256, help="width; a multiple of 64")
    parser.add_argument("--keep", type=Path, help="leave base, configs and runs here; a new folder")
    options = parser.parse_args()
    if not options.data.is_file():
        sys.exit(f"{options.data}: no such file; name an alpaca .json with --data")
    disable_progress_bar()
    texts = [" ".join(map(str, row.values())) for row in json.loads(options.data.read_text(encoding="utf-8"))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        build_base(folder / "base", texts, Shape(options.layers, options.hidden))
        findings = list(run_all(folder / "base", options.data, folder, options.max_samples))
    print(table(findings))
    sys.exit(1 if any(finding.faults for finding in findings) else 0)


if __name__ == "__main__":
    main()
