"""Hub ids against a stub of the hub on this machine: downloads, refusals, offline; nothing leaves the machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub import constants

from surefoot.errors import EnvironmentFault, InputError
from surefoot.models.hub import resolve_folder

COMMIT = "0123456789012345678901234567890123456789"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "README.md": b"text",
    "model-00001-of-00001.safetensors": b"weights",
    "model.safetensors.index.json": b"{}",
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle",
    "original/config.json": b"{}",
}
TOKEN = "hf_" + "s" * 34


class Hub(BaseHTTPRequestHandler):
    """Answers like huggingface.co for one repository. `server.refuse`: (status, headers) for part of the requests."""

    def do_GET(self):
        self.server.asked.append(self.path)
        place, (status, headers) = self.server.refuse
        is_file = "/resolve/" in self.path
        if place == "everything" or (place == "files" and is_file):
            self._answer(status, b"", headers)
        elif is_file:
            name = self.path.partition(f"/resolve/{COMMIT}/")[2]
            self._answer(200, FILES[name], {"ETag": f'"{hash(name)}"', "X-Repo-Commit": COMMIT})
        elif "/tree/" in self.path:
            rows = [{"type": "file", "path": name, "size": len(body), "oid": name} for name, body in FILES.items()]
            self._answer(200, json.dumps(rows).encode(), {})
        else:
            self._answer(200, json.dumps({"id": "org/model", "sha": COMMIT, "siblings": []}).encode(), {})

    do_HEAD = do_GET

    def _answer(self, status, body, headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.refuse = [], ("nothing", (200, {}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    huggingface_hub.close_session()
    yield server
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_facts_alone(hub):
    folder = resolve_folder("org/model", weights=False)
    assert names(folder) == ["chat_template.jinja", "config.json", "tokenizer.json"]


def test_with_weights_but_never_pickles_or_the_same_weights_twice(hub):
    folder = resolve_folder("org/model", weights=True)
    assert "model-00001-of-00001.safetensors" in names(folder)
    assert not [name for name in names(folder) if "consolidated" in name or name.endswith((".bin", ".pth"))]
    assert not [path for path in hub.asked if path.endswith((".bin", ".pth"))]


def test_fetching_everything_would_be_noticed(hub, monkeypatch):
    monkeypatch.setattr("surefoot.models.hub._WEIGHTS", ("*",))
    with pytest.raises(AssertionError):
        test_with_weights_but_never_pickles_or_the_same_weights_twice(hub)


def test_a_revision_is_asked_for(hub):
    resolve_folder("org/model", "v2", weights=False)
    assert any("/revision/v2" in path for path in hub.asked)


GATED = (403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model org/model is restricted."})


@pytest.mark.parametrize(
    ("place", "answer", "kind", "says"),
    [
        ("files", GATED, EnvironmentFault, "https://huggingface.co/org/model"),
        ("everything", GATED, EnvironmentFault, "is gated"),
        ("everything", (401, {}), EnvironmentFault, "private or does not exist"),
        ("everything", (403, {}), EnvironmentFault, "forbidden"),
        ("everything", (404, {"X-Error-Code": "RepoNotFound"}), InputError, "the hub has no model org/model"),
        ("everything", (404, {"X-Error-Code": "RevisionNotFound"}), InputError, "no revision 'v2'"),
        ("everything", (500, {}), EnvironmentFault, "the hub answered 500"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line_without_the_token(hub, place, answer, kind, says):
    hub.refuse = (place, answer)
    with pytest.raises(kind) as caught:
        resolve_folder("org/model", "v2", weights=False)
    assert says in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [GATED, (401, {})])
def test_missing_access_says_how_to_log_in(hub, answer):
    hub.refuse = ("everything", answer)
    with pytest.raises(EnvironmentFault) as caught:
        resolve_folder("org/model", weights=False)
    assert "hf auth login" in caught.value.faults[0].fix
    assert caught.value.exit_code == 3


def test_the_cache_serves_when_the_hub_is_gone(hub, monkeypatch):
    folder = resolve_folder("org/model", weights=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_folder("org/model", weights=False) == folder


class TestWithoutHubAndCache:
    def test_offline(self, hub, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        huggingface_hub.close_session()
        with pytest.raises(EnvironmentFault, match="HF_HUB_OFFLINE is set"):
            resolve_folder("org/model", weights=False)
        assert hub.asked == []

    def test_unreachable(self, hub, monkeypatch):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(EnvironmentFault, match="cannot be reached"):
            resolve_folder("org/model", weights=False)

    def test_a_cache_with_facts_is_not_a_cache_with_weights(self, hub, monkeypatch):
        resolve_folder("org/model", weights=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        huggingface_hub.close_session()
        with pytest.raises(EnvironmentFault, match="not wholly"):
            resolve_folder("org/model", weights=True)
        assert resolve_folder("org/model", weights=False).is_dir()


class TestFolders:
    def test_a_folder_is_taken_as_it_is(self, tmp_path):
        assert resolve_folder(str(tmp_path), weights=True) == tmp_path

    def test_it_has_no_revision(self, tmp_path):
        with pytest.raises(InputError, match="revision"):
            resolve_folder(str(tmp_path), "main", weights=False)

    @pytest.mark.parametrize("path", ["./missing", "/no/such/folder", "missing", "a/b/c", "../x"])
    def test_a_missing_one_is_not_asked_for_at_the_hub(self, hub, path):
        with pytest.raises(InputError, match="does not exist"):
            resolve_folder(path, weights=False)
        assert hub.asked == []
