"""`surefoot doctor` as a user meets it."""

import json
import os
import re

import pytest
from click.testing import CliRunner

from helpers.doctor_runs import clean_base, clean_run
from surefoot.commands.doctor.findings import CODES
from surefoot.commands.main import main
from surefoot.config.dump import dump_config


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return clean_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def config(tmp_path, base):
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(clean_run(tmp_path, base)))
    return path


def doctor(*words):
    return CliRunner().invoke(main, ["doctor", *map(str, words)])


def test_a_clean_run_says_so_and_exits_with_0(config, tmp_path):
    before = sorted(os.listdir(tmp_path))
    found = doctor(config)
    assert found.exit_code == 0, found.output
    assert set(CODES) <= {line.split()[0] for line in found.output.splitlines()}
    assert sorted(os.listdir(tmp_path)) == before


def test_json_holds_every_check_and_nothing_else_is_on_stdout(config, tmp_path):
    """A fix names the config that was examined."""
    rows = json.loads((tmp_path / "train.json").read_text())
    (tmp_path / "train.json").write_text(json.dumps([*rows, rows[0]]))
    found = doctor(config, "seed=7", "--json")
    told = json.loads(found.stdout)
    assert told["exit_code"] == found.exit_code == 0
    assert told["format"] == 1
    assert {"code", "verdict", "where", "value", "limit", "fix", "gain"} == told["checks"][0].keys()
    assert told["facts"]["measurements"]["products"].keys() == {"fp32", "bf16"}
    (fix,) = [one["fix"] for one in told["checks"] if one["code"] == "DATA-AUDIT"]
    assert fix.endswith(f"`surefoot data {config} seed=7`")


def test_what_the_run_would_be_refused_for_has_its_code_and_its_exit_code(config):
    found = doctor(config, "adapter.targets=[q_prj]")
    assert found.exit_code == 2
    assert "ADAPTER-TARGETS" in found.output
    assert re.findall(r"\d+", found.output.splitlines()[-1]) == ["1", "0"]  # faults, cautions


def test_a_config_that_cannot_be_read_is_refused_as_everywhere(config):
    config.write_text("stage: sft\nmodle: x\n")
    found = doctor(config)
    assert found.exit_code == 2
    assert f"{config}:2:1" in found.stderr
