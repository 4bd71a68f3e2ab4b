"""Opening SRC: a folder, or a Hub repository as org/name@revision."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memopt.compressor.checkpoint.checkpoint import Checkpoint, CheckpointScan, open_checkpoint, scan_checkpoint
from memopt.compressor.checkpoint.hub import (
    HubProgress,
    HubReference,
    HubSnapshot,
    download_headers,
    download_snapshot,
    parse_hub_reference,
    verify_unchanged,
)
from memopt.compressor.metadata_files import is_metadata_file
from memopt.compressor.progress import DownloadCallback
from memopt.compressor.source_identity import SourceIdentity


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
    return SourceIdentity("hub", reference.repo_id, reference.revision, snapshot.commit, digests)


@contextmanager
def scanned_source(source: str | Path) -> Iterator[tuple[CheckpointScan, SourceIdentity]]:
    """Headers of a folder or of a Hub repository; of the latter only headers are fetched, into a passing folder."""
    reference = parse_hub_reference(str(source))
    if reference is None:
        yield scan_checkpoint(Path(source)), SourceIdentity()
        return
    with tempfile.TemporaryDirectory(prefix="memopt-headers-") as folder:
        snapshot = download_headers(reference, Path(folder), wanted_metadata=is_metadata_file)
        yield scan_checkpoint(snapshot.folder), hub_identity(snapshot)


def open_source(source: str | Path, *, download: DownloadCallback | None = None) -> OpenedSource:
    """A whole checkpoint, ready to be read: a folder as it is, a Hub repository fetched and checked first.

    Raises as `open_checkpoint` and `download_snapshot`. A local path never causes a network call.
    """
    reference = parse_hub_reference(str(source))
    if reference is None:
        return OpenedSource(open_checkpoint(Path(source)), SourceIdentity())
    return _open_hub(reference, download)


def _open_hub(reference: HubReference, download: DownloadCallback | None) -> OpenedSource:
    def report(progress: HubProgress) -> None:
        if download is not None:
            download(progress.stage, progress.file, progress.total_done_bytes, progress.total_size_bytes)

    snapshot = download_snapshot(reference, progress=report, wanted_metadata=is_metadata_file)
    return OpenedSource(open_checkpoint(snapshot.folder), hub_identity(snapshot), snapshot)
