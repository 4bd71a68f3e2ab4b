"""Opening SRC: a folder, or a Hub repository as org/name@revision."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memopt.compressor.checkpoint.checkpoint import Checkpoint, CheckpointScan, open_checkpoint, scan_checkpoint
from memopt.compressor.checkpoint.disk_errors import RUN_AGAIN
from memopt.compressor.checkpoint.hub import (
    HubListing,
    HubProgress,
    HubReference,
    HubSnapshot,
    download_headers,
    download_snapshot,
    parse_hub_reference,
    verify_unchanged,
)
from memopt.compressor.checkpoint.hub_types import hub_spelling
from memopt.compressor.progress import DownloadCallback
from memopt.compressor.source_identity import SourceIdentity
from memopt.errors import InterruptedRunError, UsageError


@dataclass(frozen=True)
class OpenedSource:
    """A checkpoint and where it came from. `snapshot` is set for a Hub source whose weights were fetched."""

    checkpoint: Checkpoint
    identity: SourceIdentity
    snapshot: HubSnapshot | None = None

    def require_unchanged(self) -> None:
        """SourceChangedError if a file that was verified against the Hub was touched since."""
        if self.snapshot is not None:
            verify_unchanged(self.snapshot)


def hub_identity(snapshot: HubSnapshot) -> SourceIdentity:
    """The repository, the commit, and the digests that the Hub publishes for its files."""
    digests = tuple((file.path, file.sha256) for file in snapshot.files if file.sha256 is not None)
    reference = snapshot.reference
    return SourceIdentity("hub", reference.repo_id, snapshot.commit, digests)


def local_folder(source: str | Path) -> Path:
    """The folder that `source` names; UsageError if there is none, which says how to name the repository instead."""
    # Not Path.is_dir, which raises for a name that is too long.
    if os.path.isdir(source):
        return Path(source)
    spelling = hub_spelling(str(source))
    raise UsageError(
        f"there is no checkpoint folder {source}",
        remedy=f"name a folder, or for the Hub repository write {spelling}"
        if spelling
        else "name a folder, or a Hub repository as org/name@revision",
    )


@contextmanager
def hub_headers(reference: HubReference, *, allow_code: bool) -> Iterator[HubSnapshot]:
    """Small files and headers of a repository in a folder that goes afterwards; raises as `download_headers`."""
    with tempfile.TemporaryDirectory(prefix="memopt-headers-") as folder:
        yield download_headers(reference, Path(folder), allow_code=allow_code)


@contextmanager
def scanned_source(source: str | Path, *, allow_code: bool = False) -> Iterator[tuple[CheckpointScan, SourceIdentity]]:
    """Headers of a folder or of a Hub repository; of the latter only headers are fetched, into a passing folder."""
    reference = parse_hub_reference(str(source))
    if reference is None:
        yield scan_checkpoint(local_folder(source)), SourceIdentity()
        return
    with hub_headers(reference, allow_code=allow_code) as snapshot:
        yield scan_checkpoint(snapshot.folder, snapshot.listing.top), hub_identity(snapshot)


def open_source(
    source: str | Path,
    *,
    download: DownloadCallback | None = None,
    allow_code: bool = False,
    listing: HubListing | None = None,
    keep_free_bytes: int = 0,
) -> OpenedSource:
    """A whole checkpoint, ready to be read: a folder as it is, a Hub repository fetched and checked first.

    `listing`: what was resolved before, so that the same commit is opened. `keep_free_bytes` stay free on the disk of
    the Hub's cache. Raises as `open_checkpoint` and `download_snapshot`. A local path never causes a network call.
    """
    reference = parse_hub_reference(str(source))
    if reference is None:
        return OpenedSource(open_checkpoint(local_folder(source)), SourceIdentity())

    def report(progress: HubProgress) -> None:
        if download is not None:
            download(progress.stage, progress.file, progress.total_done_bytes, progress.total_size_bytes)

    with continuable(reference):
        snapshot = download_snapshot(
            reference, progress=report, allow_code=allow_code, listing=listing, keep_free_bytes=keep_free_bytes
        )
        checkpoint = open_checkpoint(snapshot.folder, snapshot.listing.top)
    return OpenedSource(checkpoint, hub_identity(snapshot), snapshot)


@contextmanager
def continuable(reference: HubReference) -> Iterator[None]:
    """Ctrl-C between the first fetched byte and the last look at it: InterruptedRunError says that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(f"{reference}: stopped while it was fetched or checked", remedy=RUN_AGAIN) from None
