"""A run on the hub's names: read at one commit, recorded, resumed at it although the branch has moved."""

import json
import re

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from helpers.faults import gives
from helpers.hub_stub import client_of, go_offline, serve
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.config.load import load_config
from surefoot.config.schema import AdapterConfig
from surefoot.methods.open_model import open_for_use
from surefoot.models.save import ADAPTER_WEIGHTS
from surefoot.runs import prepare, revisions
from surefoot.runs.revisions import Commit, Name, commits_from_json, commits_to_json, hub_names, pin
from surefoot.system import hub as hub_client

RECORDS = [{"instruction": f"Say {word}.", "output": word} for word in ("one", "two", "heron", "sky")]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("hub") / "base")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path, base):
    with serve(tmp_path / "hub") as stub, client_of(stub, tmp_path / "cache"):
        stub.add("models", "org/base", base)
        stub.add("datasets", "org/data", {"train.jsonl": LINES})
        yield stub


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    values = {
        "stage": "sft",
        "model": "org/base",
        "adapter": {"kind": "lora", "rank": 2},
        "data": {"train": "org/data", "max_length": 64},
        "batch": {"size": 2},
        "duration": "1 steps",
        "output": str(tmp_path / "out"),
    }
    path.write_text(yaml.safe_dump(values))
    return path


def train(config, *arguments):
    return CliRunner().invoke(main, ["train", str(config), *arguments])


def recorded(config):
    return json.loads((config.parent / "out" / "data.json").read_text())["hub"]


def move_branches(hub):
    """Other examples, and a file more beside the weights: both names mean other commits now."""
    hub.add("datasets", "org/data", {"train.jsonl": LINES.replace("heron", "stork")})
    hub.add("models", "org/base", {"NOTES.md": "new"})


class TestARun:
    def test_records_the_commits_that_it_read(self, hub, config):
        done = train(config)
        assert done.exit_code == 0, done.output
        commits = {(one["kind"], one["name"], one["revision"]): one["commit"] for one in recorded(config)}
        assert commits == {
            ("model", "org/base", None): hub.commit("models", "org/base"),
            ("dataset", "org/data", None): hub.commit("datasets", "org/data"),
        }
        data = json.loads((config.parent / "out" / "data.json").read_text())
        assert data["train"]["sources"][0]["commit"] == commits["dataset", "org/data", None]
        adapter = json.loads((config.parent / "out" / "adapter_config.json").read_text())
        assert (adapter["base_model_name_or_path"], adapter["revision"]) == (
            "org/base",
            commits["model", "org/base", None],
        )
        kept = yaml.safe_load((config.parent / "out" / "config.yaml").read_text())
        assert (kept["model"]["path"], kept["model"]["revision"]) == ("org/base", None)

    def test_resumes_at_them_although_the_branches_moved(self, hub, config):
        assert train(config).exit_code == 0
        before = recorded(config)
        move_branches(hub)
        done = train(config, "--resume", "duration=2 steps")
        assert done.exit_code == 0, done.output
        assert recorded(config) == before

    def test_twin_that_asks_the_hub_again_is_refused_the_other_data(self, hub, config, monkeypatch):
        assert train(config).exit_code == 0
        move_branches(hub)
        monkeypatch.setattr(prepare, "saved_commits", lambda path: {})
        done = train(config, "--resume", "duration=2 steps")
        assert done.exit_code == 4
        assert "[SF-RESUME-CHANGED]" in done.output

    def test_asks_each_name_once_and_then_no_more_of_it(self, hub, config):
        assert train(config).exit_code == 0
        questions = [line for line in hub.asked if line.startswith("GET /api/models/org/base") and "/tree/" not in line]
        assert len(questions) == 2  # here, with a limit of time, and by the client itself

    def test_its_adapter_finds_the_base_on_the_hub_at_the_commit(self, hub, config):
        assert train(config).exit_code == 0
        move_branches(hub)
        opened = open_for_use(str(config.parent / "out"))
        assert gives(opened.described, "org/base")
        assert not [line for line in hub.asked if "NOTES.md" in line]

    def test_reads_its_first_adapter_at_one_commit(self, hub, config, tmp_path, monkeypatch):
        assert train(config, "optim.lr=1e-12", "optim.weight_decay=0").exit_code == 0
        names = ("adapter_config.json", ADAPTER_WEIGHTS)
        files = {name: (tmp_path / "out" / name).read_bytes() for name in names}
        hub.add("models", "org/adapter", files)
        first = hub.commit("models", "org/adapter")
        moved = load_file(tmp_path / "out" / ADAPTER_WEIGHTS)
        save_file({name: tensor + 1 for name, tensor in moved.items()}, tmp_path / "moved")
        planned = prepare.plan_of

        def moves(*arguments):
            """The branch moves after the commit was looked up, before the weights are loaded."""
            hub.add("models", "org/adapter", files | {ADAPTER_WEIGHTS: (tmp_path / "moved").read_bytes()})
            return planned(*arguments)

        monkeypatch.setattr(prepare, "plan_of", moves)
        words = ("adapter.initial=org/adapter", "optim.lr=1e-12", "optim.weight_decay=0", "--overwrite")
        result = train(config, *words)
        assert result.exit_code == 0, result.output
        assert hub.commit("models", "org/adapter") != first
        assert ("org/adapter", first) in [(one["name"], one["commit"]) for one in recorded(config)]

        def is_first():
            after = load_file(tmp_path / "out" / ADAPTER_WEIGHTS)
            return all(torch.allclose(after[name], moved[name], rtol=0, atol=1e-6) for name in moved)

        assert is_first()
        hub.add("models", "org/adapter", files)
        unpinned = AdapterConfig.model_copy  # the twin: the commit is not written down
        monkeypatch.setattr(AdapterConfig, "model_copy", lambda self, update: unpinned(self, update={}))
        assert train(config, *words).exit_code == 0
        assert not is_first()

    def test_says_and_records_that_the_hub_was_away(self, hub, config):
        assert train(config).exit_code == 0
        hub.broken = {"/api/": 503}
        done = train(config, "--overwrite")
        assert done.exit_code == 0, done.output
        for one in recorded(config):
            assert one["caution"].startswith(f"{one['name']}: ")
            assert {"503", one["commit"]} <= set(re.findall(r"\w+", one["caution"]))
            assert done.output.count(one["caution"]) == 1
        hub.broken = {}
        before = recorded(config)
        assert train(config, "--resume", "duration=2 steps").exit_code == 0
        assert recorded(config) == before

    def test_offline_from_the_cache(self, hub, config, monkeypatch):
        assert train(config).exit_code == 0
        before, hub.asked[:] = recorded(config), []
        go_offline(monkeypatch)
        done = train(config, "--overwrite")
        assert done.exit_code == 0, done.output
        assert (recorded(config), hub.asked) == (before, [])

    def test_an_entry_of_a_description_is_read_at_its_commit_too(self, hub, config, tmp_path, monkeypatch):
        (tmp_path / "named").mkdir()
        (tmp_path / "named" / "dataset_info.json").write_text(json.dumps({"it": {"hf_hub_url": "org/data"}}))
        entry = f"data.train={{path: {tmp_path / 'named'}, name: it}}"
        assert train(config, entry).exit_code == 0
        before = recorded(config)
        assert ("org/data", hub.commit("datasets", "org/data")) in [(one["name"], one["commit"]) for one in before]
        move_branches(hub)
        done = train(config, entry, "--resume", "duration=2 steps")
        assert done.exit_code == 0, done.output
        assert recorded(config) == before
        monkeypatch.setattr(revisions, "hub_data_name", lambda source: None)  # the twin
        done = train(config, entry, "--resume", "duration=3 steps")
        assert done.exit_code == 4
        assert "[SF-RESUME-CHANGED]" in done.output


class TestPin:
    @pytest.fixture
    def asked(self, config, monkeypatch):
        calls = []

        def look_up(name, kind, revision):
            calls.append(Name(kind, name, revision))
            return hub_client.Repository(name, kind, revision, "c" * 40, config.parent, {})

        monkeypatch.setattr(revisions, "look_up", look_up)
        return calls

    def test_only_what_is_not_known_is_asked_for(self, config, asked):
        known = {Name("model", "org/base", None): Commit("a" * 40, "why")}
        pinned, commits = pin(load_config(config).config, known)
        assert (pinned.model.revision, pinned.data.train[0].revision) == ("a" * 40, "c" * 40)
        assert asked == [Name("dataset", "org/data", None)]
        assert commits_from_json(commits_to_json(commits)) == commits

    def test_a_revision_of_ones_own_is_another_name(self, config, asked):
        known = {Name("model", "org/base", None): Commit("a" * 40, "why")}
        pinned, _ = pin(load_config(config, ["model.revision=v2"]).config, known)
        assert pinned.model.revision == "c" * 40
        assert Name("model", "org/base", "v2") in asked

    def test_folders_and_files_stay_as_they_are(self, config, asked, tmp_path, base):
        (tmp_path / "base").mkdir()
        for name, body in base.items():
            (tmp_path / "base" / name).write_bytes(body)
        (tmp_path / "train.jsonl").write_text(LINES)
        local = load_config(config, [f"model={tmp_path / 'base'}", f"data.train={tmp_path / 'train.jsonl'}"]).config
        assert pin(local, {}) == (local, {})
        assert asked == []


class TestHubNames:
    def test_models_and_data_sets_each_once(self, config):
        held = load_config(config, ["stage=dpo", "alignment.reference=org/base"]).config
        assert hub_names(held) == ["org/base", "org/data"]
        changes = ["stage=ppo", "ppo.max_new_tokens=8", "ppo.reward=score.py:vowels", "ppo.critic=org/critic"]
        assert hub_names(load_config(config, changes).config) == ["org/base", "org/critic", "org/data"]

    def test_the_adapter_that_training_starts_from(self, config):
        held = load_config(config, ["adapter.initial=org/adapter"]).config
        assert hub_names(held) == ["org/base", "org/adapter", "org/data"]

    def test_what_lies_here_and_words_are_none(self, config, tmp_path):
        (tmp_path / "base").mkdir()
        (tmp_path / "train.jsonl").write_text(LINES)
        (tmp_path / "base" / "config.json").write_text("{}")
        changes = [f"model={tmp_path / 'base'}", f"data.train={tmp_path / 'train.jsonl'}", "data.eval=0.1"]
        assert hub_names(load_config(config, changes).config) == []

    def test_an_entry_of_a_description_that_names_a_data_set(self, config, tmp_path):
        (tmp_path / "named").mkdir()
        (tmp_path / "named" / "dataset_info.json").write_text(json.dumps({"it": {"hf_hub_url": "org/other"}}))
        entry = f"data.train={{path: {tmp_path / 'named'}, name: it}}"
        assert hub_names(load_config(config, [entry]).config) == ["org/base", "org/other"]
