"""The same faults against HF Trainer + PEFT, LLaMA-Factory and surefoot: what each does and says, as a table.

    python benchmarks/faults_elsewhere.py --work FOLDER [--trainer PYTHON] [--llamafactory PYTHON] [--rows WORD]
                                          [--out FILE.json]

Prints how often each kind of outcome came, and every outcome. A random Llama of two layers, twelve records, six steps
on the CPU, a checkpoint after every second one; what comes of a fault is held against the side's own run that nothing
disturbed. Rows: fault_inputs.py and fault_stops.py. `named`: the output, a traceback included but no line marked as
information, has what a user needs to find the fault. --trainer needs datasets beside transformers and peft.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from bases import Shape, build_base
from fault_child import HANGS
from fault_inputs import INPUTS
from fault_rows import Row
from fault_sides import Side, llamafactory, surefoot, trainer
from fault_stops import STOPS
from fault_trial import WEIGHTS, Outcome, Server, Trial, in_words

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
RECORDS = [
    {"instruction": f"Say {word} {count} times.", "input": "", "output": " ".join([word] * count)}
    for word in ("one", "two", "heron", "sky")
    for count in (1, 2, 4)
]


def make_start(folder: Path) -> Path:
    """What every trial begins with."""
    start = folder / "start"
    if not start.exists():
        (start / "base").mkdir(parents=True)
        build_base(start / "base", [json.dumps(record) for record in RECORDS], Shape(2, 64, 400))
        (start / "base" / "chat_template.jinja").write_text(TEMPLATE)
        (start / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
        (start / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "train.jsonl"}}))
    return start


def outcomes(side: Side, rows: list[Row], folder: Path) -> Iterator[Outcome]:
    start, own = make_start(folder), folder / side.child
    server = Server(side, folder)
    undisturbed = Trial(side, own / "undisturbed", start, server)
    undisturbed.train()
    broken_off = Trial(side, own / "broken-off", start, server)
    broken_off.train(at="step", n=5, do="kill")
    if undisturbed.codes != [0] or broken_off.codes != [-9]:
        raise SystemExit(f"{side.name}: {undisturbed.codes}, {broken_off.codes}\n{undisturbed.output()[-3000:]}")
    ended = undisturbed.folder / WEIGHTS
    for number, row in enumerate(rows, 1):
        trial = Trial(side, own / f"{number:02d}", start, server, ended, broken_off.folder)
        row.act(trial)
        yield trial.outcome(row.fault, row.says)
    server.close()


KINDS = {
    "went on for ever": lambda one: HANGS in one.codes,
    "the end of the undisturbed run": lambda one: one.codes[-1] == 0 and one.end == "same",
    "said what is wrong, without a traceback": lambda one: one.named and not one.traceback,
    "a traceback that names it": lambda one: one.named and one.traceback,
    "a traceback that does not": lambda one: one.traceback,
    "exit 0, other weights or NaN, nothing said": lambda one: one.codes[-1] == 0,
    "another exit code, nothing said": lambda one: True,
}


def counts(found: list[Outcome], sides: list[Side]) -> str:
    """How many outcomes of a side are of each kind: the first one that fits."""
    lines = [f"| | {' | '.join(side.name for side in sides)} |", "|---" * (len(sides) + 1) + "|"]
    kinds = [(one.side, next(kind for kind, fits in KINDS.items() if fits(one))) for one in found if one.codes]
    lines += [f"| {kind} | {' | '.join(str(kinds.count((side.name, kind))) for side in sides)} |" for kind in KINDS]
    return "\n".join(lines)


def table(found: list[Outcome], rows: list[Row], sides: list[Side]) -> str:
    cells = {(one.fault, one.side): in_words(one) for one in found}
    lines = [f"| fault | what would be right | {' | '.join(side.name for side in sides)} |"]
    lines.append("|---" * (len(sides) + 2) + "|")
    for row in rows:
        own = " | ".join(cells.get((row.fault, side.name), "not run") for side in sides)
        lines.append(f"| {row.fault} | {row.ideal} | {own} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--trainer", help="interpreter that has transformers, peft and datasets")
    parser.add_argument("--llamafactory", help="interpreter that has llamafactory")
    parser.add_argument("--rows", default="", help="only faults with this word")
    parser.add_argument("--out", type=Path, help="raw outcomes, as JSON")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    sides = [make(python) for make, python in ((trainer, asked.trainer), (llamafactory, asked.llamafactory)) if python]
    sides.append(surefoot(sys.executable))
    rows = [row for row in (*INPUTS, *STOPS) if asked.rows in row.fault]
    found = []
    for side in sides:
        for one in outcomes(side, rows, asked.work.resolve()):
            print(f"{side.name}: {one.fault}: {in_words(one)}", file=sys.stderr, flush=True)
            found.append(one)
    if asked.out:
        asked.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print(counts(found, sides), table(found, rows, sides), sep="\n\n")


if __name__ == "__main__":
    main()
