"""Everything that is asked of a GPU, in the minutes that are given, as one page and one JSON file.

    make gpu-report                                   30 minutes on the GPU that torch sees
    make gpu-report REPORT="--minutes 90"             more; a second call goes on where the first ended
    make gpu-report REPORT=--rehearse                 all parts in small, on a pretend GPU, on any machine

Parts, in this order: the machine, the tests that need a GPU, probes, cuDNN's shapes, runs beside their plain fp32
path with a death and a resume in each, memory, comparisons with other trainers. Each part is a process and leaves
parts/NAME.json in the folder of --out; report.html and report.json are written anew after each. A part that was done or
failed is not repeated, but with --again NAME; what the time did not allow, the next call does. What was left out is
named with the reason.

Besides torch it takes surefoot's own dependencies and pytest, which are looked for before anything begins. Texts to
train on are this repository's own pages, weights are random: nothing is downloaded, and nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from importlib import metadata, util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
for _folder in (HERE, ROOT / "src", ROOT / "tests"):
    sys.path.insert(0, str(_folder))

from gpu_page import write_page  # noqa: E402 (found through the lines above)
from gpu_parts import PARTS, Call, read, run_part  # noqa: E402

_TESTS = ("pytest", "hypothesis", "yaml")  # what the tests import besides
_PEERS = {
    "liger_kernel": "HF + Liger, and surefoot with its kernels",
    "flash_attn": "HF with FlashAttention",
    "unsloth": "Unsloth",
}
_DISK = 2 << 30  # bytes; cells with a large base ask for theirs
_FINISHED = ("done", "failed")


def main() -> None:
    asked = arguments().parse_args()
    if unknown := sorted({*asked.only, *asked.again} - {part.name for part in PARTS}):
        sys.exit(f"no part {unknown[0]!r}; there are {', '.join(part.name for part in PARTS)}")
    missing, notes = needs(asked.rehearse)
    if missing:
        sys.exit("\n".join(["missing, so nothing was begun:", *missing]))
    if asked.rehearse and "PRETEND_GPU_LIBRARY" not in os.environ:
        on_the_pretend_gpu()
    asked.out = asked.out or ROOT / "build" / ("gpu-rehearsal" if asked.rehearse else "gpu-report")
    (asked.out / "parts").mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(asked.out).free < _DISK:
        sys.exit(f"{asked.out}: less than {_DISK >> 30} GiB of disk are free there")
    identity = this_identity(asked.rehearse)
    keep_to(asked.out / "identity.json", identity)
    print("\n".join(notes), flush=True)
    call = Call(asked.out, asked.rehearse, time.monotonic() + 60 * asked.minutes, asked.data_folder, peers(asked))
    parts = [part for part in PARTS if not asked.only or part.name in asked.only]
    for part in parts:
        known = read(call, part)
        if known and known["state"] in _FINISHED and part.name not in asked.again:
            print(f"{part.name}: {known['state']} before", flush=True)
            continue
        try:
            told = run_part(call, part)
        except KeyboardInterrupt:  # its process is ended, and what it did is not kept
            page = finish(call, identity, notes)
            sys.exit(f"{part.name}: interrupted; {page} has what was done, and the same command again goes on")
        print(
            f"{part.name}: {told['state']}, {told['seconds']:.0f} s{': ' * bool(told['why'])}{told['why']}", flush=True
        )
        finish(call, identity, notes)
    page = finish(call, identity, notes)
    open_ = [part.name for part in PARTS if (read(call, part) or {"state": ""})["state"] not in _FINISHED]
    if asked.rehearse:  # one cell stands for all
        open_ = [name for name in open_ if not name.startswith("cell-")]
    print(f"{page}\n{page.with_suffix('.json')}{'' if asked.rehearse else ': attach both to an issue'}")
    if open_:
        print(f"open: {', '.join(open_)}; the same command again goes on there")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="No part begins or goes on beyond them.")
    parser.add_argument("--rehearse", action="store_true", help="In small, on the pretend GPU; figures mean nothing.")
    parser.add_argument("--out", type=Path, help="Where parts, page and JSON go; build/gpu-report unless named.")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=f"Of {', '.join(p.name for p in PARTS)}.")
    parser.add_argument("--again", nargs="+", default=[], metavar="PART", help="Repeat these, whatever is there.")
    parser.add_argument("--data-folder", type=Path, help="With the files that benchmarks/gpu_cells.py names.")
    for name in ("liger", "unsloth", "trl", "llamafactory"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help="As of benchmarks/peers.py.")
    return parser


def needs(rehearse: bool) -> tuple[list[str], list[str]]:
    """(what is missing, what can do without), a line each, with what to do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = [f"- {line} (pip install '{line}')" for line in project["dependencies"] if not _is_installed(line)]
    missing += [f"- {name}, which the tests import" for name in _TESTS if util.find_spec(name) is None]
    if missing:
        return missing, []
    import torch

    if rehearse:
        from helpers import pretend_gpu

        missing = [f"- a pretend GPU: {why}"] if (why := pretend_gpu.obstacle()) else []
    elif not torch.cuda.is_available():
        missing = [f"- a GPU that torch {torch.__version__} sees; --rehearse runs all parts in small without one"]
    notes = [f"without {who}: {name} is not installed here" for name, who in _PEERS.items() if not util.find_spec(name)]
    return missing, notes


def _is_installed(line: str) -> bool:
    """line: NAME>=VERSION."""
    name, _, least = line.partition(">=")
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    numbers = [[int(part) for part in text.split("+")[0].split(".") if part.isdigit()] for text in (found, least)]
    return numbers[0] >= numbers[1]


def on_the_pretend_gpu() -> None:
    """Begin this program again, where torch sees the pretend GPU."""
    from helpers import pretend_gpu

    words = [sys.executable, str(HERE), *sys.argv[1:]]
    os.execve(sys.executable, words, pretend_gpu.environment())


def this_identity(rehearse: bool) -> dict[str, str]:
    """What all results of a folder have in common."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "device": torch.cuda.get_device_properties(0).name,
        "torch": str(torch.__version__),
        "surefoot": commit.strip() or "without a commit",
        "kind": "rehearsal" if rehearse else "measurement",
    }


def keep_to(path: Path, identity: dict[str, str]) -> None:
    """Parts of two machines are no report."""
    if not path.is_file():
        path.write_text(json.dumps(identity, indent=1) + "\n")
        return
    known = json.loads(path.read_text())
    other = [f"{key} {known[key]}, now {value}" for key, value in identity.items() if known[key] != value]
    if other:
        sys.exit(f"{path.parent} has results of another kind ({'; '.join(other)}): name another --out, or delete it")


def peers(asked: argparse.Namespace) -> tuple[str, ...]:
    """Words for peers.py."""
    named = [name for name in ("liger", "unsloth", "trl", "llamafactory") if getattr(asked, name)]
    return tuple(word for name in named for word in (f"--{name}", getattr(asked, name)))


def finish(call: Call, identity: dict[str, str], notes: list[str]) -> Path:
    """Write report.json and report.html of what there is."""
    unknown = {"state": "left out", "why": "not begun yet", "seconds": 0.0, "found": None, "log": []}
    found: dict[str, Any] = {"format": 1, "identity": identity, "notes": notes, "parts": {}}
    for part in PARTS:
        found["parts"][part.name] = {"what": part.shown(call.rehearse)} | (read(call, part) or unknown)
    text = json.dumps(found, indent=1).replace(str(ROOT), ".").replace(str(Path.home()), "~")
    (call.out / "report.json").write_text(text + "\n", encoding="utf-8")
    page = call.out / "report.html"
    try:
        write_page(page, json.loads(text))
    except Exception as error:  # minutes of a GPU are worth more than its page, which a later call can write
        print(f"{page} was not written: {type(error).__name__}: {error}", flush=True)
    return page


if __name__ == "__main__":
    main()
