"""What docs/configuration.md shows is what surefoot accepts and prints."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.configs import write_config
from surefoot.commands.main import main
from surefoot.config.overrides import expand_short_forms
from surefoot.config.problems import shape_problems
from surefoot.config.yaml_reader import parse_yaml

GUIDE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_configs_are_complete() -> None:
    texts = re.findall(r"^```yaml\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
    assert texts
    for text in texts:
        document, faults = parse_yaml(text, "run.yaml")
        assert faults == []
        assert shape_problems(expand_short_forms(document.data)) == []


def test_the_error_looks_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, learning_rte="1e-4")
    assert CliRunner().invoke(main, ["train", "run.yaml"]).stderr in GUIDE
