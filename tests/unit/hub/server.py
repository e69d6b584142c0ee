"""The part of the Hugging Face hub's interface that huggingface_hub uses, on loopback: users, repositories, LFS."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

WRITE, READ, OTHER = "hf_write", "hf_read", "hf_of_somebody_else"
USERS = {WRITE: ("me", "write"), READ: ("me", "read"), OTHER: ("other", "write")}


ORGANIZATIONS = {"me": ("lab",)}


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1("".join(self.commits).encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """``part``: bytes of a part of a multipart upload, 0 for uploads in one part; ``broken``: paths that answer 500."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[str] = []
        self.part, self.broken = 0, ""
        self.silent = threading.Event()  # set: it answers nothing any more

    def environment(self, token: str | None, home: object) -> dict[str, str]:
        """For a program that uses this hub and no other."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_TOKEN": token or ""}


@contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.silent.clear()
            hub.shutdown()
            thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client may hang up at any time
            super().handle()

    def log_message(self, *args: Any) -> None: ...

    def _serve(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.requests.append(f"{self.command} {path}")
        while hub.silent.is_set():
            threading.Event().wait(0.1)
        if hub.broken and re.search(hub.broken, path):
            return self._send(500, {"error": "an error of the hub?X-Signature=secret"})
        for method, pattern, answer in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method:
                return answer(self, body, *found.groups())
        return self._send(404, {"error": path})

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _send(self, status: int, content: Any = b"", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _user(self) -> tuple[str, str]:
        return USERS.get(self.headers.get("Authorization", "").removeprefix("Bearer "), ("", ""))

    def _may_write(self, name: str) -> bool:
        user, role = self._user()
        return role == "write" and name.partition("/")[0] in (user, *ORGANIZATIONS.get(user, ()))

    def _repository(self, name: str) -> Repository | None:
        found = self.server.repositories.get(name)
        if found is None or (found.private and self._user()[0] != name.partition("/")[0]):
            self._send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        return found

    def whoami(self, body: bytes) -> None:
        name, role = self._user()
        if not name:
            return self._send(401, {"error": "Invalid username or password."})
        return self._send(
            200,
            {
                "name": name,
                "orgs": [{"name": it} for it in ORGANIZATIONS.get(name, ())],
                "auth": {"accessToken": {"role": role}},
            },
        )

    def may(self, body: bytes, name: str) -> None:
        if self._repository(name) is not None:
            self._send(200 if self._may_write(name) else 403, {})

    def create(self, body: bytes) -> None:
        wish = json.loads(body)
        name = f"{wish['organization'] or self._user()[0]}/{wish['name']}"
        if not self._may_write(name):
            return self._send(403, {"error": "no rights"})
        known = name in self.server.repositories
        private = wish.get("private") or wish.get("visibility") == "private"
        self.server.repositories.setdefault(name, Repository(bool(private)))
        return self._send(409 if known else 200, {"url": f"{self.server.url}/{name}"})

    def preupload(self, body: bytes, name: str) -> None:
        if self._repository(name) is None:
            return None
        if not self._may_write(name):
            return self._send(403, {"error": "no rights"})
        files = [it["path"] for it in json.loads(body)["files"]]
        mode = {it: "lfs" if it.endswith(".safetensors") else "regular" for it in files}
        return self._send(200, {"files": [{"path": it, "uploadMode": mode[it], "shouldIgnore": False} for it in files]})

    def batch(self, body: bytes, name: str) -> None:
        objects = []
        for it in json.loads(body)["objects"]:
            href, header = f"{self.server.url}/lfs/{it['oid']}", {}
            if self.server.part:
                count = -(-it["size"] // self.server.part)
                header = {"chunk_size": str(self.server.part)}
                header |= {str(number): f"{href}/{number}" for number in range(1, count + 1)}
                href += "/done"
            actions = {"upload": {"href": href, "header": header}}
            objects.append({**it, **({} if it["oid"] in self.server.objects else {"actions": actions})})
        self._send(200, {"objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        good = hashlib.sha256(body).hexdigest() == oid
        if good:
            self.server.objects[oid] = body
        self._send(200 if good else 400)

    def store_part(self, body: bytes, oid: str, number: str) -> None:
        self.server.parts.setdefault(oid, {})[int(number)] = body
        self._send(200, ETag=f'"{number}"')

    def join_parts(self, body: bytes, oid: str) -> None:
        parts = self.server.parts[oid]
        self.store(b"".join(parts[it["partNumber"]] for it in json.loads(body)["parts"]), oid)

    def commit(self, body: bytes, name: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return None
        if not self._may_write(name):
            return self._send(403, {"error": "no rights"})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append(value["summary"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.server.objects[value["oid"]]
            else:
                repository.files[value["path"]] = base64.b64decode(value["content"])
        url = f"{self.server.url}/{name}/commit/{repository.sha}"
        return self._send(200, {"commitUrl": url, "commitOid": repository.sha, "success": True})

    def info(self, body: bytes, name: str, revision: str | None) -> None:
        found = self._repository(name)
        if found is not None:
            siblings = [{"rfilename": path, "size": len(content)} for path, content in found.files.items()]
            card = re.match(rb"---\n(.*?)---\n", found.files.get("README.md", b""), re.DOTALL)
            data = {"cardData": yaml.safe_load(card[1])} if card else {}
            self._send(200, {"id": name, "modelId": name, "sha": found.sha, "siblings": siblings, "tags": [], **data})

    def tree(self, body: bytes, name: str) -> None:
        found = self._repository(name)
        if found is not None:
            files = [{"type": "file", "path": it, "size": len(data), "oid": "0"} for it, data in found.files.items()]
            self._send(200, files)

    def resolve(self, body: bytes, name: str, path: str) -> None:
        found = self._repository(name)
        if found is None:
            return None
        if path not in found.files:
            return self._send(404, X_Error_Code="EntryNotFound")
        digest = hashlib.sha256(found.files[path]).hexdigest()
        return self._send(200, found.files[path], ETag=f'"{digest}"', X_Repo_Commit=found.sha)


KIND = "(?:models|datasets)"
NAME = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Any]] = [
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("GET", f"/api/models/{NAME}/auth-check/write", _Handler.may),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", lambda it, body: it._send(200, {"errors": [], "warnings": []})),
    ("POST", f"/api/models/{NAME}/preupload/main", _Handler.preupload),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/lfs/([0-9a-f]{64})", _Handler.store),
    ("PUT", r"/lfs/([0-9a-f]{64})/(\d+)", _Handler.store_part),
    ("POST", "/lfs/([0-9a-f]{64})/done", _Handler.join_parts),
    ("POST", f"/api/models/{NAME}/commit/main", _Handler.commit),
    ("GET", f"/api/{KIND}/{NAME}(?:/revision/(.+))?", _Handler.info),
    ("GET", f"/api/{KIND}/{NAME}/tree/.+", _Handler.tree),
    ("GET HEAD", f"/(?:datasets/)?{NAME}/resolve/[^/]+/(.+)", _Handler.resolve),
]
