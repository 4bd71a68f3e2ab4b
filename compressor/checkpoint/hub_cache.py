"""The Hub's cache on disk (blobs named by digest, snapshots of links to them), shared with huggingface_hub.

A blob gets its final name only after its content was compared with that name, so a finished file is a right file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from memopt.compressor.checkpoint.hub_answers import RUN_AGAIN
from memopt.compressor.checkpoint.hub_types import FileStamp, HubFile, HubListing, HubReference
from memopt.errors import DiskFullError, LayoutError, MemoptIOError, NetworkError, SourceChangedError
from memopt.manifests.open_file import open_regular

READ_SIZE_BYTES = 4 * 2**20
_SHA1_LENGTH = 40
_BLOB_NAME = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn the system's errors about a path into DiskFullError or MemoptIOError, naming `what`."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFullError(f"{what}: no space is left", remedy=f"free some space, then {RUN_AGAIN}") from error
        raise MemoptIOError(f"{what}: {error.strerror or type(error).__name__}", file=error.filename) from error


@dataclass(frozen=True)
class HubCache:
    """The part of the cache that belongs to one repository. `root`: …/models--org--name."""

    root: Path

    @classmethod
    def of(cls, reference: HubReference, cache_dir: Path | None) -> HubCache:
        """The repository's folder below `cache_dir` (default: the Hub's own, by HF_HOME or HF_HUB_CACHE)."""
        from huggingface_hub import constants

        base = Path(cache_dir if cache_dir is not None else constants.HF_HUB_CACHE).expanduser().absolute()
        return cls(base / ("models--" + reference.repo_id.replace("/", "--")))

    def blob(self, file: HubFile) -> Path:
        return self.root / "blobs" / file.blob_name

    def partial(self, file: HubFile) -> Path:
        return self.root / "blobs" / f"{file.blob_name}.incomplete"

    def snapshot(self, commit: str) -> Path:
        return self.root / "snapshots" / commit

    @contextmanager
    def locked(self, file: HubFile) -> Iterator[None]:
        """Keep other processes from writing the same blob (huggingface_hub takes the same lock).

        Where the file system knows no locks nobody is kept out: two writers then spoil a partial file, which its
        digest shows.
        """
        path = self.root.parent / ".locks" / self.root.name / f"{file.blob_name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def link(self, commit: str, file: HubFile) -> Path:
        """Make `file` appear in the snapshot of `commit`; MemoptIOError where links are not possible."""
        path = self.snapshot(commit) / file.path
        target = os.path.join("..", "..", "blobs", file.blob_name)
        if path.is_symlink() and os.readlink(path) == target:
            return path
        with disk_errors(f"cannot link {file.path} in the Hub's cache"):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{uuid.uuid4().hex}.tmp")
            new.symlink_to(target)
            new.replace(path)
        return path

    def record_revision(self, reference: HubReference, commit: str) -> None:
        """Remember what a branch or tag means, for offline mode. A cache that cannot be written is no error."""
        if reference.revision == commit:
            return
        path = self.root / "refs" / reference.revision
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{uuid.uuid4().hex}.tmp")
            new.write_text(commit)
            new.replace(path)

    def check_space(self, files: tuple[HubFile, ...]) -> None:
        """DiskFullError if the missing parts of `files` do not fit."""
        needed = 0
        for file in {file.blob_name: file for file in files}.values():
            if not self.blob(file).exists():
                partial = self.partial(file)
                needed += file.size_bytes - min(file.size_bytes, partial.stat().st_size if partial.exists() else 0)
        if not needed:
            return
        with disk_errors(f"cannot use the Hub's cache {self.root}"):
            self.root.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.root).free
        if needed > free:
            raise DiskFullError(
                f"{needed:,} bytes ({needed / 2**30:.1f} GiB) are still to download, {self.root} has {free:,} free",
                remedy=f"free some space or name another cache folder, then {RUN_AGAIN}",
            )


def check_file(path: Path, file: HubFile, where: str, tick: Callable[[int], None]) -> FileStamp:
    """Compare size and digest of `path` with the listing; SourceChangedError naming file, expected and found.

    The digest is SHA-256 for a file in Git LFS and git's SHA-1 (of "blob <size>\\0" and the data) for another.
    """
    is_git = len(file.blob_name) == _SHA1_LENGTH
    digest = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False) if is_git else hashlib.sha256()
    buffer = memoryview(bytearray(min(READ_SIZE_BYTES, max(file.size_bytes, 1))))
    with open_regular(path) as (descriptor, before), disk_errors(f"cannot read {file.path}"):
        if before.st_size != file.size_bytes:
            raise SourceChangedError(
                f"{where}: {file.path} has {before.st_size:,} bytes, the Hub lists {file.size_bytes:,}",
                remedy="the local copy was removed: run the same command again to fetch it anew",
            )
        done = 0
        while count := os.readv(descriptor, [buffer]):
            digest.update(buffer[:count])
            done += count
            tick(done)
        after = os.fstat(descriptor)
    if FileStamp.of(path, before) != FileStamp.of(path, after):
        raise SourceChangedError(f"{where}: {file.path} changed while it was verified", remedy=RUN_AGAIN)
    if digest.hexdigest() != file.blob_name:
        kind = "git blob SHA-1" if is_git else "SHA-256"
        raise SourceChangedError(
            f"{where}: {file.path} has {kind} {digest.hexdigest()}, the Hub lists {file.blob_name}",
            remedy="the local copy was removed: run the same command again to fetch it anew",
        )
    return FileStamp.of(path, after)


def cached_listing(reference: HubReference, cache_dir: Path | None) -> HubListing:
    """What the cache holds of `reference`, without the network; NetworkError if it holds nothing of it.

    Digests come from the blobs' names, so the files can still be verified.
    """
    cache = HubCache.of(reference, cache_dir)
    commit = reference.revision
    ref = cache.root / "refs" / reference.revision
    with disk_errors(f"cannot read the Hub's cache of {reference}"):
        if _COMMIT.fullmatch(commit) is None and ref.is_file():
            commit = ref.read_text(errors="replace").strip()
        folder = cache.snapshot(commit)
        if _COMMIT.fullmatch(commit) is None or not folder.is_dir():
            raise NetworkError(
                f"{reference} is not in the cache {cache.root.parent}, and HF_HUB_OFFLINE forbids the network",
                remedy="unset HF_HUB_OFFLINE, or name a local folder",
            )
        files = []
        for path in sorted(folder.iterdir()):
            name = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
            if _BLOB_NAME.fullmatch(name) and path.is_file():
                is_git = len(name) == _SHA1_LENGTH
                size = path.stat().st_size
                files.append(HubFile(path.name, size, None if is_git else name, name if is_git else ""))
    return HubListing(reference, commit, tuple(files), from_cache=True)


def verify_stamp(stamp: FileStamp, where: str) -> None:
    """SourceChangedError unless the file still looks as it did when it was verified."""
    try:
        with open_regular(stamp.path) as (_, status):
            found = FileStamp.of(stamp.path, status)
    except LayoutError:
        raise SourceChangedError(
            f"{where}: {stamp.path.name} was removed after it was verified", remedy=RUN_AGAIN
        ) from None
    if found != stamp:
        raise SourceChangedError(
            f"{where}: {stamp.path.name} changed after it was verified: {stamp.size_bytes:,} bytes, inode "
            f"{stamp.inode}, modified at {stamp.mtime_ns} ns then; {found.size_bytes:,}, {found.inode}, "
            f"{found.mtime_ns} now",
            remedy="stop whatever writes to the cache and run the same command again",
        )
