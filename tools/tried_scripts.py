"""Take over public training scripts with `surefoot run`, each in a small world, and say what becomes of them.

    python tools/tried_scripts.py trl/examples peft/examples "a notebook.ipynb"
    python tools/tried_scripts.py --old build/old --json tried.json alpaca-lora        # transformers 4.46, TRL 0.12

Read are Python files that build a Trainer and call train(), the cells of notebooks up to there, and blocks of pages.
Nothing in them is changed but the words in `tried_world/reading.py`, which replace a GPU and paths of other machines.
The script's Python sees `tried_world/child`: data sets of a few dozen rows with the columns of the real ones, two steps
of at most two rows, and no tracker; and the hub `tried_world/hub.py`, whose models are tiny random ones of the real
families. What was replaced is in the JSON. A fate is one of trained, refused (by surefoot, whose line is the reason),
itself (the script ended before train(), its last line is the reason), outside (not run: it trains no language model of
texts, or needs a GPU by its library), slow, other.

Scripts run as they are, so they can do whatever they do: run them where that is harmless.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from tried_world.hub import serve  # noqa: E402
from tried_world.reading import Script, read_folder, required  # noqa: E402

WORK, CHILD = ROOT / "build" / "tried", ROOT / "tools" / "tried_world" / "child"
FATES = ("trained", "refused", "itself", "outside", "slow", "other")
_SAME = re.compile(r"on (\d+) rows: loss (\S+) and (\S+), gradient norm (\S+) and (\S+)")
_PROMPTS = re.compile(r"the first (\d+) prompts have the tokens")
_TAKEN = re.compile(r"taken over from (\w+)")
_RANKS = ("trained", "refused", "slow", "other", "itself", "outside")
_HEAD = """\
# Public training scripts, taken over

`surefoot run -- python SCRIPT` ([take-over](../take-over.md)) on scripts, notebooks up to `train()`, and code blocks of
pages, as `tools/tried_scripts.py` wrote it down. Each sees a tiny random model of the family that it names, some two
dozen rows with the columns of its data set, two steps of at most two rows, and a CPU: quantization, bf16 and
FlashAttention are left out. Losses and gradient norms are those of the comparison before step 1, in fp32.

**trained**: to the end. **refused**: by surefoot, whose line is the reason. **itself**: the script ended before
`train()`, its last line is the reason; most often its libraries are of another version, or it needs what the small
world has not. **outside**: not run, since it trains no language model of texts or needs a GPU by its library. Where
several environments were tried, the better fate counts.""".splitlines()
_PLACE = re.compile(r"(?<![\w:/.])/(?:[\w.+-]+/)+(?=[\w.+-]+/[\w.+-]+)")  # of this machine, before a file
_TRIES = 3  # a parser may name what it requires only one by one


@dataclass
class Tried:
    """One script.

    name: its file, with the number of the block in a page. arguments: of its command line.
    versions: of transformers, TRL and PEFT that it saw.
    rows: compared before step 1. loss, norm: (surefoot's, the script's). replaced: what the world changed.
    """

    name: str
    fate: str = "other"
    reason: str = ""
    trainer: str = ""
    arguments: list[str] = field(default_factory=list)
    rows: int = 0
    loss: tuple[float, ...] = ()
    norm: tuple[float, ...] = ()
    prompts: int = 0
    replaced: list[str] = field(default_factory=list)
    after: str = ""
    versions: str = ""

    @property
    def apart(self) -> float:
        """Largest relative difference of the two losses and the two norms, as printed."""
        return max((abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in (self.loss, self.norm)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="take over training scripts in a small world")
    parser.add_argument("paths", nargs="+", type=Path, help="folders and files")
    parser.add_argument("--packages", default="", help="folders of packages for the scripts, separated by colons")
    parser.add_argument("--only", default="", help="pattern of names")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each script")
    parser.add_argument("--json", type=Path, help="write the results there; those that it has are not tried again")
    parser.add_argument("--again", default="", help="of those, try these fates again, separated by commas")
    parser.add_argument(
        "--best", type=Path, nargs="*", default=[], help="results with other packages: the best fate counts"
    )
    parser.add_argument("--table", type=Path, help="write every script's fate there, as Markdown")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for the runs")
    args = parser.parse_args()
    if absent := [str(path) for path in args.paths if not path.exists()]:
        parser.error(f"no such file or folder: {', '.join(absent)}")
    known = [Tried(**one) for one in json.loads(args.json.read_text())] if args.json and args.json.is_file() else []
    scripts = [one for path in args.paths for one in read_folder(path) if re.search(args.only, one.name)]
    names, again = {one.name for one in scripts}, args.again.split(",")
    known = [one for one in known if not (one.name in names and one.fate in again)]
    scripts = [one for one in scripts if one.name not in {one.name for one in known}]
    with serve(args.work / "models") as address, ThreadPoolExecutor(args.jobs) as pool:
        world = World(args.work, address, _absolute(args.packages), args.limit)
        for done in pool.map(world.tried, scripts):
            print(line(done), flush=True)
            known.append(done)
            if args.json:
                args.json.write_text(json.dumps([asdict(one) for one in known], indent=1, ensure_ascii=False))
    for path in args.best:
        known = best(known, [Tried(**one) for one in json.loads(path.read_text())])
    print("\n".join(report(known)))
    if args.table:
        args.table.write_text("\n".join(table(known, args.paths)) + "\n")


def _absolute(packages: str) -> str:
    return ":".join(str(Path(one).absolute()) for one in packages.split(":") if one)


@dataclass
class World:
    """What scripts run in.

    work: folder for the runs. address: of the hub. packages: folders that precede the Python's own.
    limit: seconds for each script.
    """

    work: Path
    address: str
    packages: str
    limit: float

    @cached_property
    def versions(self) -> str:
        found = {one.name: one.version for one in distributions(path=[*self.packages.split(":"), *sys.path])}
        first = {one.name: one.version for one in distributions(path=self.packages.split(":"))}
        return " ".join(f"{name} {(found | first)[name]}" for name in ("transformers", "trl", "peft"))

    def tried(self, script: Script) -> Tried:
        """Run one script until it is trained, or its fate is clear."""
        tried = Tried(script.name, arguments=list(script.arguments), versions=self.versions)
        if script.fault:
            tried.fate, tried.reason = "outside", script.fault
            return tried
        for _ in range(_TRIES):
            said = self._run(script, tried)
            missing = required(said) if tried.fate == "itself" else []
            if not missing or all(word in tried.arguments for word in missing):
                break
            tried.arguments += missing
        return tried

    def _run(self, script: Script, tried: Tried) -> str:
        """Run the script once, and read its fate from what was printed. Returns that."""
        place = self.work / re.sub(r"\W+", "_", script.name)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "script.py").write_text(script.text)
        script.write_files(place, tried.arguments)
        script.link_files(place)
        python = self._python(place, script)
        starts = [str(python)] if not script.launched else [str(python.with_name("torchrun")), "--nproc_per_node=1"]
        command = [sys.executable, "-m", "surefoot", "run", "--", *starts, "script.py", *tried.arguments]
        nobody = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(place / "said.txt", "w") as output:
            process = subprocess.Popen(
                command,
                cwd=place,
                env={**os.environ, **nobody},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(self.limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = None
        said = (place / "said.txt").read_text(errors="replace")
        replaced = place / "replaced.txt"
        tried.replaced = [
            *script.replaced,
            *(dict.fromkeys(replaced.read_text().splitlines()) if replaced.is_file() else ()),
        ]
        judge(tried, said, code)
        return said

    def _python(self, place: Path, script: Script) -> Path:
        """Write a Python that sees the small world."""
        path = ":".join(map(str, (CHILD, *filter(None, [self.packages]), *script.imports)))
        variables = {
            "PYTHONPATH": path,
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(self.work / f"cache-{bool(self.packages)}"),
            "HF_TOKEN": "hf_x",
            "HF_HUB_DISABLE_XET": "1",
            "TRIED_WORLD_SAID": str(place / "replaced.txt"),
            "TRIED_WORLD_SCRIPT": str(place / "script.py"),
            "MPLBACKEND": "agg",
            "WANDB_MODE": "disabled",
        }
        python = place / "bin" / "python"
        python.parent.mkdir()
        exports = "\n".join(f"export {name}='{value}'" for name, value in variables.items())
        python.write_text(f'#!/bin/sh\n{exports}\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        python.with_name("torchrun").symlink_to(python)  # only its folder is read
        return python


def judge(tried: Tried, said: str, code: int | None) -> None:
    """Read a script's fate from what surefoot and the script printed. code: surefoot's, None if it ran out of time."""
    lines = [one for one in said.splitlines() if one.strip()]
    faults = [one for one in lines if one.startswith("error: ")]
    if taken := _TAKEN.search(said):
        tried.trainer = taken[1]
    if same := _SAME.search(said):
        tried.rows = int(same[1])
        tried.loss, tried.norm = (float(same[2]), float(same[3])), (float(same[4]), float(same[5]))
    if prompts := _PROMPTS.search(said):
        tried.prompts = int(prompts[1])
    if " goes on after train()" in said:
        tried.fate, tried.reason = "trained", ""
        tried.after = _last(lines) if code else ""
    elif code is None:
        tried.fate, tried.reason = "slow", "taken over" if taken else "before train()"
    elif faults and "before it called Trainer.train()" in faults[-1]:
        tried.fate, tried.reason = "itself", _last(lines[: lines.index(faults[-1])])
    elif faults:
        tried.fate, tried.reason = "refused", " | ".join(one.removeprefix("error: ") for one in faults)
    else:
        tried.reason = _last(lines)


def _last(lines: list[str]) -> str:
    """Return the last line of a script's error."""
    errors = [one for one in lines if re.match(r"^[\w.]*(Error|Exception|Exit|Interrupt)\b|.*: error: ", one)]
    return (errors or lines or [""])[-1].strip()[:300]


def best(tried: list[Tried], others: list[Tried]) -> list[Tried]:
    """Return each script's better result."""
    found = {one.name: one for one in others}
    for one in tried:
        if one.name not in found or _RANKS.index(one.fate) <= _RANKS.index(found[one.name].fate):
            found[one.name] = one
    return sorted(found.values(), key=lambda one: one.name)


def table(tried: list[Tried], folders: list[Path]) -> list[str]:
    """Return a page with a table for each folder, which is OWNER+NAME and has its commit in the file .commit."""
    counts = Counter(one.fate for one in tried)
    lines = [
        *_HEAD,
        "",
        f"{len(tried)} scripts: " + ", ".join(f"{counts[fate]} {fate}" for fate in FATES if counts[fate]),
    ]
    for folder in folders:
        commit = (folder / ".commit").read_text().strip()[:7] if (folder / ".commit").is_file() else ""
        own = [one for one in tried if one.name.startswith(f"{folder.as_posix()}/")]
        counts = Counter(one.fate for one in own)
        lines += ["", f"## {folder.name.replace('+', '/')} {commit}".rstrip(), ""]
        lines += [", ".join(f"{counts[fate]} {fate}" for fate in FATES if counts[fate]), ""]
        lines += [
            "| script | fate | with | loss here, there | gradient norm here, there | reason |",
            "|---|---|---|---|---|---|",
        ]
        for one in own:
            pairs = [", ".join(f"{value:.6g}" for value in pair) for pair in (one.loss, one.norm)]
            reason = _PLACE.sub("", one.reason).replace("|", "/").replace("`", "'").replace("<", "&lt;")[:160]
            cells = (
                one.name.removeprefix(f"{folder.as_posix()}/"),
                one.fate,
                one.versions.split(" trl")[0],
                *pairs,
                reason,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def line(one: Tried) -> str:
    found = f"loss {one.loss[1]:.6g}, apart {one.apart:.1e}" if one.loss else one.reason
    return f"{one.fate:<8} {one.name}: {found}"


def report(tried: list[Tried]) -> list[str]:
    counts = Counter(one.fate for one in tried)
    lines = [f"{len(tried)} scripts: " + ", ".join(f"{counts[fate]} {fate}" for fate in FATES)]
    trainers = Counter(one.trainer for one in tried if one.fate == "trained")
    lines.append("trained: " + ", ".join(f"{count} {name}" for name, count in trainers.most_common()))
    worst = max((one for one in tried if one.loss and one.fate == "trained"), key=lambda one: one.apart, default=None)
    lines += [f"largest difference: {worst.apart:.1e} ({worst.name})"] if worst else []
    for fate in FATES[1:]:
        reasons = Counter(re.sub(r"'[^']*'|\d+", "…", one.reason)[:160] for one in tried if one.fate == fate)
        lines += [f"{fate}:"] if reasons else []
        lines += [f"{count:>5}  {reason}" for reason, count in reasons.most_common(40)]
    return lines


if __name__ == "__main__":
    main()
