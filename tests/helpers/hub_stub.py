"""A local model hub: folders served like huggingface.co does, read by the real huggingface_hub client.

`root` contains models/ORG/NAME/… and datasets/ORG/NAME/…. Requests are refused in the real hub's words (status,
X-Error-Code, X-Error-Message): unknown names or tokens, gated repositories. `HubStub.broken` makes requests fail in
other ways. Nothing leaves the machine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

GOOD_TOKEN = "hf_" + "g" * 34
OUTSIDER = "hf_" + "o" * 34  # known to the hub, on no list of a gated repository
READER = "hf_" + "r" * 34  # of the same user as the good one; may write nothing
BAD_TOKEN = "hf_" + "b" * 34

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?")
_PUSH = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class HubStub:
    """The server.

    broken: part of a path -> how requests for it fail: a status, or "silence", "cut" (half of the body).
    asked: method and path of every request.
    sent: bytes of file contents sent.
    """

    root: Path
    endpoint: str = ""
    gated: set[str] = field(default_factory=set)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "main"})
    broken: dict[str, int | str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    sent: int = 0
    private: dict[str, bool] = field(default_factory=dict)
    closing: threading.Event = field(default_factory=threading.Event)

    def add(self, kind: str, name: str, files: dict[str, bytes | str]) -> None:
        for path, body in files.items():
            place = self.root / kind / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(body.encode() if isinstance(body, str) else body)

    def commit(self, kind: str, name: str) -> str:
        digest = hashlib.sha1(name.encode())
        for path in self.files(kind, name):
            digest.update(path.encode() + (self.root / kind / name / path).read_bytes())
        return digest.hexdigest()

    def files(self, kind: str, name: str) -> list[str]:
        folder = self.root / kind / name
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        stub, path = self.server.stub, unquote(urlsplit(self.path).path)
        stub.asked.append(f"{self.command} {path}")
        trouble = next((what for part, what in stub.broken.items() if part in path), None)
        if trouble == "silence":
            stub.closing.wait(30)
            return
        if isinstance(trouble, int):
            self._answer(trouble, b"")
        elif self.command == "POST" and self._pushed(path):
            pass
        elif path == "/api/whoami-v2":
            self._who()
        elif match := _API.fullmatch(path):
            self._api(*match.groups())
        elif match := _FILE.fullmatch(path):
            self._file("datasets" if match[1] else "models", *match.groups()[1:], cut=trouble == "cut")
        else:
            self._refuse(404, "", "Not found")

    do_HEAD = do_POST = do_GET

    def _pushed(self, path: str) -> bool:
        """Answer a client's requests for a push; return False for other requests. The commit contains the files."""
        stub, match = self.server.stub, _PUSH.fullmatch(path)
        if path not in ("/api/validate-yaml", "/api/repos/create") and match is None:
            return False
        sent = self._body()
        if self._token() != GOOD_TOKEN:
            self._refuse(403, "", "You don't have the rights to create a model under the namespace.")
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(sent)
            name = f"{asked['organization']}/{asked['name']}"
            stub.private.setdefault(name, asked.get("visibility") == "private")
            (stub.root / "models" / name).mkdir(parents=True, exist_ok=True)
            self._json({"url": f"{stub.endpoint}/{name}", "name": name})
        elif match is not None and match[2] == "preupload":
            wanted = json.loads(sent)["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in wanted]
            self._json({"files": modes})
        elif match is not None:
            lines = [json.loads(line) for line in sent.decode().splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            stub.add("models", match[1], {one["path"]: base64.b64decode(one["content"]) for one in files})
            oid = stub.commit("models", match[1])
            url = f"{stub.endpoint}/{match[1]}/commit/{oid}"
            self._json({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})
        return True

    def _who(self) -> None:
        """Return the owner of the token: the valid one is that of "me", a member of "org"."""
        names = {GOOD_TOKEN: "me", READER: "me", OUTSIDER: "outsider"}
        if (token := self._token()) not in names:
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return
        role = "read" if token == READER else "write"
        orgs = [{"name": "org"}] if names[token] == "me" else []
        self._json({"name": names[token], "orgs": orgs, "auth": {"accessToken": {"role": role}}})

    def _body(self) -> bytes:
        """Return the request's body, sent at once or in chunks preceded by their size."""
        if length := self.headers["Content-Length"]:
            return self.rfile.read(int(length))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _api(self, kind: str, name: str, what: str | None, revision: str | None, below: str) -> None:
        stub = self.server.stub
        if not self._may_look(kind, name, revision):
            return
        if what in (None, "revision"):
            self._json(
                {"id": name, "sha": stub.commit(kind, name), "siblings": [], "private": stub.private.get(name, False)}
            )
            return
        rows = [self._row(kind, name, path) for path in stub.files(kind, name)]
        if what == "paths-info":
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
            rows = [row for row in rows if row["path"] in asked]
        self._json([row for row in rows if what != "tree" or row["path"].startswith(below)])

    def _row(self, kind: str, name: str, path: str) -> dict[str, object]:
        body = (self.server.stub.root / kind / name / path).read_bytes()
        return {"type": "file", "path": path, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}

    def _file(self, kind: str, name: str, revision: str, path: str, *, cut: bool) -> None:
        stub = self.server.stub
        if not self._may_look(kind, name, revision) or not self._may_read(name):
            return
        if path not in stub.files(kind, name):
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        body = (stub.root / kind / name / path).read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": stub.commit(kind, name)}
        headers["Accept-Ranges"] = "bytes"
        status, whole = 200, len(body)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(body)), len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            status, body = 206, body[first : last + 1]
        self._answer(status, body, headers, keep=max(0, whole // 2 - (whole - len(body))) if cut else None)
        stub.sent += len(body) if self.command == "GET" else 0

    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _may_look(self, kind: str, name: str, revision: str | None) -> bool:
        stub, token = self.server.stub, self._token()
        if token not in (None, GOOD_TOKEN, OUTSIDER):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif not (stub.root / kind / name).is_dir():
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif revision and revision not in (*stub.revisions, stub.commit(kind, name)):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return True
        return False

    def _may_read(self, name: str) -> bool:
        """Whether the request may read: the file list of a gated repository is public, its files are not."""
        if name not in self.server.stub.gated or self._token() == GOOD_TOKEN:
            return True
        if self._token() is None:
            self._refuse(401, "GatedRepo", f"Access to {name} is restricted. You must be authenticated to access it.")
        else:
            self._refuse(403, "GatedRepo", f"Access to {name} is restricted and you are not in the authorized list.")
        return False

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(
            status, b"", {"X-Error-Code": code, "X-Error-Message": message} if code else {"X-Error-Message": message}
        )

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, keep: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:keep])
        if keep is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # beyond socketserver's 5 a connection is tried again after a second
    stub: HubStub


@contextmanager
def serve(root: Path) -> Iterator[HubStub]:
    """Serve a stub on a free local port until the block ends."""
    server = _Server(("127.0.0.1", 0), _Handler)
    stub = server.stub = HubStub(root, f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield stub
    stub.closing.set()
    server.shutdown()
    server.server_close()


@contextmanager
def client_of(stub: HubStub, cache: Path) -> Iterator[pytest.MonkeyPatch]:
    """Make this process's client use the stub, with its own cache folder and without a token."""
    with pytest.MonkeyPatch.context() as patch:
        point_at(patch, stub.endpoint)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        patch.delenv("HF_TOKEN", raising=False)
        patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        huggingface_hub.close_session()
        yield patch
    huggingface_hub.close_session()


def point_at(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Set another address of the hub; nobody listens at http://127.0.0.1:9."""
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")


def go_offline(patch: pytest.MonkeyPatch) -> None:
    """Behave as with HF_HUB_OFFLINE=1."""
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()


def environment(stub: HubStub, cache: Path) -> dict[str, str]:
    """Return the environment variables with which another process uses the stub."""
    return {"HF_ENDPOINT": stub.endpoint, "HF_HUB_CACHE": str(cache), "HF_TOKEN_PATH": str(cache / "token")}
