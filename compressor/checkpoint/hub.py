"""A checkpoint on the Hugging Face Hub: resolve it to one commit, download what is needed, verify every file.

Everything is requested at the resolved commit, so a branch that moves meanwhile cannot mix two commits. The network
is used by `resolve`, `download_snapshot` and `download_headers` only, and never for a local path.
"""

from __future__ import annotations

from pathlib import Path

from memopt.compressor.checkpoint.disk_errors import RUN_AGAIN, disk_errors
from memopt.compressor.checkpoint.file_stamp import FileStamp
from memopt.compressor.checkpoint.hub_answers import Target
from memopt.compressor.checkpoint.hub_batch import ProgressMeter, run_batch
from memopt.compressor.checkpoint.hub_cache import HubCache, check_file, verify_stamp
from memopt.compressor.checkpoint.hub_headers import download_headers
from memopt.compressor.checkpoint.hub_http import HubClient, RetryPolicy
from memopt.compressor.checkpoint.hub_listing import metadata_files, render_listing, resolve, weight_files
from memopt.compressor.checkpoint.hub_types import (
    HubFile,
    HubListing,
    HubProgress,
    HubReference,
    HubSnapshot,
    ProgressCallback,
    VerifiedFile,
    parse_hub_reference,
)
from memopt.errors import MissingFileError, SourceChangedError

__all__ = [
    "HubFile",
    "HubListing",
    "HubProgress",
    "HubReference",
    "HubSnapshot",
    "RetryPolicy",
    "VerifiedFile",
    "download_headers",
    "download_snapshot",
    "parse_hub_reference",
    "resolve",
    "verify_unchanged",
]

DEFAULT_WORKERS = 4


def download_snapshot(
    reference: HubReference,
    *,
    cache_dir: Path | None = None,
    progress: ProgressCallback | None = None,
    allow_code: bool = False,
    retry: RetryPolicy | None = None,
    workers: int = DEFAULT_WORKERS,
    listing: HubListing | None = None,
    keep_free_bytes: int = 0,
) -> HubSnapshot:
    """Download and verify the files that a plan needs, into the Hub's cache: config, index, its shards, metadata.

    Finished files are kept and partial ones continue, within a call and across calls. With HF_HUB_OFFLINE only the
    cache is used, and verified all the same. Which small files come along says small_files.py; `.py` files do with
    `allow_code`. `listing`: what `resolve` gave before, so that a branch cannot move in between. `keep_free_bytes`
    must be left on the cache's disk.

    Every file that is in the cache already is hashed again: a note of an earlier check, beside the file, could be
    written by whoever may write the file.

    Raises UsageError (no such repository, no access), NetworkError (run again), SourceChangedError (a wrong byte or
    size; the bad copy is removed), MissingFileError, IndexFileError, MalformedError, UnsupportedError, DiskFullError.
    """
    listing = listing or resolve(reference, cache_dir=cache_dir, retry=retry)
    cache = HubCache.of(reference, cache_dir)
    client = None if listing.from_cache else HubClient.from_environment(retry or RetryPolicy())
    fetch = _Fetch(listing, cache, client, progress, workers, keep_free_bytes)
    metadata = metadata_files(listing, allow_code=allow_code)
    verified = fetch.run(metadata)
    folder = cache.snapshot(listing.commit)
    weights = weight_files(listing, folder)
    verified += fetch.run(weights)
    if not listing.from_cache:
        cache.record_revision(reference, listing.commit)
        cache.save_listing(listing.commit, render_listing(listing))
    return HubSnapshot(listing, folder, metadata + weights, verified)


def verify_unchanged(snapshot: HubSnapshot) -> None:
    """Check that no verified file was touched since: size and time of last change. SourceChangedError names it."""
    for file in snapshot.verified:
        verify_stamp(file, str(snapshot.reference))


class _Fetch:
    """Brings files of one listing into the cache; `client` None means that only the cache may be used."""

    def __init__(
        self,
        listing: HubListing,
        cache: HubCache,
        client: HubClient | None,
        progress: ProgressCallback | None,
        workers: int,
        keep_free_bytes: int,
    ) -> None:
        self._listing = listing
        self._cache = cache
        self._client = client
        self._progress = progress
        self._workers = workers
        self._keep_free_bytes = keep_free_bytes

    def run(self, files: tuple[HubFile, ...]) -> tuple[VerifiedFile, ...]:
        """Every file in the snapshot, verified once in this call, in the order of `files`."""
        if self._client is not None:
            self._cache.check_space(files, self._keep_free_bytes)
        # Files of equal content are one blob: two workers must not write it, and hashing it once is enough.
        blobs = tuple({file.blob_name: file for file in files}.values())
        meter = ProgressMeter(self._progress, blobs)
        stop = self._client.stop if self._client is not None else None
        stamps = run_batch(lambda file: self._bring(file, meter), blobs, self._workers, stop)
        by_blob = dict(zip((file.blob_name for file in blobs), stamps, strict=True))
        commit = self._listing.commit
        return tuple(VerifiedFile(self._cache.link(commit, file), by_blob[file.blob_name]) for file in files)

    def _bring(self, file: HubFile, meter: ProgressMeter) -> FileStamp:
        where = str(self._listing.reference)
        blob = self._cache.blob(file)
        if not blob.exists():
            if self._client is None:
                commit = self._listing.commit
                raise MissingFileError(
                    f"{where}: {file.path} of commit {commit} is not in the cache, and HF_HUB_OFFLINE is set",
                    remedy=f"unset HF_HUB_OFFLINE and {RUN_AGAIN}",
                )
            with disk_errors(f"{where}: cannot store {file.path}"), self._cache.locked(file):
                # Another process may have finished it while this one waited for the lock.
                if not blob.exists():
                    return self._download(self._client, file, meter)
        return self._verify_or_remove(blob, file, meter)

    def _download(self, client: HubClient, file: HubFile, meter: ProgressMeter) -> FileStamp:
        partial, blob = self._cache.partial(file), self._cache.blob(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        target = Target(self._listing.reference, self._listing.commit, file.path)
        client.fetch_file(target, partial, file.size_bytes, meter.ticker("download", file))
        self._verify_or_remove(partial, file, meter)
        partial.replace(blob)
        # Taken now: getting another name counts as a change.
        return FileStamp.of(blob.stat())

    def _verify_or_remove(self, path: Path, file: HubFile, meter: ProgressMeter) -> FileStamp:
        try:
            return check_file(path, file, str(self._listing.reference), meter.ticker("verify", file))
        except SourceChangedError:
            # Left in place it would be taken for the right file, or continued, by the next run.
            path.unlink(missing_ok=True)
            raise
