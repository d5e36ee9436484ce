"""An adapter's base: a relative path is looked for where the run lies, and never taken for a stranger's hub id."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.adapter_runs import a_plan, a_run
from helpers.faults import gives, raises_fault
from helpers.hub_stub import client_of, serve
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.methods import provenance
from surefoot.methods.open_model import open_for_use
from surefoot.models.save import ADAPTER_WEIGHTS


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("open") / "base")


@pytest.fixture
def hub(tmp_path):
    with serve(tmp_path / "hub") as stub, client_of(stub, tmp_path / "cache"):
        yield stub


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder that holds neither the run nor its base."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def test_a_relative_base_is_found_from_another_folder(hub, base, tmp_path, elsewhere):
    shutil.copytree(base, tmp_path / "project" / "models" / "base")
    run = a_run(tmp_path / "project" / "runs" / "one", base, a_plan(), named="models/base")
    assert gives(open_for_use(str(run)).described, "models/base")
    assert hub.asked == []


def test_a_run_whose_base_is_gone_does_not_ask_the_hub(hub, base, tmp_path, elsewhere):
    hub.add("models", "models/base", {path.name: path.read_bytes() for path in base.iterdir()})
    run = a_run(tmp_path / "project" / "runs" / "one", base, a_plan(), named="models/base")
    with raises_fault("SF-ADAPTER-FIT", run / "adapter_config.json", "models/base", remedy=["--adapter", str(run)]):
        open_for_use(str(run))
    assert hub.asked == []


def test_twin_without_the_runs_record_opens_the_strangers_model(hub, base, tmp_path, elsewhere, monkeypatch):
    monkeypatch.setattr(provenance, "saved_plan", lambda folder: None)
    with pytest.raises(pytest.fail.Exception):
        test_a_run_whose_base_is_gone_does_not_ask_the_hub(hub, base, tmp_path, elsewhere)


class TestAdapterOnTheHub:
    @pytest.fixture
    def adapter(self, hub, base, tmp_path):
        made = a_run(tmp_path / "made", base, named="org/base")
        hub.add("models", "org/base", {path.name: path.read_bytes() for path in base.iterdir()})
        hub.add("models", "org/adapter", {path.name: path.read_bytes() for path in made.iterdir() if path.is_file()})

    def test_generate_finds_it_and_its_base(self, hub, adapter):
        done = CliRunner().invoke(main, ["generate", "org/adapter", "--prompt", "hello", "--max-new-tokens", "2"])
        assert done.exit_code == 0, done.output
        assert [line for line in hub.asked if line.endswith(ADAPTER_WEIGHTS)]

    def test_a_base_without_access_says_whose_base_it_is(self, hub, adapter):
        hub.gated = {"org/base"}
        done = CliRunner().invoke(main, ["generate", "org/adapter", "--prompt", "hello"])
        assert done.exit_code == 3
        assert "[SF-ADAPTER-FIT]" in done.output
        assert gives(done.output, "org/base")

    def test_a_base_at_a_revision(self, hub, adapter, base):
        config = json.loads((hub.root / "models/org/adapter/adapter_config.json").read_text())
        commit = hub.commit("models", "org/base")
        hub.add("models", "org/adapter", {"adapter_config.json": json.dumps(config | {"revision": commit})})
        open_for_use("org/adapter")
        assert [line for line in hub.asked if f"/resolve/{commit}/config.json" in line]
