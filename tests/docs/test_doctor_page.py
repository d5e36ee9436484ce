"""docs/doctor.md has every code as it is, and its commands are commands."""

import re
import shlex

from click.testing import CliRunner

from helpers.doc_pages import ROOT, table
from surefoot.commands.doctor.findings import BACKWARD, CODES, FORMAT
from surefoot.commands.main import main
from surefoot.planning.probes.timing import LIMITS
from surefoot.system.variables import VARIABLES

PAGE = ROOT / "docs" / "doctor.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_is_that_of_the_code():
    rows = table(PAGE, "code", "what is looked at", "limit", "exit")
    assert [tuple(row) for row in rows] == [
        (f"`{name}`", code.what, code.limit, str(code.exit_code or "")) for name, code in CODES.items()
    ]


def test_its_numbers_are_those_of_the_code():
    assert f"more than {BACKWARD} times" in TEXT
    assert f"`format` is {FORMAT}" in TEXT
    cpu, cuda = LIMITS["cpu"].seconds, LIMITS["cuda"].seconds
    assert f"less than {cpu:g} seconds on a CPU and less than {cuda:g} on a GPU" in TEXT


def test_variables_that_it_names_are_known():
    for name in re.findall(r"`([A-Z]+_[A-Z_]+)`", TEXT):
        assert name in VARIABLES


def test_its_commands_are_understood():
    lines = re.findall(r"^surefoot (doctor.*)$", TEXT, flags=re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(line, comments=True)
        found = CliRunner().invoke(main, [*words, "--help"])
        assert found.exit_code == 0, line
