"""docs/extending.md: what it adds from inside, put into a copy of surefoot, trains, translates and plans; what it adds
from outside runs in surefoot as it is, and both come to the same numbers."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, HeliumConfig

import surefoot
from helpers import zoo
from helpers.doc_pages import ROOT, table
from helpers.tiers import representatives

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
STEP = re.compile(
    r"^(?:Under `src/surefoot`, i|I)n `([\w/.]+\.py)`, (a new file|at its end|above `(\w+)`|a row of `(\w+)`)"
    r"[^\n]*(?:\n[^\n`]+)*\n\n```(?:python|text)\n(.*?)^```",
    flags=re.DOTALL | re.MULTILINE,
)
OUTSIDE = re.search(r"^## From outside\n+```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
ENTRY_POINTS = re.search(r"^```toml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
BLOCKS = len(re.findall("^```(?:python|text)", PAGE, flags=re.MULTILINE)) - 1  # the first is the user's own file

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Bot:' }}{% generation %}{{ ' ' + message['content'] | trim + eos_token }}{% endgeneration %}"
    "{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Bot:' }}{% endif %}"
)
QUIZ = [{"question": f"Which bird, {n}?", "choices": ["heron", "trout", "sky"], "right": n % 3} for n in range(8)]
PAIRS = [{"prompt": f"Say sky {n} times.", "chosen": "sky " * n, "rejected": "trout"} for n in range(1, 9)]
COMMON = {"adapter": {"kind": "lora", "rank": 2}, "batch": {"size": 3}, "duration": "2 steps", "eval_every": "2 steps"}


def insert(file: Path, how: str, above: str, rows: str, block: str) -> None:
    """Does one step of the page to a copy of the file it names."""
    if how == "a new file":
        file.write_text(block, encoding="utf-8")
        return
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    if how == "at its end":
        file.write_text(f"{text}\n\n{block}", encoding="utf-8")
        return
    node = _named(ast.parse(text), above or rows)
    if above:
        at, block = node.lineno - 1 - len(getattr(node, "decorator_list", ())), f"{block}\n\n"
    elif isinstance(node, ast.ClassDef):
        at, block = node.end_lineno, textwrap.indent(block, " " * 4)
    else:  # before the last bracket of the table, or of what the function returns
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else _returned(node)
        if isinstance(value, ast.Call):
            value = next((one for one in value.args if isinstance(one, ast.Dict)), value)
        offset = sum(map(len, lines[: value.end_lineno - 1])) + value.end_col_offset - 1
        before = text[:offset].rstrip()
        between = "" if before[-1] in ",{([" else ","
        file.write_text(f"{before}{between}\n{block.rstrip().removesuffix(',')},\n{text[offset:]}", encoding="utf-8")
        return
    file.write_text("".join([*lines[:at], block, *lines[at:]]), encoding="utf-8")


def _named(tree: ast.Module, name: str) -> ast.stmt:
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        names = [target] if target else node.targets if isinstance(node, ast.Assign) else []
        if name in {getattr(one, "id", None) for one in names} | {getattr(node, "name", None)}:
            return node
    raise LookupError(name)


def _returned(node: ast.stmt) -> ast.expr:
    return next(one.value for one in reversed(node.body) if isinstance(one, ast.Return))


def extended(folder: Path, *, without: str = "") -> Path:
    """A copy of surefoot with every step of the page, or without those that add a row to one table."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name, how, above, rows, block in STEP.findall(PAGE):
        if rows != without or not without:
            insert(folder / ("src/surefoot" if how == "a new file" else "") / name, how, above, rows, block)
    return folder / "src"


SIZES = {
    "vocab_size": 70,
    "hidden_size": 256,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
SHAPES = {"plain": {}, "biased": {"attention_bias": True}, "both": {"attention_bias": True, "mlp_bias": True}}


def shapes(folder: Path) -> list[int]:
    """Writes a config.json of Helium for each of SHAPES, without head_dim. Parameters of transformers' models."""
    found = []
    for name, keys in SHAPES.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps({"model_type": "helium"} | SIZES | keys))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(HeliumConfig(**SIZES | keys))
        found.append(sum(one.numel() for one in model.parameters()))
    return found


def helium(folder: Path) -> None:
    """A model of the family that the page adds, with Llama's tokenizer."""
    zoo.llama3(folder)
    config = json.loads((folder / "config.json").read_text())
    kept = {key: config[key] for key in (*SIZES, "bos_token_id", "eos_token_id")}
    AutoModelForCausalLM.from_config(HeliumConfig(**kept, head_dim=8)).save_pretrained(folder)


CHILD = """
import json, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "surefoot"]:  # of a process that was forked
    del sys.modules[name]
import surefoot
from pathlib import Path
from surefoot.families import find
from surefoot.families.model_facts import read_model_facts
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command
assert surefoot.__file__.startswith(sys.argv[1]), surefoot.__file__
for config in json.loads(sys.argv[2]):
    surefoot.train(config)
told = translate_command("minitrain --model base --data quiz.jsonl --out theirs --lr 0.01 --verbose".split(), Options())
counts = [read_model_facts(Path("shapes") / name).parameters for name in json.loads(sys.argv[3])]
print("FOUND " + json.dumps({"family": find("helium").name, "translated": told.config, "parameters": counts}))
"""


def in_child(
    source: Path, folder: Path, configs: list[dict], code: str = CHILD, python: str = sys.executable
) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [python, "-c", code, str(source), json.dumps(configs), json.dumps([*SHAPES])]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def losses(folder: Path) -> list[float]:
    lines = (folder / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [row[key] for row in map(json.loads, lines) for key in ("loss", "eval_loss") if key in row]


def test_every_block_is_a_step():
    assert len(STEP.findall(PAGE)) == BLOCKS


def test_every_place_that_it_names_is_there():
    places = set(re.findall(r"`((?:tests|src|tools)/[\w/.]+)`", PAGE))
    assert len(places) > 20
    added = {f"src/surefoot/{name}" for name, how, *_ in STEP.findall(PAGE) if how == "a new file"}
    assert [place for place in sorted(places - added) if not (ROOT / place).exists()] == []
    for rows, file in re.findall(r"`([A-Z_]{3,})`(?: and `[A-Z_]+`)? in `(tests/[\w/.]+\.py)`", PAGE):
        assert re.search(rf"^{rows}\b", (ROOT / file).read_text(encoding="utf-8"), re.M), rows


def test_every_way_in_has_both_sides_or_says_why_not():
    """family, loss, method, data format, template, dialect, fast path, and what else a user may bring."""
    rows = table(ROOT / "docs" / "extending.md", "what", "from outside", "from inside")
    named = {what.removeprefix("a ") for what, *_ in rows}
    assert named >= {"model family", "loss", "method", "data format", "template", "fast path"}
    assert any(what.startswith("a tool") for what, *_ in rows)
    assert all(outside for _, outside, _ in rows)
    headings = set(re.findall(r"^## (.*)$", PAGE, re.M))
    linked = {one.replace("-", " ") for _, _, inside in rows for one in re.findall(r"\(#([\w-]+)\)", inside)}
    assert linked == {one.lower() for one in headings} - {"from outside"}


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zoo.llama3(tmp_path / "base")
    helium(tmp_path / "helium")
    for name, rows in (("quiz.jsonl", QUIZ), ("pairs.jsonl", PAIRS)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "own.py").write_text(OUTSIDE[1], encoding="utf-8")
    (tmp_path / "turns.jinja").write_text(TEMPLATE, encoding="utf-8")
    return tmp_path


def test_what_is_added_from_inside_is_what_is_added_from_outside(world, any_python):
    quiz = COMMON | {"model": "base", "data": {"train": "quiz.jsonl", "eval": 2, "template": "turns"}}
    pairs = COMMON | {"model": "base", "stage": "dpo", "data": {"train": "pairs.jsonl", "eval": 2}}
    inside = [
        quiz | {"stage": "sft", "output": "inside"},
        quiz | {"stage": "focal", "output": "focal"},
        pairs | {"alignment": {"loss": "wide", "margin": 0.3, "beta": 0.05, "slope": 2}, "output": "wide"},
        pairs | {"stage": "reward", "reward": {"loss": "gap"}, "output": "gap"},
        quiz | {"stage": "sft", "model": "helium", "output": "helium-inside"},
    ]
    parameters = shapes(world / "shapes")
    done = in_child(extended(world / "copy"), world, inside, python=any_python)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.rpartition("FOUND ")[2])
    assert found["family"] == "helium"
    assert found["parameters"] == parameters
    assert found["translated"] == {
        "stage": "sft",
        "model": {"path": "base"},
        "data": {"train": "quiz.jsonl"},
        "output": "theirs",
        "optim": {"lr": 0.01},
        "adapter": {"kind": "lora", "rank": 4},
    }
    kernels = json.loads((world / "inside" / "environment.json").read_text())
    assert '"activation"' in json.dumps(kernels)
    assert losses(world / "focal")[0] < losses(world / "inside")[0]

    own = {
        "functions": {"record": "own.py:quiz", "metrics": ["own.py:words"]},
        "data": {"train": "quiz.jsonl", "eval": 2, "format": "custom", "template": "turns.jinja"},
        "metrics": {"names": ["words"], "max_new_tokens": 4},
    }
    surefoot.train(quiz | {"stage": "sft", "output": "outside"} | own)
    surefoot.train(pairs | {"alignment": {"loss": "own.py:wide", "margin": 0.3}, "output": "own-wide"})
    surefoot.train(
        quiz | {"stage": "sft", "model": "helium", "bos": {"prepend": "on"}, "output": "helium-outside"} | own
    )
    assert losses(world / "outside") == losses(world / "inside")
    assert losses(world / "own-wide") == losses(world / "wide")  # a beta of 0.1 is one of 0.05 with a slope of 2
    assert losses(world / "helium-outside") == losses(world / "helium-inside")
    assert losses(world / "helium-outside") != losses(world / "outside")  # twin: another model
    assert "eval_words" in (world / "outside" / "trainer_log.jsonl").read_text()

    for name, loss in (("own-gap", "own.py:gap"), ("twin", "divergence")):
        surefoot.train(pairs | {"stage": "reward", "reward": {"loss": loss}, "output": name})
    assert losses(world / "own-gap") == losses(world / "gap")
    assert losses(world / "own-gap") != pytest.approx(losses(world / "twin"))


def test_what_a_package_registers_is_what_a_file_has(world, monkeypatch):
    registered = tomllib.loads(ENTRY_POINTS[1])["project"]["entry-points"]["surefoot.functions"]
    facts = world / "package" / "birds-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[surefoot.functions]\n" + "".join(f"{name} = {value}\n" for name, value in registered.items())
    )
    (world / "own.py").rename(world / "package" / "own.py")
    monkeypatch.syspath_prepend(world / "package")
    quiz = COMMON | {"stage": "sft", "model": "base", "metrics": {"names": ["words"], "max_new_tokens": 4}}
    quiz["data"] = {"train": "quiz.jsonl", "eval": 2, "format": "custom", "template": "turns.jinja"}
    for output, place in (("registered", "entry_point:"), ("named", "package/own.py:")):
        own = {"record": f"{place}quiz", "metrics": [f"{place}words"]}
        surefoot.train(quiz | {"functions": own, "output": output})
    sys.modules.pop("own", None)
    assert "eval_words" in (world / "registered" / "trainer_log.jsonl").read_text()
    assert losses(world / "registered") == losses(world / "named")


TABLES = {
    "LOSSES": "methods.losses.preference",
    "FUNCTIONS": "methods.table",
    "LAYOUTS": "data.formats.registry",
    "Constants": "methods.losses.preference",
    "AlignmentConfig": "config.methods",
}


@pytest.mark.parametrize("rows", representatives([*TABLES], "LAYOUTS"))
def test_twin_half_of_it_cannot_be_imported(tmp_path, rows):
    source = extended(tmp_path, without=rows)
    module = "methods.preference" if rows == "AlignmentConfig" else TABLES[rows]
    done = in_child(source, tmp_path, [], f"import surefoot.{module}")
    assert f"surefoot.{TABLES[rows]}.{rows}" in done.stderr.partition("RuntimeError")[2]
