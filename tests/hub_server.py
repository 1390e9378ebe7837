"""A stand-in of the Hugging Face Hub's HTTP interface on this machine: accounts, repositories, and commits to them."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

OWNER, READER = "hf_tokenOfTheOwner", "hf_tokenThatMayRead"
OTHERS = "somebody-else"  # an account in which the owner may not write
BROKEN = "me/broken"  # a repository that answers every commit with status 500


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """What the stand-in has, and what it was asked.

    Attributes:
        requests: method and path of each.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, token: str, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and content; all files come in the commit itself, none by the protocol of git-lfs."""
        self.requests.append(f"{method} {path}")
        if method == "HEAD":
            return 200, {}
        if token not in (OWNER, READER):
            return 401, {"error": "Invalid username or password."}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(token, json.loads(body))
        name = path.removeprefix("/api/models").removeprefix("/").split(".git/")[0]
        name = "/".join(name.split("/")[:2])
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        if method == "GET" and "/tree/" in path:
            files = self.repositories[name].files.items()
            return 200, [{"type": "file", "path": file, "size": len(data), "oid": "0"} for file, data in files]
        if method == "GET":
            siblings = [{"rfilename": file} for file in self.repositories[name].files]
            return 200, {"id": name, "private": self.repositories[name].private, "siblings": siblings}
        if "/preupload/" in path:
            files = [{**each, "shouldIgnore": False, "uploadMode": "regular"} for each in json.loads(body)["files"]]
            return 200, {"files": files}
        return self._commit(name, body)

    def _create(self, token: str, asked: dict[str, Any]) -> tuple[int, Any]:
        owner = asked["organization"] or "me"
        name = f"{owner}/{asked['name']}"
        if owner != "me" or token == READER:
            return 403, {"error": f"You don't have the rights to create a model under the namespace {owner}"}
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        private = asked.get("visibility") == "private" or asked.get("private", False)
        self.repositories[name] = Repository(private)
        return 200, {"url": f"{self.url}/{name}"}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        if name == BROKEN:
            return 500, {"error": "the storage is away"}
        repository = self.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "deletedFile"
                del repository.files[value["path"]]
        return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{name}/commit/{'0' * 40}"}


@contextmanager
def stand_in_hub() -> Iterator[Hub]:
    """While it is open the stand-in answers at its `url`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            status, content = hub.answer(token, self.command, self.path.partition("?")[0], body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = do_PUT = answer

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
