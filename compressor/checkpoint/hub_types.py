"""What the Hub reader hands around: which repository, which files, what arrived. No network here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memopt.compressor.checkpoint.file_stamp import FileStamp
from memopt.compressor.checkpoint.small_files import SourceFile
from memopt.errors import UsageError

HUB_SCHEME = "hf://"
DEFAULT_REVISION = "main"
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPO_ID = re.compile(rf"{_NAME}/{_NAME}")
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/+-]*[A-Za-z0-9_+-])?")
_MAX_REPO_ID_LENGTH = 96
_MAX_REVISION_LENGTH = 200


@dataclass(frozen=True)
class HubReference:
    """A model repository (`org/name`) at a branch, tag or commit."""

    repo_id: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.revision}"


@dataclass(frozen=True)
class HubFile:
    """One file as the Hub lists it. `sha256` is None for a file outside Git LFS; `blob_id` is git's SHA-1 of it.

    For a file in LFS `blob_id` is the SHA-1 of the pointer (or "" where it is unknown) and is not used.
    """

    path: str
    size_bytes: int
    sha256: str | None
    blob_id: str

    @property
    def blob_name(self) -> str:
        """The digest that the content must have, which is also its name in the Hub's cache."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True)
class HubListing:
    """Every usable file of one commit.

    `passed_over`: the paths that no checkpoint needs, in subfolders or of odd names. `from_cache`: read from the disk
    in offline mode, so it may be incomplete.
    """

    reference: HubReference
    commit: str
    files: tuple[HubFile, ...]
    from_cache: bool = False
    passed_over: tuple[str, ...] = ()

    def find(self, name: str) -> HubFile | None:
        return next((file for file in self.files if file.path == name), None)

    @property
    def top(self) -> tuple[SourceFile, ...]:
        """What the repository holds at its top: files, and folders by their name and "/"."""
        folders = sorted({path.partition("/")[0] + "/" for path in self.passed_over if "/" in path})
        odd = [path for path in self.passed_over if "/" not in path]
        files = [SourceFile(file.path, file.size_bytes) for file in self.files]
        return (*files, *(SourceFile(name, None) for name in (*folders, *odd)))


@dataclass(frozen=True)
class VerifiedFile:
    """A file that was compared with its digest, and what it looked like then."""

    path: Path
    stamp: FileStamp


@dataclass(frozen=True)
class HubSnapshot:
    """Files of one commit in a local folder. `commit` (40 hex digits) is the source's identity.

    `headers_only`: the weight files are sparse and hold their safetensors header alone; only the other files were
    compared with their digests. `files`: what was fetched; nothing else in `folder` counts. `verified`: the compared
    ones, see `verify_unchanged`. `listing`: all that the repository holds at this commit.
    """

    listing: HubListing
    folder: Path
    files: tuple[HubFile, ...]
    verified: tuple[VerifiedFile, ...] = ()
    headers_only: bool = False

    @property
    def reference(self) -> HubReference:
        return self.listing.reference

    @property
    def commit(self) -> str:
        return self.listing.commit


@dataclass(frozen=True)
class HubProgress:
    """How far one file and the files of its batch are, all in bytes. Called from worker threads, one at a time."""

    stage: Literal["download", "verify"]
    file: str
    file_done_bytes: int
    file_size_bytes: int
    total_done_bytes: int
    total_size_bytes: int


ProgressCallback = Callable[[HubProgress], None]


def _is_repo_id(text: str) -> bool:
    return (
        _REPO_ID.fullmatch(text) is not None
        and len(text) <= _MAX_REPO_ID_LENGTH
        and "--" not in text
        and ".." not in text
    )


def _is_revision(text: str) -> bool:
    return (
        _REVISION.fullmatch(text) is not None
        and len(text) <= _MAX_REVISION_LENGTH
        and ".." not in text
        and "//" not in text
        and "/." not in text
    )


def parse_hub_reference(text: str) -> HubReference | None:
    """The repository that `text` names, or None if it is a local path. Never uses the network.

    `hf://org/name[@revision]` is always a repository (UsageError if malformed; the revision defaults to main).
    `org/name@revision` is one unless it exists on disk, or a folder `org` does: then it may be a mistyped path.
    """
    if text.startswith(HUB_SCHEME):
        repo_id, at, revision = text[len(HUB_SCHEME) :].partition("@")
        revision = revision if at else DEFAULT_REVISION
        if not _is_repo_id(repo_id) or not _is_revision(revision):
            raise UsageError(
                f"{text!r} does not name a Hub repository",
                remedy="write hf://org/name or hf://org/name@revision, the revision being a branch, tag or commit",
            )
        return HubReference(repo_id, revision)
    repo_id, at, revision = text.partition("@")
    if not at or not _is_repo_id(repo_id) or not _is_revision(revision):
        return None
    # A typing error below an existing folder must be reported as a missing path, not sent over the network.
    if os.path.lexists(text) or os.path.lexists(repo_id.partition("/")[0]):
        return None
    return HubReference(repo_id, revision)


def hub_spelling(text: str) -> str | None:
    """How to write `text` so that it surely names a repository: "hf://org/name@revision"; None if it cannot be one."""
    repo_id, at, revision = text.partition("@")
    return HUB_SCHEME + text if _is_repo_id(repo_id) and (not at or _is_revision(revision)) else None
