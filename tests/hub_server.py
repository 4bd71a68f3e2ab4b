"""A small Hub on 127.0.0.1: the model-info and file endpoints that memopt uses, with faults that can be switched on.

It serves local folders as repositories. Weight files and tokenizer.json count as LFS files: like the real Hub it
answers for them with a redirect to a storage host (here the same server under another name), which takes no token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)")
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_STORAGE = re.compile(r"/storage/(?P<repo>[^/]+/[^/]+)/(?P<commit>[0-9a-f]{40})/(?P<file>.+)")
_RANGE = re.compile(r"bytes=(?P<first>\d+)-(?P<last>\d*)")
_CHUNK_BYTES = 16 * 1024


@dataclass
class Cut:
    """Close the connection when byte `at_byte` of a file would be sent, `times` times."""

    at_byte: int
    times: int = 1


@dataclass
class Faults:
    """What goes wrong. Files are named without a folder."""

    cut: dict[str, Cut] = field(default_factory=dict)
    flip_byte: dict[str, int] = field(default_factory=dict)
    # Refusals: by a part of the path, (HTTP status, X-Error-Code or "").
    status: dict[str, tuple[int, str]] = field(default_factory=dict)
    # How often such a refusal is sent before it passes; absent: always.
    status_times: dict[str, int] = field(default_factory=dict)
    # After this many listings of a branch it means the next commit.
    move_branch_after: int | None = None
    extra_listed: list[dict[str, Any]] = field(default_factory=list)
    claimed_size: dict[str, int] = field(default_factory=dict)
    ignore_range: bool = False
    seconds_per_chunk: float = 0.0
    required_token: str | None = None


@dataclass(frozen=True)
class Request:
    """One request of the log; `sent_bytes` counts the body as the server meant to send it."""

    path: str
    range: str | None
    status: int
    sent_bytes: int
    has_token: bool
    host: str

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2].partition("?")[0]


def is_lfs(name: str) -> bool:
    return name.endswith(".safetensors") or name == "tokenizer.json"


def git_blob_id(raw: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()


def commit_of(folder: Path) -> str:
    """A made-up commit hash: 40 hex digits of the folder's content."""
    digest = hashlib.sha1()
    for name, path in files_of(folder).items():
        digest.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def files_of(folder: Path) -> dict[str, Path]:
    """Every file below a folder, by its name relative to it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


class HubServer:
    """The server: `add` repositories, switch `faults`, read `log`. `handler` answers the requests."""

    handler: type[_Handler]

    def __init__(self) -> None:
        self.faults = Faults()
        self.log: list[Request] = []
        self._lock = threading.Lock()
        self._folders: dict[tuple[str, str], Path] = {}
        self._branches: dict[tuple[str, str], list[str]] = {}
        self._listings = 0
        handler = type("Handler", (self.handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def port(self) -> int:
        return self._http.server_address[1]

    @property
    def url(self) -> str:
        """The value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, repo_id: str, folder: Path, branch: str = "main") -> str:
        """Serve `folder` as the next commit of a branch; returns the commit."""
        commit = commit_of(folder)
        self._folders[(repo_id, commit)] = folder
        self._branches.setdefault((repo_id, branch), []).append(commit)
        return commit

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def record(self, request: Request) -> None:
        with self._lock:
            self.log.append(request)

    def requested_files(self) -> set[str]:
        return {request.file for request in self.log if "/api/" not in request.path}

    def sent_bytes(self, file: str) -> int:
        return sum(request.sent_bytes for request in self.log if request.file == file)

    def has_repo(self, repo_id: str) -> bool:
        return any(repo == repo_id for repo, _ in self._folders)

    def find_commit(self, repo_id: str, revision: str, *, listing: bool = False) -> str | None:
        if (repo_id, revision) in self._folders:
            return revision
        commits = self._branches.get((repo_id, revision))
        if commits is None:
            return None
        with self._lock:
            after = self.faults.move_branch_after
            moved = after is None or self._listings >= after
            self._listings += listing
        return commits[-1] if moved else commits[0]

    def folder(self, repo_id: str, commit: str) -> Path:
        return self._folders[(repo_id, commit)]

    def refusal(self, path: str) -> tuple[int, str] | None:
        with self._lock:
            for part, answer in self.faults.status.items():
                if part in path:
                    left = self.faults.status_times.get(part)
                    if left == 0:
                        continue
                    if left is not None:
                        self.faults.status_times[part] = left - 1
                    return answer
        return None

    def cut_at(self, file: str, first: int, end: int) -> int | None:
        """The byte of the file before which this answer [first, end) must break off, if it must."""
        with self._lock:
            cut = self.faults.cut.get(file)
            if cut is None or cut.times == 0 or not first <= cut.at_byte < end:
                return None
            cut.times -= 1
            return cut.at_byte


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the tests read `HubServer.log`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        refusal = self.hub.refusal(url.path)
        if refusal is not None:
            self._refuse(*refusal)
        elif match := _STORAGE.fullmatch(url.path):
            # Real storage refuses a request that carries a Hub token beside the signature.
            if self.headers.get("authorization"):
                self._refuse(400, "")
            else:
                self._send_file(match["repo"], match["commit"], unquote(match["file"]))
        elif (match := _API.fullmatch(url.path) or _RESOLVE.fullmatch(url.path)) is None:
            self._refuse(404, "EntryNotFound")
        elif not self._may_read(match["repo"]):
            self._refuse(401, "RepoNotFound")
        elif (
            commit := self.hub.find_commit(match["repo"], unquote(match["revision"]), listing=match.re is _API)
        ) is None:
            self._refuse(404, "RevisionNotFound")
        elif match.re is _API:
            self._send_json(self._model_info(match["repo"], commit))
        else:
            self._resolve(match["repo"], commit, unquote(match["file"]))

    def _may_read(self, repo_id: str) -> bool:
        token = self.hub.faults.required_token
        allowed = token is None or self.headers.get("authorization") == f"Bearer {token}"
        return allowed and self.hub.has_repo(repo_id)

    def _model_info(self, repo_id: str, commit: str) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for name, path in files_of(self.hub.folder(repo_id, commit)).items():
            raw = path.read_bytes()
            size = self.hub.faults.claimed_size.get(name, len(raw))
            entry: dict[str, Any] = {"rfilename": name, "size": size, "blobId": git_blob_id(raw)}
            if is_lfs(name):
                sha256 = hashlib.sha256(raw).hexdigest()
                pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(raw)}\n".encode()
                entry["blobId"] = git_blob_id(pointer)
                entry["lfs"] = {"sha256": sha256, "size": size, "pointerSize": len(pointer)}
            siblings.append(entry)
        siblings += self.hub.faults.extra_listed
        return {"id": repo_id, "modelId": repo_id, "sha": commit, "private": False, "siblings": siblings}

    def _resolve(self, repo_id: str, commit: str, file: str) -> None:
        path = files_of(self.hub.folder(repo_id, commit)).get(file)
        if path is None:
            self._refuse(404, "EntryNotFound")
        elif is_lfs(file):
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.hub.port}/storage/{repo_id}/{commit}/{file}")
            self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Linked-Size", str(path.stat().st_size))
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"')
            self.send_header("Content-Length", "0")
            self._record(302, 0)
            self.end_headers()
        else:
            self._send_file(repo_id, commit, file)

    def _send_file(self, repo_id: str, commit: str, file: str) -> None:
        data = bytearray((self.hub.folder(repo_id, commit) / file).read_bytes())
        etag = hashlib.sha256(data).hexdigest() if is_lfs(file) else git_blob_id(bytes(data))
        if file in self.hub.faults.flip_byte:
            data[self.hub.faults.flip_byte[file]] ^= 1
        asked = _RANGE.fullmatch(self.headers.get("range", ""))
        if self.hub.faults.ignore_range:
            asked = None
        first = int(asked["first"]) if asked else 0
        end = min(int(asked["last"]) + 1, len(data)) if asked and asked["last"] else len(data)
        if asked and first >= len(data):
            self._refuse(416, "")
            return
        status = 206 if asked else 200
        self.send_response(status)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(data)}")
        self.end_headers()
        cut_at = self.hub.cut_at(file, first, end) if self.command == "GET" else None
        self._send_body(status, bytes(data[first : end if cut_at is None else cut_at]))
        if cut_at is not None:
            self.close_connection = True

    def _send_body(self, status: int, data: bytes) -> None:
        if self.command == "HEAD":
            data = b""
        # Before the bytes: a test may read the log as soon as it has them.
        self._record(status, len(data))
        for start in range(0, len(data), _CHUNK_BYTES):
            time.sleep(self.hub.faults.seconds_per_chunk)
            try:
                self.wfile.write(data[start : start + _CHUNK_BYTES])
            except OSError:
                # The client went away, as it may.
                self.close_connection = True
                return

    def _send_json(self, value: dict[str, Any]) -> None:
        raw = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self._send_body(200, raw)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self._record(status, 0)
        self.end_headers()

    def _record(self, status: int, sent: int) -> None:
        token = self.headers.get("authorization") is not None
        host = self.headers.get("host", "")
        self.hub.record(Request(self.path, self.headers.get("range"), status, sent, token, host))


HubServer.handler = _Handler


@contextmanager
def running_hub(server: HubServer | None = None) -> Iterator[HubServer]:
    """A started server, stopped at the end."""
    server = server or HubServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()
