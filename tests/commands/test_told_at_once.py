"""A wrong value of an option is one line, before torch is imported and a model opened: that takes seconds."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiny_models import tiny_llama

_MANY = "99999"
_NO_ROOM = "--max-new-tokens: 512 and a prompt are more than the model's 512 positions"
CASES = {
    "capture BASE --out out --layers 0,9": "--layers: there is no layer 9: this model has layers 0 to 1",
    "capture BASE --out out --layers x": "--layers: 'x' is neither a layer's number nor a range such as 5-7",
    "capture BASE --out out --seq-len 513": "--seq-len: 513 is more than the model's 512 positions",
    "capture BASE --out out --text empty.txt": "empty.txt: is empty",
    "capture LONG --out out --attention --seq-len 60000": "--attention: the maps of one layer would take",
    f"evaluate loss BASE rows.json --max-length {_MANY}": f"--max-length: {_MANY} is more than the model's 512",
    "evaluate loss BASE rows.json --only adapter": "--only: asks for an adapter, and there is none",
    "evaluate loss BASE rows.json --template none": "--template: unknown template 'none'",
    "evaluate loss BASE rows.json --out rows.json/x": "rows.json/x: cannot be written",
    f"evaluate reward BASE rows.json --max-length {_MANY}": f"--max-length: {_MANY} is more than the model's 512",
    "evaluate reward BASE rows.json --out rows.json/x": "rows.json/x: cannot be written",
    "evaluate norms BASE --data rows.json --template none": "--template: unknown template 'none'",
    "evaluate norms BASE --out rows.json/x": "rows.json/x: cannot be written",
    "evaluate harness BASE --tasks arc_easy --only adapter": "--only: asks for an adapter, and there is none",
    "evaluate harness BASE --tasks ,": "--tasks: names no task",
    "evaluate commonsense BASE --data . --template none": "--template: unknown template 'none'",
    "evaluate commonsense BASE --data . --only adapter": "--only: asks for an adapter, and there is none",
    "evaluate commonsense BASE --data . --sets none": "--sets: there is no set 'none'",
    "generate BASE --prompt hi --max-new-tokens 512": _NO_ROOM,
    "chat BASE --max-new-tokens 512": _NO_ROOM,
    "export BASE --out out --merge": "is a whole model, so there is nothing to merge",
    "export OVER --out out --gguf": "--gguf: is for whole models, and this is an adapter",
    "evaluate loss OVER rows.json --max-length 513": "--max-length: 513 is more than the model's 512 positions",
    "tune run.yaml --out rows.json": "rows.json: already exists",
    "train run.yaml output=full": "output: full is not empty",
    "train run.yaml output=/proc/none": "/proc/none: cannot be written",
    "train run.yaml data.train=cut.json": "cut.json:1:21: error: the file ends in the middle of a record",
    "train run.yaml data.train=cut.jsonl.gz": "cut.jsonl.gz: is not, or not wholly, gzip",
    "train run.yaml data.train=odd.json": "odd.json:1: error: row 1 has no layout that surefoot knows",
    "train run.yaml data.eval=cut.json": "cut.json:1:21: error: the file ends in the middle of a record",
    "train run.yaml stage=dpo": "row 1 is alpaca data for stage sft",
    "train run.yaml model=CUT": "model.safetensors: damaged",
    "train run.yaml adapter.kind=lora adapter.rank=2 adapter.targets=[q_prj]": "no linear layer is called 'q_prj'",
    "convert none --out out": "none: no such file or folder",
    "convert rows.json --out out": "rows.json: is no file of weights",
    "convert . --out out": "holds no weights",
    "verify none": "Directory 'none' does not exist",
    "replay none": "Directory 'none' does not exist",
    "board .  --port 99999": "99999 is not in the range",
}
_SCRIPT = """
import json, os, sys
from click.testing import CliRunner
from surefoot.commands.main import main

for case in json.load(sys.stdin):
    if not (child := os.fork()):
        result = CliRunner().invoke(main, case.split())
        print(json.dumps([case, [result.exit_code, result.stderr, "torch" in sys.modules]]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    tiny_llama(folder / "BASE")
    long = json.loads((folder / "BASE" / "config.json").read_text()) | {"max_position_embeddings": 100_000}
    (folder / "LONG").mkdir()
    for path in (folder / "BASE").iterdir():
        (folder / "LONG" / path.name).write_bytes(path.read_bytes())
    (folder / "LONG" / "config.json").write_text(json.dumps(long))
    (folder / "OVER").mkdir()
    (folder / "OVER" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "BASE", "r": 2, "target_modules": ["q_proj"]})
    )
    (folder / "empty.txt").write_text("\n")
    (folder / "rows.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    (folder / "cut.json").write_text('[{"instruction": "a"\n')
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"instruction": "a", "output": "b"}\n')[:-8])
    (folder / "odd.json").write_text('[{"instructio": "a"}]')
    for name in ("folder", "full"):
        (folder / name / "below").mkdir(parents=True)
    (folder / "CUT").mkdir()
    for path in (folder / "BASE").iterdir():
        (folder / "CUT" / path.name).write_bytes(path.read_bytes()[: 3000 if path.suffix == ".safetensors" else None])
    (folder / "run.yaml").write_text("stage: sft\nmodel: BASE\ndata: {train: rows.json}\noutput: run\n")
    return folder


def told(place: Path, cases: list[str], before: str = "") -> dict[str, list]:
    done = subprocess.run(
        [sys.executable, "-c", before + _SCRIPT], input=json.dumps(cases), cwd=place, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.fixture(scope="module")
def answers(place):
    return told(place, list(CASES))


@pytest.mark.parametrize("case", CASES)
def test_it_is_told_before_anything_is_loaded(answers, case):
    code, stderr, torch = answers[case]
    assert CASES[case] in stderr
    lines = 3 if "^" in stderr else 1  # with an excerpt and a caret
    assert (code, stderr.count("\n"), torch) in {(2, lines, False), (3, lines, False)}


def test_nothing_is_left_behind(place, answers):
    assert not (place / "out").exists()
    assert not (place / "run").exists()


def test_a_folder_hides_no_conflict_of_the_config(place):
    case = "train run.yaml output=full adapter.kind=lora adapter.rank=2 adapter.targets=[q_prj]"
    code, stderr, torch = told(place, [case])[case]
    assert (code, stderr.count("\n"), torch) == (2, 2, False)
    assert "is not empty" in stderr
    assert "q_prj" in stderr


def test_the_first_line_comes_before_anything_is_loaded(place):
    """The twin: that of the end of an examination does not."""
    program = (
        "import sys\nfrom surefoot.commands.main import main\nfrom surefoot.report.console import Console\n"
        "honest = Console.say\n"
        "def say(self, text='', **how):\n    print('torch' in sys.modules, text[:3])\n    honest(self, text, **how)\n"
        "Console.say = say\nmain(['train', 'run.yaml', '--dry-run'], standalone_mode=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if line.startswith(("True", "False"))]
    assert said[0] == "False sft"
    assert said[-1] == "True dry"


def test_twin_without_the_check_before_torch_torch_comes_first(place):
    case = "train run.yaml data.train=cut.json"
    blind = "import surefoot.runs.precheck as early\nearly.check_before_torch = lambda config, mode: None\n"
    code, stderr, torch = told(place, [case], blind)[case]
    assert (code, torch) == (2, True)
    assert "cut.json:1:21" in stderr


def test_twin_without_a_look_at_the_config_the_model_is_opened_first(place):
    case = "evaluate loss BASE rows.json --max-length 513"
    blind = "import surefoot.methods.requests as asked\nasked.named_model = lambda path, adapter: None\n"
    code, stderr, torch = told(place, [case], blind)[case]
    assert (code, torch) == (2, True)
    assert "--max-length: 513 is more than the model's 512 positions" in stderr
