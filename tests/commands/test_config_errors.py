"""The error gallery: the usual mistakes, as `surefoot train` answers them. Golden texts, so that wording is a decision.

One mistake is at most 12 lines on stderr and nothing on stdout, exit code 2, with the place, the key and the way out;
never a traceback, never the vocabulary of a library.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from helpers.configs import write_config
from helpers.faults import gives
from surefoot.commands import terminal as errors
from surefoot.commands.main import main
from surefoot.system.errors import Fault

MOST_LINES = 12

GALLERY = {  # name -> changed keys of the config, what is printed ("…/" is the folder of the config)
    "unknown key": (
        {"learning_rte": "1e-4"},
        """\
…/run.yaml:6:1: error: learning_rte: unknown key; did you mean optim.lr? (key lr under optim) [SF-CONFIG-KEY]
  6 | learning_rte: 1e-4
    | ^^^^^^^^^^^^
""",
    ),
    "name from another tool": (
        {"lora_rank": "16"},
        """\
…/run.yaml:6:1: error: lora_rank: unknown key; did you mean adapter.rank? (key rank under adapter) [SF-CONFIG-KEY]
  6 | lora_rank: 16
    | ^^^^^^^^^
""",
    ),
    "misspelt method": (
        {"adapter": "", "adaptor": "{kind: lora}"},
        """\
…/run.yaml:5:1: error: adaptor: unknown key; did you mean adapter? [SF-CONFIG-KEY]
  5 | adaptor: {kind: lora}
    | ^^^^^^^
""",
    ),
    "word for a number": (
        {"adapter": "{kind: lora, rank: eight}"},
        """\
…/run.yaml:3:29: error: adapter.rank: expected a whole number of at least 1, got 'eight' (text); \
for example `rank: 16` [SF-CONFIG-VALUE]
  3 | adapter: {kind: lora, rank: eight}
    |                             ^^^^^
""",
    ),
    "quoted number": (
        {"optim": "{lr: '1e-4'}"},
        """\
…/run.yaml:6:13: error: optim.lr: expected a number greater than 0, got '1e-4' (text); remove the quotes \
[SF-CONFIG-VALUE]
  6 | optim: {lr: '1e-4'}
    |             ^^^^^^
""",
    ),
    "not a number": (
        {"optim": "{lr: .nan}"},
        """\
…/run.yaml:6:13: error: optim.lr: expected a number greater than 0, got nan (a number); for example `lr: 2e-4` \
[SF-CONFIG-VALUE]
  6 | optim: {lr: .nan}
    |             ^^^^
""",
    ),
    "misspelt value": (
        {"precision": "bf61"},
        """\
…/run.yaml:6:12: error: precision.compute: expected auto, fp32, bf16 or fp16, got 'bf61' (text); did you mean bf16? \
[SF-CONFIG-VALUE]
  6 | precision: bf61
    |            ^^^^
""",
    ),
    "length without unit": (
        {"duration": "3"},
        """\
…/run.yaml:6:11: error: duration: expected a length such as 200 steps, 3 epochs or 1e6 tokens, got 3 (a whole number); \
for example `duration: 3 epochs` [SF-CONFIG-VALUE]
  6 | duration: 3
    |           ^
""",
    ),
    "three tokens": (
        {"data": "{train: train.jsonl, max_length: 3}"},
        """\
…/run.yaml:4:40: error: data.max_length: expected auto or model, or a whole number of at least 8, \
got 3 (a whole number); for example `max_length: 2048` [SF-CONFIG-VALUE]
  4 | data: {train: train.jsonl, max_length: 3}
    |                                        ^
""",
    ),
    "key given twice": (
        {"seed": "1\nseed: 2"},
        """\
…/run.yaml:7:1: error: seed: duplicate key, first given in line 6; keep one [SF-CONFIG-YAML]
  7 | seed: 2
    | ^^^^
""",
    ),
    "required key": (
        {"output": ""},
        """\
error: …/run.yaml: output: is required; add `output: runs/my-run` [SF-CONFIG-KEY]
""",
    ),
    "missing model folder": (
        {"model": "models/lama"},
        """\
…/run.yaml:2:8: error: model.path: folder models/lama does not exist; did you mean models/llama? [SF-FILE-MISSING]
  2 | model: models/lama
    |        ^^^^^^^^^^^
""",
    ),
    "missing model folder, nothing alike": (
        {"model": "./zebra"},
        """\
…/run.yaml:2:8: error: model.path: folder ./zebra does not exist; the working folder has empty, models [SF-FILE-MISSING]
  2 | model: ./zebra
    |        ^^^^^^^
""",
    ),
    "hub id without an owner": (
        {"model": "gpt2"},
        """\
…/run.yaml:2:8: error: model.path: folder gpt2 does not exist; the working folder has empty, models \
(a hub id is written org/name) [SF-FILE-MISSING]
  2 | model: gpt2
    |        ^^^^
""",
    ),
    "model folder without a model": (
        {"model": "empty"},
        """\
…/run.yaml:2:8: error: model.path: empty has no config.json; \
give a folder with config.json, *.safetensors and tokenizer files [SF-FILE-MISSING]
  2 | model: empty
    |        ^^^^^
""",
    ),
    "folder above the model": (
        {"model": "./models"},
        """\
…/run.yaml:2:8: error: model.path: ./models has no config.json; did you mean models/llama? [SF-FILE-MISSING]
  2 | model: ./models
    |        ^^^^^^^^
""",
    ),
    "missing data file": (
        {"data": "{train: trian.jsonl}"},
        """\
…/run.yaml:4:15: error: data.train.path: file trian.jsonl does not exist; did you mean train.jsonl? [SF-FILE-MISSING]
  4 | data: {train: trian.jsonl}
    |               ^^^^^^^^^^^
""",
    ),
    "data of another kind": (
        {"data": "{train: run.yaml}"},
        """\
…/run.yaml:4:15: error: data.train.path: run.yaml ends in .yaml; \
give a .json, .jsonl, .csv, .tsv, .parquet or .txt file [SF-FILE-MISSING]
  4 | data: {train: run.yaml}
    |               ^^^^^^^^
""",
    ),
    "misspelt none": (
        {"data": "{train: train.jsonl, eval: non}"},
        """\
…/run.yaml:4:34: error: data.eval.path: file non does not exist; did you mean none? [SF-FILE-MISSING]
  4 | data: {train: train.jsonl, eval: non}
    |                                  ^^^
""",
    ),
    "contradiction": (
        {"early_stopping": "{patience: 2}"},
        """\
…/run.yaml:6:17: error: early_stopping: needs evaluation data, but data.eval is none; \
set data.eval to a file, a fraction or a count, or leave this key out (early_stopping=null) [SF-CONFIG-CONFLICT]
  6 | early_stopping: {patience: 2}
    |                 ^
""",
    ),
    "fp16 weights that train": (
        {"adapter": "", "precision": "{base: fp16}"},
        """\
…/run.yaml:5:19: error: precision.base: without an adapter the base trains, and training fp16 weights ends in \
'Attempting to unscale FP16 gradients'; use `precision: fp16`, which computes in fp16 with fp32 weights, \
or add an adapter [SF-CONFIG-CONFLICT]
  5 | precision: {base: fp16}
    |                   ^^^^
""",
    ),
    "broken syntax": (
        {"optim": "{lr: 1e-4"},
        """\
…/run.yaml:6:8: error: not valid YAML: a group that is not closed; add } [SF-CONFIG-YAML]
  6 | optim: {lr: 1e-4
    |        ^
""",
    ),
    "tab": (
        {"optim": "\n\tlr: 1e-4"},
        """\
…/run.yaml:7:1: error: not valid YAML: a tab instead of spaces; indent with spaces [SF-CONFIG-YAML]
  7 |  lr: 1e-4
    | ^
""",
    ),
    "tag": (
        {"output": "!!python/name:os.abort x"},
        """\
…/run.yaml:5:9: error: tag !!python/name:os.abort is not supported; write a plain value [SF-CONFIG-YAML]
  5 | output: !!python/name:os.abort x
    |         ^^^^^^^^^^^^^
""",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", str(config), *arguments])


def check_one_mistake(result: Result, folder: Path, golden: str) -> None:
    text = result.stderr.replace(f"{folder}/", "…/")
    assert text.replace(str(folder), "…") == golden
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(text.splitlines()) <= MOST_LINES
    assert "Traceback" not in text
    assert "Input should" not in text


@pytest.mark.parametrize("name", GALLERY)
def test_gallery(folder: Path, name: str) -> None:
    changes, golden = GALLERY[name]
    check_one_mistake(train(write_config(folder, **changes)), folder, golden)


def test_an_override_is_quoted_as_typed(folder: Path) -> None:
    result = train(write_config(folder), "optim.lr=fast")
    golden = (
        "error: override optim.lr=fast: optim.lr: expected a number greater than 0, got 'fast' (text); "
        "for example `lr: 2e-4` [SF-CONFIG-VALUE]\n"
    )
    check_one_mistake(result, folder, golden)


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["--optim.lr=1e-3"], "optim.lr=1e-3"),
        (["--seed", "7"], "seed=7"),
        (["optim.lr=1", "--precision.compute"], "precision.compute=…"),
    ],
)
def test_a_key_as_a_flag_is_told_how_it_is_written(folder: Path, words: list[str], written: str) -> None:
    """The twin: a flag that is no key, and one of a command that takes no keys, are flags."""
    result = train(write_config(folder), *words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f" {written}. " in result.stderr
    for other in (["train", "run.yaml", "--optim.lrr=1e-3"], ["verify", str(folder), "--seed=7"]):
        assert "=" not in CliRunner().invoke(main, other).stderr


def test_missing_config_file(folder: Path) -> None:
    write_config(folder)
    check_one_mistake(
        train(Path("rnu.yaml")),
        folder,
        "error: rnu.yaml: no such config file; did you mean run.yaml? [SF-CONFIG-FILE]\n",
    )


def test_all_mistakes_in_one_message(folder: Path) -> None:
    result = train(write_config(folder, model="./nowhere", learning_rte="1e-4", seed="-1"), "optim.lrr=1")
    places = [line.split(" error: ")[0] for line in result.stderr.splitlines() if " error: " in line]
    assert places == [f"{folder}/run.yaml:{place}:" for place in ("2:8", "6:1", "7:7")]
    (last,) = [
        line for line in result.stderr.splitlines() if line.startswith("error: override optim.lrr=1: optim.lrr: ")
    ]
    assert last.endswith("[SF-CONFIG-KEY]")
    assert gives(last, "lr")


def test_twin_an_exception_that_is_no_surefoot_error_is_no_clean_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.config.load.shape_problems", lambda _: [])
    changes, golden = GALLERY["unknown key"]
    result = train(write_config(folder, **changes))
    with pytest.raises(AssertionError):
        check_one_mistake(result, folder, golden)
    assert result.exit_code == errors.BUG_EXIT_CODE


@click.command()
@click.argument("config")
def plan(config: str) -> None:
    from surefoot.commands.options import load_or_exit
    from surefoot.system.errors import InputError

    load_or_exit(Path(config), ["seed=3"])
    raise InputError([Fault(key, "unfit") for key in ("adapter.rank", "seed", "optim.lr", "data")])


def test_later_errors_that_name_a_key_are_shown_in_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.commands, "plan", plan)
    path = write_config(folder)
    result = CliRunner().invoke(main, ["plan", str(path)])
    assert result.exit_code == 2
    assert result.stderr.replace(f"{folder}/", "…/").splitlines() == [
        "…/run.yaml:3:29: error: adapter.rank: unfit",
        f"  3 | {path.read_text().splitlines()[2]}",
        "    |                             ^",
        "error: override seed=3: seed: unfit",
        "error: optim.lr: unfit",
        "…/run.yaml:4:7: error: data: unfit",
        *result.stderr.replace(f"{folder}/", "…/").splitlines()[-2:],
    ]


def test_excerpts_of_long_lines_and_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text("x" * 500 + " here \x1b[31m\n")
    lines = errors.fault_lines(Fault(f"{path}:1:502", "wrong"))
    assert lines[0] == f"{path}:1:502: error: wrong"
    assert lines[1].index("here") == lines[2].index("^^^^")
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines[1:])) < errors.EXCERPT_WIDTH + 10


@pytest.mark.parametrize("where", ["gone.yaml:3:1", "optim.lr", "", "data.json:17", "model.layers.0.weight"])
def test_faults_without_a_line_to_show_are_one_line(where: str) -> None:
    (line,) = errors.fault_lines(Fault(where, "is\nwrong", "mend"))
    assert line.endswith("is wrong; mend")
    assert "error: " in line


WRONG_PATHS = {
    "verify FOLDER": "SF-USE-FOLDER",
    "compare FOLDER FOLDER": "SF-USE-FOLDER",
    "replay FOLDER": "SF-USE-FOLDER",
    "push FOLDER me/x --dry-run": "SF-USE-FOLDER",
    "push FOLDER badname": "SF-HUB-MISSING",
    "tune FOLDER/run.yaml --out FOLDER/run.yaml": "SF-USE-OUTPUT",
}


def test_nothing_heavy_is_imported_before_a_config_error_or_a_wrong_path_is_told(folder: Path) -> None:
    write_config(folder)
    wrong = {command.replace("FOLDER", str(folder)): code for command, code in WRONG_PATHS.items()}
    for command, code in wrong.items():
        result = CliRunner().invoke(main, command.split())
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), command
        assert result.stderr.endswith(f" [{code}]\n"), result.stderr
    faulty = write_config(folder, learning_rte="1e-4")
    assert heavy_modules([*wrong, *(f"{name} {faulty}" for name in ("train", "plan", "data"))]) == set()


def test_twin_a_heavy_import_is_noticed(folder: Path) -> None:
    assert heavy_modules(["--help"], first="import numpy") == {"numpy"}


def heavy_modules(commands: list[str], *, first: str = "") -> set[str]:
    """Which of the heavy libraries a fresh process has imported after the commands."""
    program = f"""\
import contextlib, sys
{first}
from surefoot.commands.main import main
for command in {commands!r}:
    with contextlib.suppress(SystemExit):
        main(command.split())
print(*sorted(name for name in sys.modules if "." not in name), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "numpy", "peft", "accelerate", "matplotlib", "safetensors", "tokenizers", "rich"}
    return heavy & set(result.stderr.split())
