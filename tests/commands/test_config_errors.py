"""The usual mistakes, as `surefoot train` answers them: tests/golden/messages/train.txt, so that wording is a decision.

One mistake is at most 12 lines on stderr and nothing on stdout, exit code 2, with the place, the key and the way out;
never a traceback, never the vocabulary of a library.

What every measurement is asked on is said behind MODEL or by an option, in all of them alike.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from helpers.configs import write_config
from helpers.faults import gives
from surefoot.commands import terminal as errors
from surefoot.commands.evaluate import MEASUREMENTS, evaluate
from surefoot.commands.main import main
from surefoot.commands.options import argument_or_option, model_options
from surefoot.system.errors import Fault

MOST_LINES = 12
GALLERY = Path(__file__).resolve().parents[1] / "golden" / "messages" / "train.txt"

MISTAKES: dict[str, dict[str, str]] = {  # name -> changed keys of the config
    "unknown key": {"learning_rte": "1e-4"},
    "misspelt method": {"adapter": "", "adaptor": "{kind: lora}"},
    "word for a number": {"adapter": "{kind: lora, rank: eight}"},
    "quoted number": {"optim": "{lr: '1e-4'}"},
    "misspelt value": {"precision": "bf61"},
    "three tokens": {"data": "{train: train.jsonl, max_length: 3}"},
    "key given twice": {"seed": "1\nseed: 2"},
    "required key": {"output": ""},
    "missing model folder": {"model": "models/lama"},
    "missing model folder, nothing alike": {"model": "./zebra"},
    "hub id without an owner": {"model": "gpt2"},
    "model folder without a model": {"model": "empty"},
    "folder above the model": {"model": "./models"},
    "missing data file": {"data": "{train: trian.jsonl}"},
    "data of another kind": {"data": "{train: run.yaml}"},
    "misspelt none": {"data": "{train: train.jsonl, eval: non}"},
    "contradiction": {"early_stopping": "{patience: 2}"},
    "fp16 weights that train": {"adapter": "", "precision": "{base: fp16}"},
    "broken syntax": {"optim": "{lr: 1e-4"},
    "tab": {"optim": "\n\tlr: 1e-4"},
    "tag": {"output": "!!python/name:os.abort x"},
}
TYPED = {"override": ["run.yaml", "optim.lr=fast"], "missing config file": ["rnu.yaml"]}  # beside a config without one


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", str(config), *arguments])


def answer(folder: Path, name: str) -> Result:
    """To a mistake that is made in this folder, the working one."""
    (folder / "empty").mkdir()
    path = write_config(folder, **MISTAKES.get(name, {}))
    config, *overrides = TYPED.get(name, [str(path)])
    return train(Path(config), *overrides)


def shown(result: Result, folder: Path) -> str:
    return result.stderr.replace(f"{folder}/", "…/").replace(str(folder), "…")


def golden(name: str) -> str:
    _, *parts = re.split(r"^# (.*)\n", GALLERY.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))[name].rstrip() + "\n"


def check_one_mistake(result: Result, folder: Path, name: str) -> None:
    text = shown(result, folder)
    assert text == golden(name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(text.splitlines()) <= MOST_LINES
    assert "Traceback" not in text
    assert "Input should" not in text


@pytest.mark.parametrize("name", [*MISTAKES, *TYPED])
def test_gallery(folder: Path, name: str) -> None:
    """The only place that quotes them; `PYTHONPATH=src:tests python tests/commands/test_config_errors.py` writes it
    anew."""
    check_one_mistake(answer(folder, name), folder, name)


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
    result = answer(folder, "unknown key")
    with pytest.raises(AssertionError):
        check_one_mistake(result, folder, "unknown key")
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
    "push FOLDER me/x/y": "SF-HUB-MISSING",
    "tune FOLDER/run.yaml --out FOLDER/run.yaml": "SF-USE-OUTPUT",
    "init FOLDER/model FOLDER/data --out FOLDER/run.yaml": "SF-USE-OUTPUT",
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


def gallery() -> str:
    sections = []
    for name in (*MISTAKES, *TYPED):
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            sections.append(f"# {name}\n{shown(answer(Path(place), name), Path(place))}")
    return "\n".join(sections)


if __name__ == "__main__":
    GALLERY.write_text(gallery(), encoding="utf-8")


@click.command()
@model_options
@argument_or_option("data", "Records.", required=True)
@click.option("--only")
def measure(model: str, adapter: str | None, data: str, only: str | None) -> None:
    click.echo(f"{model} {adapter} {data} {only}")


@click.command()
@model_options
@argument_or_option("data", "Records.")
def lenient(model: str, adapter: str | None, data: str | None) -> None:
    click.echo(f"{model} {data}")


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_all_measurements_take_it_both_ways(name):
    command = evaluate.get_command(click.Context(evaluate), name)
    assert command is not None
    arguments = [one.name for one in command.params if isinstance(one, click.Argument)]
    options = [flag for one in command.params if isinstance(one, click.Option) for flag in one.opts]
    assert arguments[0] == "model"
    assert len(arguments) == 2
    assert f"--{arguments[1]}" in options


@pytest.mark.parametrize("words", [["m", "d", "--only", "x"], ["m", "--data", "d", "--only", "x"]])
def test_both_ways_mean_the_same(words):
    assert CliRunner().invoke(measure, words).output == "m None d x\n"


def test_twin_both_at_once_or_none_where_it_is_needed_is_refused():
    for words in (["m", "d", "--data", "d"], ["m"], []):
        assert CliRunner().invoke(measure, words).exit_code == 2
    assert CliRunner().invoke(lenient, ["m"]).output == "m None\n"
