"""A wrong value of an option is one line, before torch is imported and a model opened: that takes seconds.

Each case runs in a fork of a process that has imported what needs no torch; where torch would be imported, it ends.
"""

import gzip
import json
import shutil
import subprocess
import sys

import pytest

from helpers.tiny_models import tiny_llama
from surefoot.commands.main import COMMANDS
from surefoot.system.folders import MANIFEST

CASES = {  # the place that is named, and the code; "" of what click refuses
    "capture BASE --out out --layers 0,9": ("--layers: ", "SF-USE-FLAG"),
    "capture BASE --out out --layers x": ("--layers: ", "SF-USE-FLAG"),
    "capture BASE --out out --seq-len 513": ("--seq-len: ", "SF-DATA-LENGTH"),
    "capture BASE --out out --text empty.txt": ("empty.txt: ", "SF-DATA-EMPTY"),
    "capture LONG --out out --attention --seq-len 60000": ("--attention: ", "SF-MEMORY"),
    "evaluate loss BASE rows.json --max-length 99999": ("--max-length: ", "SF-DATA-LENGTH"),
    "evaluate loss BASE rows.json --only adapter": ("--only: ", "SF-USE-FLAG"),
    "evaluate loss BASE rows.json --template none": ("--template: ", "SF-DATA-TEMPLATE"),
    "evaluate loss BASE rows.json --out rows.json/x": ("rows.json/x: ", "SF-FILE-WRITE"),
    "evaluate reward BASE rows.json --max-length 99999": ("--max-length: ", "SF-DATA-LENGTH"),
    "evaluate reward BASE rows.json --out rows.json/x": ("rows.json/x: ", "SF-FILE-WRITE"),
    "evaluate answers BASE rows.json": ("--config: ", "SF-USE-FLAG"),
    "evaluate norms BASE --data rows.json --template none": ("--template: ", "SF-DATA-TEMPLATE"),
    "evaluate norms BASE --out rows.json/x": ("rows.json/x: ", "SF-FILE-WRITE"),
    "evaluate harness BASE --tasks arc_easy --only adapter": ("--only: ", "SF-USE-FLAG"),
    "evaluate harness BASE --tasks ,": ("--tasks: ", "SF-EVALUATE"),
    "evaluate commonsense BASE --data . --template none": ("--template: ", "SF-DATA-TEMPLATE"),
    "evaluate commonsense BASE --data . --only adapter": ("--only: ", "SF-USE-FLAG"),
    "evaluate commonsense BASE --data . --sets none": ("--sets: ", "SF-EVALUATE"),
    "generate BASE --prompt hi --max-new-tokens 512": ("--max-new-tokens: ", "SF-DATA-LENGTH"),
    "generate full --prompt hi": ("full: ", "SF-MODEL-WEIGHTS"),
    "chat BASE --max-new-tokens 512": ("--max-new-tokens: ", "SF-DATA-LENGTH"),
    "chat no/such/folder": ("no/such/folder: ", "SF-FILE-MISSING"),
    "init BASE rows.json --out run.yaml": ("run.yaml: ", "SF-USE-OUTPUT"),
    "export BASE --out out --merge": ("BASE: ", "SF-USE-FLAG"),
    "export OVER --out out --gguf": ("--gguf: ", "SF-USE-FLAG"),
    "evaluate loss OVER rows.json --max-length 513": ("--max-length: ", "SF-DATA-LENGTH"),
    "tune run.yaml --out rows.json": ("rows.json: ", "SF-USE-OUTPUT"),
    "train run.yaml output=full": ("output: ", "SF-USE-OUTPUT"),
    "train run.yaml output=begun --resume optim.lr=1": ("optim.lr: ", "SF-RESUME-CHANGED"),
    "train run.yaml output=/proc/none": ("/proc/none: ", "SF-FILE-WRITE"),
    "train run.yaml data.train=cut.json": ("cut.json:1:21: ", "SF-DATA-ROW"),
    "train run.yaml data.train=cut.jsonl.gz": ("cut.jsonl.gz: ", "SF-DATA-FILE"),
    "train run.yaml data.train=odd.json": ("odd.json:1: ", "SF-DATA-FORMAT"),
    "train run.yaml data.eval=cut.json": ("cut.json:1:21: ", "SF-DATA-ROW"),
    "train run.yaml stage=dpo": ("rows.json:1: ", "SF-DATA-FORMAT"),
    "train run.yaml model=CUT": ("CUT/model.safetensors: ", "SF-MODEL-WEIGHTS"),
    "train run.yaml adapter.kind=lora adapter.rank=2 adapter.targets=[q_prj]": (
        "adapter.targets: ",
        "SF-ADAPTER-TARGETS",
    ),
    "convert none --out out": ("none: ", "SF-FILE-MISSING"),
    "convert rows.json --out out": ("rows.json: ", "SF-MODEL-WEIGHTS"),
    "convert . --out out": (".: ", "SF-MODEL-WEIGHTS"),
    "verify none": ("'FOLDER': ", ""),
    "replay none": ("'FOLDER': ", ""),
    "board .  --port 99999": ("'--port': ", ""),
}
_SCRIPT = """
import importlib, json, os, sys
from importlib.machinery import ModuleSpec
from click.testing import CliRunner
from surefoot.commands.main import main

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec):
        end({"torch": True})

    exec_module = create_module

def end(found):
    os.write(answers, json.dumps([case, found]).encode() + b"\\n")
    os._exit(0)

answers = os.dup(1)
sys.meta_path.insert(0, NoTorch())
for name in ("commands.board.server", "commands.convert", "runs.precheck", "methods.provenance", "report.console"):
    importlib.import_module(f"surefoot.{name}")
for case in ("evaluate loss BASE rows.json --only adapter", "train run.yaml data.train=cut.json"):
    CliRunner().invoke(main, case.split())  # what every case would import or build anew
PLANT
for case in json.load(sys.stdin):
    if not os.fork():
        result = CliRunner().invoke(main, case.split())
        end({"torch": False, "exit": result.exit_code, "stderr": result.stderr})
    os.wait()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    base = tiny_llama(folder / "BASE")
    for name in ("LONG", "CUT"):
        shutil.copytree(base, folder / name)
    long = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": 100_000}
    (folder / "LONG" / "config.json").write_text(json.dumps(long))
    with (folder / "CUT" / "model.safetensors").open("rb+") as weights:
        weights.truncate(3000)
    (folder / "OVER").mkdir()
    (folder / "OVER" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "BASE", "r": 2, "target_modules": ["q_proj"]})
    )
    (folder / "empty.txt").write_text("\n")
    (folder / "rows.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    (folder / "cut.json").write_text('[{"instruction": "a"\n')
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"instruction": "a", "output": "b"}\n')[:-8])
    (folder / "odd.json").write_text('[{"instructio": "a"}]')
    (folder / "full" / "below").mkdir(parents=True)
    (folder / "begun" / "checkpoint-2").mkdir(parents=True)
    (folder / "begun" / "checkpoint-2" / MANIFEST).touch()
    (folder / "begun" / "config.yaml").write_text("stage: sft\nmodel: BASE\ndata: {train: rows.json}\noutput: begun\n")
    (folder / "run.yaml").write_text("stage: sft\nmodel: BASE\ndata: {train: rows.json}\noutput: run\n")
    return folder


def refused(place, cases: list[str], plant: str = "") -> dict[str, dict]:
    """Case -> whether torch was wanted, and else exit code and stderr. plant: a line that runs before the cases."""
    script = [sys.executable, "-c", _SCRIPT.replace("PLANT", plant)]
    done = subprocess.run(script, input=json.dumps(cases), cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


CONFLICT = "train run.yaml output=full adapter.kind=lora adapter.rank=2 adapter.targets=[q_prj]"
PAGES = [f"{name} --help" for name in COMMANDS]


@pytest.fixture(scope="module")
def answers(place):
    """All cases in one process, which leaves nothing behind."""
    before = sorted(path.relative_to(place) for path in place.rglob("*"))
    found = refused(place, [*CASES, CONFLICT, *PAGES])
    assert sorted(path.relative_to(place) for path in place.rglob("*")) == before
    return found


def test_each_is_one_line_before_torch(answers):
    for case in CASES:
        found = answers[case]
        assert not found["torch"], case
        assert found["exit"] in (2, 3), case
        assert found["stderr"].count("\n") == (3 if "^" in found["stderr"] else 1), case  # with excerpt and caret
        where, code = CASES[case]
        first = found["stderr"].partition("\n")[0]
        assert where in first, first
        assert first.endswith(f" [{code}]") if code else first.endswith("--help`."), first


def test_a_page_of_help_needs_no_torch(answers):
    assert [answers[page] | {"stderr": ""} for page in PAGES] == [{"torch": False, "exit": 0, "stderr": ""}] * len(
        PAGES
    )


def test_an_output_folder_in_use_hides_no_conflict_of_the_config(answers):
    found = answers[CONFLICT]
    assert (found["torch"], found["exit"]) == (False, 2)
    assert [line.rpartition(" ")[2] for line in found["stderr"].splitlines()] == [
        "[SF-USE-OUTPUT]",
        "[SF-ADAPTER-TARGETS]",
    ]


def test_the_first_line_of_a_run_comes_before_torch(place):
    """And the last one does not."""
    said = "json.dumps(['said', text[:3]]).encode() + b'\\n'"
    plant = f"import surefoot.report.console as c; c.Console.say = lambda _, text='', **how: os.write(answers, {said})"
    found = refused(place, ["train run.yaml --dry-run"], plant)
    assert found == {"said": "sft", "train run.yaml --dry-run": {"torch": True}}


@pytest.mark.parametrize(
    ("case", "plant"),
    [
        (
            "train run.yaml data.train=cut.json",
            "import surefoot.runs.precheck as early; early.check_before_torch = lambda *asked, dry_run: None",
        ),
        (
            "train run.yaml output=begun --resume",
            "import surefoot.runs.output_folder",
        ),
        (
            "evaluate loss BASE rows.json --max-length 513",
            "import surefoot.methods.requests as asked; asked.named_model = lambda path, adapter: None",
        ),
    ],
)
def test_twin_without_its_early_check_torch_comes_first(place, case, plant):
    assert refused(place, [case], plant)[case]["torch"]
