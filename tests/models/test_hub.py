"""Models and adapters on the hub, read by the real client from a stub of the hub; refusals, offline, no room."""

from __future__ import annotations

import os
import subprocess
import sys

import huggingface_hub
import pytest

from helpers.hub_stub import BAD_TOKEN, GOOD_TOKEN, OUTSIDER, client_of, environment, go_offline, point_at, serve
from surefoot.models import folder as module
from surefoot.models.folder import resolve_folder
from surefoot.system import hardware
from surefoot.system import hub as fetch
from surefoot.system.errors import EnvironmentFault, Fault, InputError

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


def refused(path="org/model", revision=None, *, weights=False) -> tuple[int, str, Fault]:
    """Exit code, kind and fault that `resolve_folder` ends with; no token is in its line."""
    with pytest.raises((InputError, EnvironmentFault)) as caught:
        resolve_folder(path, revision, weights=weights)
    line = str(caught.value)
    assert "\n" not in line
    assert not any(token in line for token in (GOOD_TOKEN, OUTSIDER, BAD_TOKEN))
    (fault,) = caught.value.faults
    return caught.value.exit_code, fault.code, fault


class TestWhatIsFetched:
    def test_facts_alone_and_an_adapter(self, client):
        facts = ["chat_template.jinja", "config.json", "tokenizer.json"]
        assert names(resolve_folder("org/model", weights=False)) == facts
        adapter = ["adapter_config.json", "adapter_model.safetensors"]
        assert names(resolve_folder("org/adapter", weights=True)) == adapter

    def test_with_weights_but_never_pickles_or_the_same_weights_twice(self, hub, client):
        folder = resolve_folder("org/model", weights=True)
        assert "model-00001-of-00001.safetensors" in names(folder)
        assert not [name for name in names(folder) if "consolidated" in name or name.endswith((".bin", ".pth"))]
        assert not [path for path in hub.asked if path.endswith((".bin", ".pth"))]

    def test_fetching_everything_would_be_noticed(self, hub, client):
        client.setattr(module, "_WEIGHTS", ("*",))
        with pytest.raises(AssertionError):
            self.test_with_weights_but_never_pickles_or_the_same_weights_twice(hub, client)

    def test_a_branch_is_resolved_to_its_commit(self, hub, client):
        hub.revisions["v2"] = "v2"
        found = resolve_folder("org/model", "v2", weights=False)
        assert found.name == hub.commit("models", "org/model")
        assert any("/revision/v2" in path for path in hub.asked)
        assert resolve_folder("org/model", found.name, weights=False) == found

    def test_the_commit_stays_when_the_branch_moves(self, hub, client):
        before = resolve_folder("org/model", weights=False)
        hub.add("models", "org/model", {"config.json": '{"changed": 1}'})
        after = resolve_folder("org/model", weights=False)
        assert before.name != after.name
        assert (before / "config.json").read_text() == "{}"
        assert resolve_folder("org/model", before.name, weights=False) == before


class TestGatedModels:
    """The four cases that look alike to the client: no token, bad token, licence not accepted, wrong name."""

    @pytest.fixture(autouse=True)
    def _gated(self, hub):
        hub.gated = {"org/model"}

    @pytest.mark.parametrize(
        ("token", "addresses"),
        [
            (None, ("https://huggingface.co/org/model", "hf auth login")),
            (BAD_TOKEN, ("https://huggingface.co/settings/tokens", "hf auth login")),
            (OUTSIDER, ("https://huggingface.co/org/model",)),
        ],
        ids=["no token", "bad token", "licence not accepted"],
    )
    def test_refused(self, client, token, addresses):
        if token:
            client.setenv("HF_TOKEN", token)
        *kind, fault = refused()
        assert kind == [3, "SF-HUB-ACCESS"]
        assert [one for one in ("org/model", "settings/tokens", "hf auth login") if one in fault.fix] == [
            one.removeprefix("https://huggingface.co/") for one in addresses
        ]

    @pytest.mark.parametrize("token", [None, GOOD_TOKEN])
    def test_wrong_name(self, client, token):
        if token:
            client.setenv("HF_TOKEN", token)
        *kind, fault = refused("org/modle")
        assert (kind, fault.where) == ([2, "SF-HUB-MISSING"], "org/modle")

    def test_access(self, client):
        client.setenv("HF_TOKEN", GOOD_TOKEN)
        assert names(resolve_folder("org/model", weights=False))

    def test_twin_that_asks_for_the_status_alone_mixes_them_up(self, client):
        client.setattr("huggingface_hub.get_token", lambda: GOOD_TOKEN)
        with pytest.raises(AssertionError):
            self.test_refused(client, None, ("https://huggingface.co/org/model", "hf auth login"))


class TestOtherRefusals:
    def test_wrong_revision(self, client):
        *kind, fault = refused(revision="v9")
        assert (kind, fault.where) == ([2, "SF-HUB-MISSING"], "org/model")
        assert "v9" in fault.what
        assert "https://huggingface.co/org/model/tree/main" in fault.fix

    @pytest.mark.parametrize(
        ("status", "code"), [(403, "SF-HUB-ACCESS"), (500, "SF-HUB-OFFLINE"), (429, "SF-HUB-OFFLINE")]
    )
    def test_by_status(self, hub, client, status, code):
        hub.broken = {"/api/": status}
        assert refused()[:2] == (3, code)

    def test_a_file_that_is_listed_and_not_there(self, hub, client):
        hub.broken = {"/resolve/": 404}
        assert refused()[0] == 2

    @pytest.mark.parametrize(
        ("place", "trouble"), [("tokenizer.json", "cut"), ("/api/", "silence"), ("/resolve/", "silence")]
    )
    def test_a_download_that_is_cut_off_and_silence(self, hub, client, place, trouble):
        client.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        client.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 0.1)
        client.setattr(fetch, "_TIMEOUT", 0.1)
        hub.broken = {place: trouble}
        assert refused()[:2] == (3, "SF-HUB-OFFLINE")

    def test_no_room_is_found_before_the_download(self, hub, client):
        client.setattr(hardware, "free_disk", lambda folder: 3)
        *kind, fault = refused(weights=True)
        assert kind == [3, "SF-DISK-FULL"]
        assert "3 B" in fault.what
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

    def test_without_cache(self, hub, client):
        point_at(client, "http://127.0.0.1:9")
        assert refused()[:2] == (3, "SF-HUB-OFFLINE")
        go_offline(client)
        *kind, fault = refused()
        assert kind == [3, "SF-HUB-OFFLINE"]
        assert "HF_HUB_OFFLINE" in str(fault)
        assert hub.asked == []

    @pytest.mark.parametrize("status", [401, 403, 404])
    def test_a_refusal_is_not_made_up_for_by_the_cache(self, hub, client, status):
        resolve_folder("org/model", weights=False)
        hub.broken = {"/api/": status}
        refused()

    @pytest.mark.parametrize("trouble", [429, 500, "silence", "gone"])
    def test_a_commit_from_the_cache_is_said(self, hub, client, caplog, trouble):
        client.setattr(fetch, "_TIMEOUT", 0.1)
        commit = resolve_folder("org/model", weights=False).name
        assert not caplog.messages
        hub.add("models", "org/model", {"config.json": '{"changed": 1}'})
        hub.broken = {"/api/": trouble}
        if trouble == "gone":
            point_at(client, "http://127.0.0.1:9")
        assert resolve_folder("org/model", weights=False).name == commit
        (caution,) = caplog.messages
        assert all(fact in caution for fact in ("org/model", commit, "main"))

    def test_a_hub_that_breaks_between_two_questions(self, hub, client):
        """The client would take the commit that the cache knows, and say nothing."""
        old = resolve_folder("org/model", weights=False).name
        hub.add("models", "org/model", {"config.json": '{"changed": 1}'})
        hub.broken = {"/revision/main": 500}
        assert resolve_folder("org/model", weights=False).name == hub.commit("models", "org/model") != old

    def test_a_cache_without_a_listing_shows_its_gaps(self, hub, client, tmp_path):
        hub.add("models", "org/parts", {f"model-0000{part}-of-00003.safetensors": "x" * part for part in (1, 2, 3)})
        hub.add("models", "org/parts", {"config.json": "{}"})
        for name in ("config.json", "model-00002-of-00003.safetensors"):
            huggingface_hub.hf_hub_download("org/parts", name)
        go_offline(client)
        assert resolve_folder("org/parts", weights=False).is_dir()
        *kind, fault = refused("org/parts", weights=True)
        assert kind == [3, "SF-MODEL-WEIGHTS"]
        assert "1 of 3" in fault.what

    def test_a_cache_with_facts_is_not_a_cache_with_weights(self, client):
        resolve_folder("org/model", weights=False)
        go_offline(client)
        assert refused(weights=True)[:2] == (3, "SF-HUB-OFFLINE")
        assert resolve_folder("org/model", weights=False).is_dir()


class TestFolders:
    def test_a_folder_is_taken_as_it_is(self, tmp_path):
        assert resolve_folder(str(tmp_path), weights=True) == tmp_path

    def test_it_has_no_revision(self, tmp_path):
        assert refused(str(tmp_path), "main")[:2] == (2, "SF-CONFIG-CONFLICT")

    @pytest.mark.parametrize("path", ["./missing", "/no/such/folder", "missing", "a/b/c", "../x", "tests/missing"])
    def test_a_missing_one_is_not_asked_for_at_the_hub(self, hub, client, path):
        assert refused(path)[:2] == (2, "SF-FILE-MISSING")
        assert hub.asked == []


def test_a_command_ends_in_one_line_without_traceback_or_token(hub, tmp_path):
    """The real process: environment variables, exit code, streams."""
    hub.gated = {"org/model"}
    settings = {**os.environ, **environment(hub, tmp_path / "cache"), "HF_TOKEN": OUTSIDER}
    command = [sys.executable, "-m", "surefoot", "generate", "org/model", "--prompt", "hello"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 3
    assert "https://huggingface.co/org/model" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert OUTSIDER not in done.stdout + done.stderr
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and OUTSIDER in path.read_text()]
