"""A stand-in for the hub on a free local port: the requests that `huggingface_hub` makes for a download."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class Hub:
    """What it has, and what it was asked for."""

    url: str
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # repository -> path -> content
    gated: dict[str, str] = field(default_factory=dict)  # repository -> the token that may read it
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER})
    seconds_a_block: float = 0.0  # 64 KiB
    fetched: list[str] = field(default_factory=list)  # paths whose content was asked for

    def add_folder(self, repo: str, folder: Path) -> None:
        """A repository with the files of `folder`."""
        self.files[repo] = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub  # of a subclass made for each server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            org, name, *rest = path.removeprefix("/api/models/").split("/")
        else:
            org, name, *rest = path.removeprefix("/").split("/")
        repo = f"{org}/{name}"
        if repo not in self.hub.files:
            self._refuse(401, "RepoNotFound")
        elif self.hub.gated.get(repo, "") not in self.headers.get("Authorization", ""):
            self._refuse(403, "GatedRepo")
        elif path.startswith("/api/"):
            self._api(repo, *rest)
        else:
            self._file(repo, rest[1], "/".join(rest[2:]))

    def _commit(self, revision: str) -> str | None:
        known = self.hub.revisions
        return revision if revision in known.values() else known.get(revision)

    def _api(self, repo: str, kind: str = "revision", revision: str = "main") -> None:
        commit = self._commit(revision)
        files = self.hub.files[repo]
        if commit is None:
            self._refuse(404, "RevisionNotFound")
        elif kind == "revision":
            siblings = [{"rfilename": path} for path in files]
            self._json({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": False})
        else:
            assert kind == "tree", kind
            self._json(
                [
                    {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
                    for path, content in files.items()
                ]
            )

    def _file(self, repo: str, revision: str, path: str) -> None:
        commit, content = self._commit(revision), self.hub.files[repo].get(path)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        if content is None:
            return self._refuse(404, "EntryNotFound")
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        self.hub.fetched.append(path)
        for at in range(start, len(content), 1 << 16):
            try:
                self.wfile.write(content[at : at + (1 << 16)])
            except OSError:  # the client has left
                self.close_connection = True
                return None
            time.sleep(self.hub.seconds_a_block)
        return None

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub without models, until the block ends."""
    hub = Hub("")
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
