"""What a shell is offered at TAB, asked as the shells ask, and what answering imports.
`surefoot explain` answers on stdout; an unknown key is an error with the nearest name.
`surefoot schema` prints the schema that the tests of the config check against an independent validator.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from surefoot.commands.main import COMMANDS, main
from surefoot.config.explain import explain_all, explain_key
from surefoot.config.keys import config_schema

PROGRAM = "from surefoot.commands.main import main; main(prog_name='surefoot')"


OFFERED = {
    ("surefoot ver", 1): ["verify"],
    ("surefoot train --res", 2): ["--resume"],
    ("surefoot completion z", 2): ["zsh"],
    ("surefoot explain adapter.ra", 2): ["adapter.rank"],
    ("surefoot train run.yaml optim.l", 3): ["optim.lr="],
    ("surefoot plan run.yaml seed=1 optim.l", 4): ["optim.lr="],
    ("surefoot train run.yaml data.template = ll", 5): ["llama2", "llama3"],  # bash breaks words at =
    ("surefoot train run.yaml data.template=ll", 3): ["data.template=llama2", "data.template=llama3"],
    ("surefoot train run.yaml data.format=sh", 3): ["data.format=sharegpt"],
    ("surefoot train run.yaml precision.tf32=o", 3): ["precision.tf32=off", "precision.tf32=on"],
    ("surefoot train run.yaml adapter.rslora=", 3): ["adapter.rslora=false", "adapter.rslora=true"],
    ("surefoot train run.yaml optim.lr=", 3): [],
    ("surefoot train run.yaml no.such=", 3): [],
}


HEAVY = {"torch", "transformers", "numpy", "peft", "matplotlib", "rich", "datasets"}
# Answers each question as bash asks it: the words so far, and which of them is incomplete.
ASKED = """
import contextlib, io, json, os, sys
from surefoot.commands.main import main
FIRST
os.environ["_SUREFOOT_COMPLETE"] = "bash_complete"
for words, count in json.load(sys.stdin):
    os.environ |= {"COMP_WORDS": words, "COMP_CWORD": str(count)}
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())) as said, contextlib.suppress(SystemExit):
        main(prog_name="surefoot")
    lines = said.buffer.getvalue().decode().splitlines()
    print(json.dumps([line.partition(",")[2] for line in lines if line]))
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def complete(questions, folder: Path | None = None, first: str = "") -> tuple[list[list[str]], set[str]]:
    """What is offered for each question, and what was imported to answer all of them. first: a line run before."""
    command = [sys.executable, "-c", ASKED.replace("FIRST", first)]
    asked = json.dumps(list(questions))
    result = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=folder)
    assert result.stderr == ""
    *offered, modules = map(json.loads, result.stdout.splitlines())
    return [sorted(words) for words in offered], set(modules)


def test_what_is_offered_and_nothing_heavy_is_imported() -> None:
    offered, modules = complete(OFFERED)
    assert offered == [*OFFERED.values()]
    assert not HEAVY & modules


def test_configs_are_yaml_files_every_command_is_offered_and_a_heavy_import_would_be_seen(tmp_path: Path) -> None:
    for name in ("run.yaml", "rest.yml", "readme.md", ".hidden.yaml", "runs/deep.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    questions = [("surefoot train r", 2), ("surefoot plan runs/", 2), ("surefoot plan nowhere/", 2), ("surefoot ", 1)]
    offered, modules = complete(questions, tmp_path, first="import numpy")
    assert offered == [["rest.yml", "run.yaml", "runs/"], ["runs/deep.yaml"], [], sorted(COMMANDS)]
    assert "numpy" in modules


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_the_shell_can_read(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert "_SUREFOOT_COMPLETE" in result.stdout
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=result.stdout, text=True, check=True)


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    script = CliRunner().invoke(main, ["completion", "bash"]).stdout
    asked = (
        f"{script}\nCOMP_WORDS=(surefoot train run.yaml optim.l); COMP_CWORD=3\n"
        '_surefoot_completion surefoot\necho "${COMPREPLY[@]}"\n'
    )
    (tmp_path / "surefoot").write_text(f"#!{sys.executable}\n{PROGRAM}\n")
    (tmp_path / "surefoot").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, env=env)
    assert result.stdout == "optim.lr=\n"


@pytest.mark.parametrize("key", ["optim.lr", "sft.loss"])
def test_one_key(key: str) -> None:
    """Also one that begins like an error's code."""
    result = CliRunner().invoke(main, ["explain", key])
    assert (result.exit_code, result.stdout, result.stderr) == (0, explain_key(key) + "\n", "")


def test_all_keys() -> None:
    assert CliRunner().invoke(main, ["explain"]).stdout == explain_all() + "\n"


@pytest.mark.parametrize("key", ["learning_rate", "optim.lrr", "zebra"])
def test_unknown_key(key: str) -> None:
    result = CliRunner().invoke(main, ["explain", key])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("[SF-CONFIG-KEY]\n")
    assert ("optim.lr?" in result.stderr) is (key != "zebra")


def test_schema_is_printed_as_plain_ascii_json() -> None:
    result = CliRunner().invoke(main, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(json.dumps(config_schema()))
    assert result.stdout.isascii(), "a redirect on any system gives a file that editors can read"
    jsonschema.Draft202012Validator.check_schema(json.loads(result.stdout))
