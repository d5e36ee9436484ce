"""`surefoot explain` answers on stdout; an unknown key is an error with the nearest name."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from surefoot.commands.main import main
from surefoot.config.explain import explain_all, explain_key


def test_one_key() -> None:
    result = CliRunner().invoke(main, ["explain", "optim.lr"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, explain_key("optim.lr") + "\n", "")


def test_all_keys() -> None:
    assert CliRunner().invoke(main, ["explain"]).stdout == explain_all() + "\n"


@pytest.mark.parametrize(
    ("key", "fix"),
    [("learning_rate", "did you mean optim.lr?"), ("optim.lrr", "did you mean optim.lr?"), ("zebra", "lists all keys")],
)
def test_unknown_key(key: str, fix: str) -> None:
    result = CliRunner().invoke(main, ["explain", key])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: no config key is called {key}; ")
    assert result.stderr.endswith(f"{fix} [SF-CONFIG-KEY]\n")
