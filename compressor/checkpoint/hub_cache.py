"""The Hub's cache on disk (blobs named by digest, snapshots of links to them), shared with huggingface_hub.

A blob gets its final name only after its content was compared with that name, so a finished file is a right file.
"""

from __future__ import annotations

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

from memopt.compressor.checkpoint.disk_errors import RUN_AGAIN, disk_errors
from memopt.compressor.checkpoint.file_stamp import FileStamp
from memopt.compressor.checkpoint.hub_types import HubFile, HubListing, HubReference, VerifiedFile
from memopt.errors import DiskFullError, LayoutError, NetworkError, SourceChangedError
from memopt.manifests.open_file import open_regular

READ_SIZE_BYTES = 4 * 2**20
_SHA1_LENGTH = 40
_BLOB_NAME = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


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
            _write(path, commit.encode())

    def listing(self, commit: str) -> Path:
        """Where memopt keeps what the Hub said of a commit: the snapshot alone may lack files, or hold others'."""
        return self.root / ".memopt" / f"{commit}.json"

    def save_listing(self, commit: str, raw: bytes) -> None:
        """Remember a listing for offline mode. A cache that cannot be written is no error."""
        with suppress(OSError):
            _write(self.listing(commit), raw)

    def shares_disk_with(self, folder: Path) -> bool:
        """Whether what is written to `folder` takes its space from this cache; neither need exist yet."""
        return _device(self.root) == _device(folder)

    def check_space(self, files: tuple[HubFile, ...], keep_free_bytes: int = 0) -> None:
        """DiskFullError unless the missing parts of `files` fit and `keep_free_bytes` are free after them."""
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
        if needed + keep_free_bytes > free:
            release = f" and {keep_free_bytes:,} to write for the release" if keep_free_bytes else ""
            download = f"{needed:,} bytes ({needed / 2**30:.1f} GiB) are still to download{release}"
            raise DiskFullError(
                f"{download}, {self.root} has {free:,} free",
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
    if FileStamp.of(before) != FileStamp.of(after):
        raise SourceChangedError(f"{where}: {file.path} changed while it was verified", remedy=RUN_AGAIN)
    if digest.hexdigest() != file.blob_name:
        kind = "git blob SHA-1" if is_git else "SHA-256"
        raise SourceChangedError(
            f"{where}: {file.path} has {kind} {digest.hexdigest()}, the Hub lists {file.blob_name}",
            remedy="the local copy was removed: run the same command again to fetch it anew",
        )
    return FileStamp.of(after)


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{uuid.uuid4().hex}.tmp")
    new.write_bytes(raw)
    new.replace(path)


def _device(path: Path) -> int:
    """The file system of `path`, or of the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.stat().st_dev


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


def verify_stamp(file: VerifiedFile, where: str) -> None:
    """SourceChangedError unless the file still looks as it did when it was verified."""
    try:
        with open_regular(file.path) as (_, status):
            found = FileStamp.of(status)
    except LayoutError:
        raise SourceChangedError(
            f"{where}: {file.path.name} was removed after it was verified", remedy=RUN_AGAIN
        ) from None
    if found != file.stamp:
        raise SourceChangedError(
            f"{where}: {file.path.name} changed after it was verified: {file.stamp.size_bytes:,} bytes, changed at "
            f"{file.stamp.changed_ns} ns then; {found.size_bytes:,}, {found.changed_ns} now",
            remedy="stop whatever writes to the cache and run the same command again",
        )
