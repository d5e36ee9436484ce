"""Every fault carries the code of its kind; codes, docs and source agree."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import surefoot
from surefoot.commands.keys import explain_code
from surefoot.commands.terminal import fault_lines
from surefoot.system.error_codes import CODES
from surefoot.system.errors import Fault, InputError

SOURCE = Path(surefoot.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
TABLE = SOURCE / "system" / "error_codes.py"
PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")


def nodes_of(text: str, word: str) -> Iterator[ast.AST]:
    """The syntax of a module, or nothing if the word does not occur in it."""
    return ast.walk(ast.parse(text)) if word in text else iter(())


def faults_without_code(text: str) -> list[int]:
    """Lines of the calls of Fault that are given no code."""
    calls = [node for node in nodes_of(text, "Fault") if isinstance(node, ast.Call)]
    faults = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Fault"]
    return [call.lineno for call in faults if len(call.args) < 4 and "code" not in {word.arg for word in call.keywords}]


def codes_in(text: str) -> set[str]:
    """The text constants of a module that look like codes."""
    constants = (node.value for node in nodes_of(text, "SF-") if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and value.startswith("SF-") and " " not in value}


def test_the_page_lists_every_code_with_its_cause_and_remedy():
    assert [line for line in PAGE.splitlines() if line.startswith("| `SF-")] == [
        f"| `{code}` | {one.cause} | {one.remedy} |" for code, one in CODES.items()
    ]


def test_an_error_ends_with_its_code():
    (line,) = fault_lines(Fault("data.train", "0 records", code="SF-DATA-EMPTY"))
    assert line.endswith(" [SF-DATA-EMPTY]")
    (line,) = fault_lines(Fault("no-such.yaml:3", "unknown key", code="SF-CONFIG-KEY"))
    assert line.endswith(" [SF-CONFIG-KEY]")


def test_a_code_is_explained():
    assert CODES["SF-MEMORY"].remedy in explain_code("SF-MEMORY")
    assert set(CODES) == {line.split()[0] for line in explain_code("SF").splitlines()}


def test_an_unknown_code_is_refused_with_a_near_one():
    with pytest.raises(InputError) as caught:
        explain_code("SF-MEMORI")
    assert "SF-MEMORY" in caught.value.faults[0].fix


def test_every_fault_is_given_a_code():
    own = [path for path in MODULES if path.name != "errors.py"]  # a text alone becomes a fault there
    found = {path.stem: faults_without_code(path.read_text(encoding="utf-8")) for path in own}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_every_code_is_in_the_table_and_used():
    assert set().union(*(codes_in(path.read_text(encoding="utf-8")) for path in MODULES if path != TABLE)) == set(CODES)


def test_twin_a_fault_without_code_and_a_code_of_no_table_are_seen():
    assert faults_without_code('x = 1\nraise InputError(Fault("a", "b", "c"))') == [2]
    assert codes_in('Fault("a", "b", code="SF-NO-SUCH")') - set(CODES) == {"SF-NO-SUCH"}
