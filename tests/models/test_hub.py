"""Models and adapters on the hub, read by the real client from a stub of the hub; refusals, offline, no room."""

from __future__ import annotations

import os
import subprocess
import sys

import huggingface_hub
import pytest

from helpers.hub_stub import BAD_TOKEN, GOOD_TOKEN, OUTSIDER, client_of, environment, go_offline, point_at, serve
from surefoot.models import folder as module
from surefoot.models.folder import find_model, resolve_folder
from surefoot.system import hardware
from surefoot.system import hub as faults
from surefoot.system import hub as fetch
from surefoot.system.errors import EnvironmentFault, InputError

FILES = {
    "config.json": "{}",
    "tokenizer.json": '{"model": {}}',  # unlike config.json: the cache keeps equal contents once
    "chat_template.jinja": "{{ x }}",
    "README.md": "text",
    "model-00001-of-00001.safetensors": "weights",
    "model.safetensors.index.json": "{}",
    "consolidated.safetensors": "the same weights again",
    "pytorch_model.bin": "pickle",
    "original/consolidated.00.pth": "pickle",
    "original/config.json": "{}",
}
ADAPTER = {"adapter_config.json": "{}", "adapter_model.safetensors": "x", "adapter_model.bin": "pickle"}


@pytest.fixture
def hub(tmp_path):
    with serve(tmp_path / "hub") as stub:
        stub.add("models", "org/model", FILES)
        stub.add("models", "org/adapter", ADAPTER)
        yield stub


@pytest.fixture
def client(hub, tmp_path):
    with client_of(hub, tmp_path / "cache") as patch:
        yield patch


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def refused(path="org/model", revision=None, *, weights=False):
    """(exit code, the line) that `resolve_folder` ends with."""
    with pytest.raises((InputError, EnvironmentFault)) as caught:
        resolve_folder(path, revision, weights=weights)
    line = str(caught.value)
    assert "\n" not in line
    assert not any(token in line for token in (GOOD_TOKEN, OUTSIDER, BAD_TOKEN))
    return caught.value.exit_code, line


class TestWhatIsFetched:
    def test_facts_alone(self, client):
        assert names(resolve_folder("org/model", weights=False)) == [
            "chat_template.jinja",
            "config.json",
            "tokenizer.json",
        ]

    def test_with_weights_but_never_pickles_or_the_same_weights_twice(self, hub, client):
        folder = resolve_folder("org/model", weights=True)
        assert "model-00001-of-00001.safetensors" in names(folder)
        assert not [name for name in names(folder) if "consolidated" in name or name.endswith((".bin", ".pth"))]
        assert not [path for path in hub.asked if path.endswith((".bin", ".pth"))]

    def test_fetching_everything_would_be_noticed(self, hub, client):
        client.setattr(module, "_WEIGHTS", ("*",))
        with pytest.raises(AssertionError):
            self.test_with_weights_but_never_pickles_or_the_same_weights_twice(hub, client)

    def test_an_adapter(self, client):
        assert names(resolve_folder("org/adapter", weights=True)) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]

    def test_a_branch_is_resolved_to_its_commit(self, hub, client):
        hub.revisions["v2"] = "v2"
        found = find_model("org/model", "v2", weights=False)
        assert found.commit == hub.commit("models", "org/model")
        assert any("/revision/v2" in path for path in hub.asked)
        assert find_model("org/model", found.commit, weights=False) == found

    def test_the_commit_stays_when_the_branch_moves(self, hub, client):
        before = find_model("org/model", weights=False)
        hub.add("models", "org/model", {"config.json": '{"changed": 1}'})
        after = find_model("org/model", weights=False)
        assert before.commit != after.commit
        assert (before.folder / "config.json").read_text() == "{}"
        assert find_model("org/model", before.commit, weights=False) == before


class TestGatedModels:
    """The four cases that look alike to the client: no token, bad token, licence not accepted, wrong name."""

    @pytest.fixture(autouse=True)
    def _gated(self, hub):
        hub.gated = {"org/model"}

    def test_no_token(self, client):
        code, line = refused()
        assert code == 3
        assert "is gated, and no token was sent" in line
        assert "https://huggingface.co/org/model" in line
        assert "hf auth login" in line

    def test_bad_token(self, client):
        client.setenv("HF_TOKEN", BAD_TOKEN)
        code, line = refused()
        assert code == 3
        assert "the hub does not accept the token" in line

    def test_licence_not_accepted(self, client):
        client.setenv("HF_TOKEN", OUTSIDER)
        code, line = refused()
        assert code == 3
        assert "its terms are not accepted" in line
        assert "https://huggingface.co/org/model" in line

    @pytest.mark.parametrize(("token", "says"), [(None, "no public model"), (GOOD_TOKEN, "no model of this name")])
    def test_wrong_name(self, client, token, says):
        if token:
            client.setenv("HF_TOKEN", token)
        code, line = refused("org/modle")
        assert code == 2
        assert says in line

    def test_access(self, client):
        client.setenv("HF_TOKEN", GOOD_TOKEN)
        assert names(resolve_folder("org/model", weights=False))

    def test_twin_that_asks_for_the_status_alone_mixes_them_up(self, client):
        client.setattr("huggingface_hub.get_token", lambda: GOOD_TOKEN)
        with pytest.raises(AssertionError):
            self.test_no_token(client)


class TestOtherRefusals:
    def test_wrong_revision(self, client):
        assert refused(revision="v9") == (
            2,
            "org/model: the model has no revision 'v9'; see https://huggingface.co/org/model/tree/main",
        )

    @pytest.mark.parametrize(
        ("status", "says"), [(403, "access is forbidden"), (500, "answered 500"), (429, "too many")]
    )
    def test_by_status(self, hub, client, status, says):
        hub.broken = {"/api/": status}
        code, line = refused()
        assert code == 3
        assert says in line

    def test_a_file_that_is_listed_and_not_there(self, hub, client):
        hub.broken = {"/resolve/": 404}
        assert refused()[0] == 2

    def test_a_download_that_is_cut_off(self, hub, client):
        client.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        hub.broken = {"tokenizer.json": "cut"}
        code, line = refused()
        assert code == 3
        assert "download" in line

    @pytest.mark.parametrize("place", ["/api/", "/resolve/"])
    def test_silence(self, hub, client, place):
        client.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        client.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 0.1)
        client.setattr(fetch, "_TIMEOUT", 0.1)
        hub.broken = {place: "silence"}
        code, line = refused()
        assert code == 3
        assert "does not answer in time" in line

    def test_no_room_is_found_before_the_download(self, hub, client):
        client.setattr(hardware, "free_disk", lambda folder: 3)
        code, line = refused(weights=True)
        assert code == 3
        assert "has 3 B free" in line
        assert not [path for path in hub.asked if "/resolve/" in path]


class TestWithoutHub:
    def test_the_cache_serves_when_the_hub_is_gone(self, client):
        folder = resolve_folder("org/model", weights=False)
        point_at(client, "http://127.0.0.1:9")
        assert resolve_folder("org/model", weights=False) == folder

    def test_the_cache_serves_offline_without_a_question(self, hub, client):
        folder = resolve_folder("org/model", weights=False)
        hub.asked.clear()
        go_offline(client)
        assert resolve_folder("org/model", weights=False) == folder
        assert hub.asked == []

    def test_offline_without_cache(self, hub, client):
        go_offline(client)
        code, line = refused()
        assert code == 3
        assert "HF_HUB_OFFLINE is set" in line
        assert hub.asked == []

    def test_unreachable_without_cache(self, client):
        point_at(client, "http://127.0.0.1:9")
        code, line = refused()
        assert code == 3
        assert "cannot be reached" in line

    @pytest.mark.parametrize("status", [401, 403, 404])
    def test_a_refusal_is_not_made_up_for_by_the_cache(self, hub, client, status):
        resolve_folder("org/model", weights=False)
        hub.broken = {"/api/": status}
        refused()

    @pytest.mark.parametrize("trouble", [429, 500, "silence", "gone"])
    def test_a_commit_from_the_cache_is_said(self, hub, client, caplog, trouble):
        client.setattr(fetch, "_TIMEOUT", 0.1)
        commit = find_model("org/model", weights=False).commit
        assert not caplog.messages
        hub.add("models", "org/model", {"config.json": '{"changed": 1}'})
        hub.broken = {"/api/": trouble}
        if trouble == "gone":
            point_at(client, "http://127.0.0.1:9")
        assert find_model("org/model", weights=False).commit == commit
        why = {"silence": "does not answer in time", "gone": "cannot be reached"}.get(trouble, f"answered {trouble}")
        (caution,) = caplog.messages
        assert (
            caution
            == f"org/model: the hub {why}, so it is read at commit {commit}, the last that the cache knows as main"
        )

    def test_a_hub_that_breaks_between_two_questions(self, hub, client):
        """The client would take the commit that the cache knows, and say nothing."""
        old = find_model("org/model", weights=False).commit
        hub.add("models", "org/model", {"config.json": '{"changed": 1}'})
        hub.broken = {"/revision/main": 500}
        assert find_model("org/model", weights=False).commit == hub.commit("models", "org/model") != old

    def test_a_cache_without_a_listing_shows_its_gaps(self, hub, client, tmp_path):
        hub.add("models", "org/parts", {f"model-0000{part}-of-00003.safetensors": "x" * part for part in (1, 2, 3)})
        hub.add("models", "org/parts", {"config.json": "{}"})
        for name in ("config.json", "model-00002-of-00003.safetensors"):
            huggingface_hub.hf_hub_download("org/parts", name)
        go_offline(client)
        assert resolve_folder("org/parts", weights=False).is_dir()
        code, line = refused("org/parts", weights=True)
        assert (code, "its weights are not all in the cache: 1 of 3 files of model" in line) == (3, True)

    def test_a_cache_with_facts_is_not_a_cache_with_weights(self, client):
        resolve_folder("org/model", weights=False)
        go_offline(client)
        assert "not wholly" in refused(weights=True)[1]
        assert resolve_folder("org/model", weights=False).is_dir()


class TestFolders:
    def test_a_folder_is_taken_as_it_is(self, tmp_path):
        assert find_model(str(tmp_path), weights=True) == module.FoundModel(tmp_path, None)

    def test_it_has_no_revision(self, tmp_path):
        assert "revision" in refused(str(tmp_path), "main")[1]

    @pytest.mark.parametrize("path", ["./missing", "/no/such/folder", "missing", "a/b/c", "../x", "tests/missing"])
    def test_a_missing_one_is_not_asked_for_at_the_hub(self, hub, client, path):
        code, line = refused(path)
        assert code == 2
        assert "does not exist" in line
        assert hub.asked == []


def test_a_command_ends_in_one_line_without_traceback_or_token(hub, tmp_path):
    """The real process: environment variables, exit code, streams."""
    hub.gated = {"org/model"}
    settings = {**os.environ, **environment(hub, tmp_path / "cache"), "HF_TOKEN": OUTSIDER}
    command = [sys.executable, "-m", "surefoot", "generate", "org/model", "--prompt", "hello"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 3
    assert "its terms are not accepted" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert OUTSIDER not in done.stdout + done.stderr
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and OUTSIDER in path.read_text()]


def test_the_nouns_cover_both_kinds():
    assert set(faults.NOUN) == {"model", "dataset"}
