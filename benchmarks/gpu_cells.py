"""What `peers.py` is to compare on one GPU, an H200 by its numbers: what each cell should show, and its minutes.

    python benchmarks/gpu_cells.py --list                           what there is, what is expected; needs no GPU
    python benchmarks/gpu_cells.py 8b-lora [--keep worlds] [--minutes 8.5] [--liger PYTHON] [--unsloth PYTHON]
    python benchmarks/gpu_cells.py                                  all of them, in turn

One cell is one call of `peers.py` with all sides, which begins no turn that would outlast `--minutes`; who is left out
is told. With `--keep`, a second call has base, examples and reference already: for another round, or with `--sides` for
those that were left out. A cell leaves CELL.json in the folder of `--results`.

What is expected is no measurement. The limit of a cell is that of its matrix products at 788 TFLOP/s (8192^3, bf16,
random data) and of everything else, as fused operators read and write it, at 4.3 TB/s (a copy within the device), which
were measured on an H200; the minutes assume that a side reaches two fifths of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bases import SIZES, Shape, moved_bytes, write_config
from peer_sides import reference_of, sides
from peer_world import config_text, texts_of, world_records
from peers import arguments, parity_steps
from surefoot.config.load import load_config
from surefoot.families.model_facts import ModelFacts
from surefoot.methods.examples import prepare_examples
from surefoot.models.facts import facts_of
from surefoot.planning.limits import Work, step_flops, work_of
from surefoot.planning.plan import AdapterPlan, RunPlan
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.make_plan import make_plan
from surefoot.runs.plan_with_data import lengths_of
from surefoot.system import hardware
from surefoot.system.messages import size_text

PRODUCTS = 788e12  # FLOP/s
COPIES = 4.3e12  # bytes read and written per second
# Of the minutes, all of them guesses: seconds until a side has imported and set up what it needs, and until a compiled
# one begins; bytes a second at which a base is read, checked and sent to the device; the share of the limit that a side
# reaches; FLOP/s of fp32 products.
_START, _COMPILING, _READING, _REACHED, _PLAIN_PRODUCTS = 25.0, 120.0, 1e9, 0.4, 45e12
_DIALOGUES = ["--league", "tuned", "--template", "vicuna", "--length", "2048"]
_FIXED = ["--league", "equal", "--length", "4096", "--rank", "16", "--micro", "2", "--batch", "8"]


@dataclass(frozen=True)
class Cell:
    """words: of `peers.py`. data: file in the folder of `--data-folder`. aim: what it should show."""

    words: Sequence[str]
    data: str
    aim: str


CELLS = {
    "8b-lora": Cell(
        ["--size", "8b", "--adapter", "lora", *_FIXED],
        "alpaca_en_demo.json",
        "17,000 tokens/s, and ahead of HF + Liger",
    ),
    "8b-dora": Cell(
        ["--size", "8b", "--adapter", "dora", *_FIXED], "alpaca_en_demo.json", "within 5 % of the tokens/s of 8b-lora"
    ),
    "8b-lora-dialogues": Cell(
        ["--size", "8b", "--adapter", "lora", *_DIALOGUES, "--batch", "32"],
        "sharegpt_multiturn_200.json",
        "ahead of every peer",
    ),
    "8b-dora-dialogues": Cell(
        ["--size", "8b", "--adapter", "dora", *_DIALOGUES, "--batch", "32"],
        "sharegpt_multiturn_200.json",
        "within 5 % of the tokens/s of 8b-lora-dialogues",
    ),
    "1b-lora-short": Cell(
        ["--size", "1b", "--adapter", "lora", "--league", "tuned", "--rank", "16", "--batch", "32"],
        "alpaca_en_demo.json",
        "ahead of every peer where small operators are waited for",
    ),
    "1b-lora": Cell(
        ["--size", "1b", "--adapter", "lora", "--league", "equal", "--length", "2048", "--rank", "16", "--batch", "32"],
        "alpaca_en_demo.json",
        "ahead of every peer, the compiled one among them",
    ),
    "1b-full-dialogues": Cell(
        ["--size", "1b", "--adapter", "full", *_DIALOGUES, "--batch", "32"],
        "sharegpt_multiturn_200.json",
        "ahead of every peer",
    ),
}
_ENVIRONMENTS = ("liger", "unsloth", "trl", "llamafactory")
_STEPS = ["--device", "cuda", "--steps", "8", "--rounds", "1"]


@dataclass(frozen=True)
class Expected:
    """Of one cell. tokens: of a step. limit: tokens/s. plan: surefoot's for the machine. names: of the sides. minutes:
    of the whole call. least: minutes until base, reference and surefoot's own turn are done. memory: bytes that
    surefoot's own run and the reference need on the device, the larger of both. disk: bytes of the base."""

    tokens: float
    flops: float
    limit: float
    plan: RunPlan
    names: tuple[str, ...]
    minutes: float
    least: float
    memory: int
    disk: int


def words_of(cell: Cell, folder: Path) -> list[str]:
    return [*cell.words, *_STEPS, "--data", str(folder / cell.data)]


def asked_of(words: Sequence[str]) -> Namespace:
    """The words as `peers.py` reads them."""
    parser = arguments()
    parser.add_argument("--rounds", type=int)
    return parser.parse_args(list(words))


def seconds_per_token(model: ModelFacts, shape: Shape, work: Work, adapter: AdapterPlan | None) -> float:
    """At the limit."""
    return step_flops(model, work, adapter).needed / work.tokens / PRODUCTS + moved_bytes(shape) / COPIES


def expected(asked: Namespace, machine: hardware.Hardware | None = None) -> Expected:
    """By the plan for a machine, an H200 where none is named. Config and tokenizer of the base are made for it; weights
    are not."""
    shape, machine = SIZES[asked.size], machine or hardware.preset("h200")
    records = json.loads(asked.data.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        own = Path(temporary)
        write_config(own / "base", [" ".join(texts_of(record)) for record in records], shape)
        (own / "data.json").write_text(json.dumps(world_records(asked, own / "base", records)))
        (own / "run.yaml").write_text(config_text(own, asked))
        config = load_config(own / "run.yaml", [] if asked.micro is None else [f"batch.micro={asked.micro}"]).config
        tokens = make_plan(config, hardware=machine, measure=False).tokenizer
        prepared = prepare_examples(config, tokens, planned_tokenizer(own / "base", tokens))
        measured = lengths_of(config, prepared)
        plan = make_plan(config, hardware=machine, lengths=measured, measure=False)
        plainest = load_config(own / "run.yaml", reference_of(asked.size).settings["overrides"]).config
        reference = make_plan(plainest, hardware=machine, lengths=measured, measure=False)
        model = facts_of(own / "base")
        lengths, learned = prepared.train.lengths, prepared.train.supervised_counts
    work = work_of((int(length) for length in lengths), int(np.sum(learned)))
    seconds = seconds_per_token(model, shape, work, plan.adapter)
    step = work.tokens / len(lengths) * asked.batch
    flops = step_flops(model, work, plan.adapter).needed / work.tokens
    found = sides(asked, int(lengths.max()), has=lambda python, package: True, say=lambda text: None)
    base = 2 * sum(module.parameters for module in model.modules)
    load = _START + base / _READING
    turn = load + asked.steps * step * seconds / _REACHED
    compiling = _COMPILING * sum("compiled" in side.name for side in found)
    # Base and examples; the plain path in fp32, which runs its layers once more; each side's turns.
    before = 2 * load + 2 * base / _READING + parity_steps(asked) * step * 1.5 * flops / _PLAIN_PRODUCTS
    whole = before + asked.rounds * (len(found) * turn + compiling)
    names, memory = tuple(side.name for side in found), max(plan.memory.total, reference.memory.total)
    return Expected(step, flops, 1 / seconds, plan, names, whole / 60, (before + turn) / 60, memory, base)


def told(name: str, cell: Cell, one: Expected) -> str:
    memory = one.plan.memory
    again = ", layers computed again" if memory.gradient_checkpointing.value else ""
    return (
        f"{name}: {one.tokens:,.0f} tokens a step, {one.flops / 1e9:.1f} GFLOP a token; "
        f"limit {one.limit:,.0f} tokens/s\n"
        f"  aim: {cell.aim}; surefoot plans {size_text(memory.total)}{again}\n"
        f"  {len(one.names)} sides where all is installed: {'; '.join(one.names)}\n"
        f"  some {one.minutes:.0f} minutes by the guesses above, at most those of --minutes and one turn\n"
        f"  python benchmarks/peers.py {' '.join([*cell.words, *_STEPS, '--data', cell.data])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"Of {', '.join(CELLS)}; all where none is named.")
    parser.add_argument("--list", action="store_true", help="Only tell what is expected.")
    parser.add_argument("--data-folder", type=Path, default=Path("../shared/data/instruct"))
    parser.add_argument("--keep", type=Path, default=Path("build/worlds"), help="Where bases and examples are kept.")
    parser.add_argument("--results", type=Path, default=Path("build"), help="Where CELL.json is left.")
    parser.add_argument("--minutes", default="8.5", help="Of one cell: no turn begins that would outlast them.")
    parser.add_argument("--sides", nargs="+", default=[], metavar="WORDS", help="As of peers.py.")
    for name in _ENVIRONMENTS:
        parser.add_argument(f"--{name}", metavar="PYTHON", help="As of peers.py.")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.cells) - set(CELLS)):
        sys.exit(f"no cell {unknown[0]!r}; there are {', '.join(CELLS)}")
    asked.results.mkdir(parents=True, exist_ok=True)
    others = [word for name in _ENVIRONMENTS if getattr(asked, name) for word in (f"--{name}", getattr(asked, name))]
    if asked.sides:
        others += ["--sides", *asked.sides]
    for name in asked.cells or CELLS:
        words = words_of(CELLS[name], asked.data_folder)
        print(told(name, CELLS[name], expected(asked_of([*words, *others]))), flush=True)
        if asked.list:
            continue
        more = ["--keep", str(asked.keep), "--minutes", asked.minutes, "--json", str(asked.results / f"{name}.json")]
        script = str(Path(__file__).with_name("peers.py"))
        subprocess.run([sys.executable, script, *words, *others, *more], check=True)


if __name__ == "__main__":
    main()
