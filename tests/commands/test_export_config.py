"""`surefoot export --as`: another tool's config in a folder, with an account, never over a file of someone else's."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from helpers.faults import prints_fault
from surefoot.commands.main import main
from surefoot.config.yaml_reader import read_yaml
from surefoot.interop.export import targets

CONFIG = """\
stage: sft
model: org/small
adapter: {kind: lora, rank: 4}
data: {train: data/d.json, eval: 0.1}
optim: {lr: 3e-4, schedule: constant}
guard: {rollback: "on"}
output: runs/mine
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/d.json").write_text(json.dumps([{"instruction": "say", "output": "no"}] * 3))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(main, [*words])


@pytest.mark.parametrize("tool", targets())
def test_it_writes_a_config_of_theirs_and_what_is_lost(there: Path, tool: str) -> None:
    result = run("export", "--as", tool, "run.yaml", "--out", "theirs")
    assert result.exit_code == 0, result.stderr
    settings = read_yaml(there / f"theirs/{tool}.yaml").data
    assert settings["learning_rate"] == 3e-4
    record = json.loads((there / "theirs/export.json").read_text())
    fates = {key["key"]: key["outcome"] for key in record["keys"]}
    assert fates["optim.lr"] == fates["adapter.rank"] == fates["model.path"] == "carried"
    assert fates["guard.rollback"] == "lost"
    assert "guard.rollback" in result.stdout
    assert f"theirs/{tool}.yaml" in shlex.split(result.stdout.splitlines()[-1])
    assert run("verify", "theirs").exit_code == 0
    back = run("translate", "--", *shlex.split(result.stdout.splitlines()[-1]))
    assert back.exit_code == 0, back.stderr
    assert "lr: 0.0003" in back.stdout


def test_the_format_is_read_from_the_file(there: Path) -> None:
    run("export", "--as", "llamafactory", "run.yaml", "--out", "theirs")
    described = json.loads((there / "theirs/dataset_info.json").read_text())
    assert described["d"]["columns"] == {"prompt": "instruction", "response": "output"}
    assert described["d"]["file_name"] == "../data/d.json"


def test_nothing_of_someone_else_is_written_over(there: Path) -> None:
    before = (there / "data/d.json").read_bytes()
    result = run("export", "--as", "trl", "run.yaml", "--out", "data", "--overwrite")
    assert result.exit_code == 2
    assert prints_fault(result.stderr, "SF-USE-OUTPUT", "data")
    assert (there / "data/d.json").read_bytes() == before
    assert sorted(path.name for path in (there / "data").iterdir()) == ["d.json"]
    assert run("export", "--as", "trl", "run.yaml", "--out", "theirs").exit_code == 0
    assert run("export", "--as", "trl", "run.yaml", "--out", "theirs").exit_code == 2
    assert run("export", "--as", "trl", "run.yaml", "--out", "theirs", "--overwrite").exit_code == 0
    (there / "theirs/mine.txt").write_text("mine")
    assert run("export", "--as", "trl", "run.yaml", "--out", "theirs", "--overwrite").exit_code == 2
    assert (there / "theirs/mine.txt").read_text() == "mine"


def test_flags_for_models_are_refused_beside_it(there: Path) -> None:
    assert run("export", "--as", "trl", "run.yaml", "--out", "theirs", "--merge").exit_code == 2
    assert not (there / "theirs").exists()


def test_a_stage_that_the_tool_lacks_is_told_and_writes_nothing(there: Path) -> None:
    (there / "run.yaml").write_text(CONFIG.replace("stage: sft", "stage: ppo\nppo: {reward: runs/r}"))
    result = run("export", "--as", "trl", "run.yaml", "--out", "theirs")
    assert result.exit_code == 2
    assert (
        prints_fault(result.stderr, "SF-TRANSLATE-SETTING", "run.yaml:1:1") or "SF-TRANSLATE-SETTING" in result.stderr
    )
    assert not (there / "theirs").exists()
