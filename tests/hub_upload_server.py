"""The small Hub of hub_server.py with the endpoints that an upload needs: preupload, LFS batch, storage, commit.

It speaks the LFS protocol, which huggingface_hub uses where Xet is off, and as much of Xet as its client asks for: the
chunks that come are counted and dropped, and what a commit then names is taken from `known`. Commits are folders below
`storage`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import hub_server
from hub_server import HubServer, commit_of, files_of, git_blob_id, is_lfs

_PREUPLOAD = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)")
_COMMIT = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)")
_BATCH = re.compile(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
_OBJECT = re.compile(r"/lfs-object/(?P<oid>[0-9a-f]{64})")
_READ_BYTES = 16 * 1024


@dataclass
class UploadFaults:
    """What goes wrong with an upload. Files are named by their path in the repository."""

    # How many transfers of an LFS object break off after this many bytes.
    cut_transfers: int = 0
    cut_at_byte: int = 20_000
    # Done by the server after a commit: file -> offset of a bit to flip; files it loses; files it adds.
    flip_byte: dict[str, int] = field(default_factory=dict)
    lose: set[str] = field(default_factory=set)
    add: dict[str, bytes] = field(default_factory=dict)
    # Somebody else commits between the listing and the commit.
    moved_branch: bool = False


class UploadServer(HubServer):
    """A Hub that can be written to. `objects`: the LFS storage, by SHA-256; `commits`: those made by uploads.

    `known`: the folder that an upload by Xet sends. `xet_bytes`: how many bytes of chunks came.
    """

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.upload_faults = UploadFaults()
        self.objects: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.known: Path | None = None
        self.xet_bytes = 0
        super().__init__()

    def content(self, oid: str) -> bytes:
        """The bytes of an LFS object."""
        if oid not in self.objects and self.known is not None:
            for path in files_of(self.known).values():
                raw = path.read_bytes()
                self.objects[hashlib.sha256(raw).hexdigest()] = raw
        return self.objects[oid]

    def create(self, repo_id: str, branch: str = "main", files: dict[str, bytes] | None = None) -> str:
        """A repository with one commit, as the Hub makes it: .gitattributes and `files`."""
        folder = self.storage / f"{repo_id.replace('/', '--')}-{branch}-0"
        for name, raw in {".gitattributes": b"*.safetensors filter=lfs\n", **(files or {})}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        return self.add(repo_id, folder, branch)

    def remote_files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        """What the branch holds now."""
        commit = self.find_commit(repo_id, branch)
        assert commit is not None
        return {name: path.read_bytes() for name, path in files_of(self.folder(repo_id, commit)).items()}

    def apply(self, repo_id: str, branch: str, parent: str, operations: list[dict[str, Any]]) -> str:
        """Make a commit of ndjson operations; returns it."""
        folder = self.storage / f"{repo_id.replace('/', '--')}-{branch}-{len(self.commits) + 1}"
        shutil.copytree(self.folder(repo_id, parent), folder)
        for operation in operations:
            value = operation["value"]
            path = folder / value.get("path", "")
            path.parent.mkdir(parents=True, exist_ok=True)
            if operation["key"] == "file":
                path.write_bytes(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                path.write_bytes(self.content(value["oid"]))
            elif operation["key"] == "deletedFile":
                path.unlink()
        faults = self.upload_faults
        for name, offset in faults.flip_byte.items():
            raw = bytearray((folder / name).read_bytes())
            raw[offset] ^= 1
            (folder / name).write_bytes(raw)
        for name in faults.lose:
            (folder / name).unlink()
        for name, added in faults.add.items():
            (folder / name).write_bytes(added)
        commit = commit_of(folder)
        self.commits.append({"commit": commit, "operations": operations})
        self.add(repo_id, folder, branch)
        return commit


class _UploadHandler(hub_server._Handler):
    hub: UploadServer

    def do_GET(self) -> None:
        if "/xet-write-token/" in self.path:
            self._send_json({"accessToken": "for-xet", "exp": 4_000_000_000, "casUrl": f"{self.hub.url}/xet"})
        else:
            super().do_GET()

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        body = self._read_body()
        if url.path.startswith("/xet/v1/xorbs/"):
            self.hub.xet_bytes += len(body)
            self._send_json({"was_inserted": True})
            return
        if url.path == "/xet/v1/shards":
            self._send_json({"result": 1})
            return
        refusal = self.hub.refusal(url.path)
        match = _PREUPLOAD.fullmatch(url.path) or _COMMIT.fullmatch(url.path) or _BATCH.fullmatch(url.path)
        if refusal is not None:
            self._refuse(*refusal)
        elif url.path == "/api/validate-yaml":
            self._send_json({})
        elif match is None:
            self._refuse(404, "EntryNotFound")
        elif not self._may_read(match["repo"]):
            self._refuse(401, "RepoNotFound")
        elif match.re is _BATCH:
            self._send_json(self._batch(json.loads(body)))
        elif (commit := self.hub.find_commit(match["repo"], unquote(match["revision"]))) is None:
            self._refuse(404, "RevisionNotFound")
        elif match.re is _PREUPLOAD:
            self._send_json(self._preupload(match["repo"], commit, json.loads(body)))
        else:
            self._commit(match["repo"], unquote(match["revision"]), commit, body)

    def do_PUT(self) -> None:
        match = _OBJECT.fullmatch(urlsplit(self.path).path)
        if match is None:
            self._refuse(404, "")
            return
        faults = self.hub.upload_faults
        if faults.cut_transfers > 0:
            faults.cut_transfers -= 1
            self.rfile.read(faults.cut_at_byte)
            self._record(0, 0)
            self.close_connection = True
            return
        body = self._read_body()
        if hashlib.sha256(body).hexdigest() != match["oid"]:
            self._refuse(422, "")
            return
        self.hub.objects[match["oid"]] = body
        self._send_json({})

    def _read_body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        body = bytearray()
        while size := int(self.rfile.readline().strip(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(body)

    def _preupload(self, repo_id: str, commit: str, request: dict[str, Any]) -> dict[str, Any]:
        present = files_of(self.hub.folder(repo_id, commit))
        answers = []
        for file in request["files"]:
            name = file["path"]
            answer = {"path": name, "uploadMode": "lfs" if is_lfs(name) else "regular", "shouldIgnore": False}
            if name in present:
                raw = present[name].read_bytes()
                answer["oid"] = hashlib.sha256(raw).hexdigest() if is_lfs(name) else git_blob_id(raw)
            answers.append(answer)
        return {"files": answers}

    def _batch(self, request: dict[str, Any]) -> dict[str, Any]:
        objects = []
        for item in request["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs-object/{item['oid']}"}}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def _commit(self, repo_id: str, branch: str, current: str, body: bytes) -> None:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        if self.hub.upload_faults.moved_branch or header["value"].get("parentCommit", current) != current:
            self._refuse(412, "")
            return
        commit = self.hub.apply(repo_id, branch, current, operations)
        self._send_json({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{commit}", "commitOid": commit})


UploadServer.handler = _UploadHandler
