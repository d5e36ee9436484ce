"""An audit that could not look a package up is not a clean one."""

import sys
from pathlib import Path

import pytest

import audit

CLEAN = {"name": "click", "version": "8.5.1", "vulns": []}
HOLE = {"name": "jinja2", "version": "3.1.4", "vulns": [{"id": "CVE-2024-56326", "fix_versions": ["3.1.5"]}]}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found"}
ANSWERS = """\
import json, sys
print(json.dumps({"dependencies": %r}))
"""


@pytest.mark.parametrize(
    ("packages", "line", "code"),
    [
        ([CLEAN], "1 packages, no known vulnerability", 0),
        ([CLEAN, HOLE, SKIPPED], "jinja2 3.1.4: CVE-2024-56326, fixed in 3.1.5", audit.KNOWN),
        ([CLEAN, SKIPPED], "gave no answer about 1 of 2 packages: nothing is known of them", audit.NOT_ASKED),
    ],
)
def test_what_is_said_of_an_answer(packages: list[dict[str, object]], line: str, code: int) -> None:
    lines, found = audit.verdict(packages, "")
    assert (len(lines), found) == (1, code)
    assert line in lines[0]


def test_a_program_that_answers_and_one_that_does_not(tmp_path: Path) -> None:
    program = tmp_path / "pip-audit"
    program.write_text(f"#!{sys.executable}\n" + ANSWERS % [CLEAN])
    program.chmod(0o755)
    assert audit.answer(str(program)) == ([CLEAN], "")
    program.write_text("#!/bin/sh\necho Traceback >&2\necho ConnectionError: no route >&2\nexit 1\n")
    lines, code = audit.verdict(*audit.answer(str(program)))
    assert code == audit.NOT_ASKED
    assert "ConnectionError: no route" in lines[0]
