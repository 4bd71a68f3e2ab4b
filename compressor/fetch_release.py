"""A signed release comes from the Hub: signatures first, then the files they list and no others, then the verification.

Order: listing, signatures, policy, digests that the Hub publishes, download, whole verification, rename. Nothing but
signatures and the manifest is fetched before the signature holds and the policy accepts the release.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from memopt.compressor.checkpoint.disk_errors import disk_errors
from memopt.compressor.checkpoint.hub import HubFile, HubListing, HubReference, RetryPolicy
from memopt.compressor.checkpoint.hub_answers import Target
from memopt.compressor.checkpoint.hub_batch import ProgressMeter, run_batch
from memopt.compressor.checkpoint.hub_http import HubClient, is_offline
from memopt.compressor.checkpoint.hub_types import ProgressCallback
from memopt.compressor.hub_release import ReleaseFile, compare, list_files, named, refused_verdict, repository
from memopt.compressor.partial_release import PartialRelease, check_dest, sync
from memopt.errors import (
    BundleError,
    ContentError,
    ExitCode,
    ManifestError,
    MissingFileError,
    NetworkError,
)
from memopt.manifests.file_names import MANIFEST_NAME, SUMS_NAME, is_signature_name
from memopt.manifests.manifest import MAX_MANIFEST_SIZE_BYTES
from memopt.manifests.policy import TrustPolicy
from memopt.manifests.tree import open_root
from memopt.manifests.trusted_release import (
    MAX_SIGNATURE_SIZE_BYTES,
    MAX_SIGNATURES,
    TrustedRelease,
    check_trust,
    policy_errors,
    with_manifest,
)
from memopt.manifests.verify import ProgressCallback as HashCallback
from memopt.manifests.verify import VerifyOptions, verify_release

DEFAULT_WORKERS = 4
_UNSIZED = frozenset({MANIFEST_NAME, SUMS_NAME})
_MAX_UNSIZED_BYTES = MAX_MANIFEST_SIZE_BYTES


@dataclass(frozen=True)
class PullOptions:
    """`workers`: files at a time. `verify`: how the whole release is verified at the end."""

    workers: int = DEFAULT_WORKERS
    verify: VerifyOptions = field(default_factory=VerifyOptions)
    retry: RetryPolicy = field(default_factory=RetryPolicy)


@dataclass(frozen=True)
class PullResult:
    """`dest` holds the verified release of `commit`. `left_out`: remote files that it does not list. Sizes in bytes."""

    repository: str
    revision: str
    commit: str
    dest: Path
    root_digest: str
    identity: str | None
    counter: int | None
    num_files: int
    size_bytes: int
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    seconds: float


def pull_release(
    repo: str | HubReference,
    dest: str | Path,
    policy: TrustPolicy,
    options: PullOptions | None = None,
    progress: ProgressCallback | None = None,
    hashing: HashCallback | None = None,
) -> PullResult:
    """Download the release of `repo` (org/name@revision) at one commit into `dest` (absent or empty), and verify it.

    Until it verifies it lies in DEST.partial, where a second run continues it. Raises OutputError (`dest` is taken),
    what the verification found, MissingFileError, ContentError (the Hub publishes another digest than the signed one),
    UsageError (no such repository, no access), NetworkError, DiskFullError.
    """
    chosen = options or PullOptions()
    reference = repository(repo) if isinstance(repo, str) else repo
    started = time.monotonic()
    partial = PartialRelease(Path(dest).absolute())
    check_dest(partial.dest)
    if is_offline():
        raise NetworkError(f"HF_HUB_OFFLINE forbids to fetch {reference}", remedy="unset HF_HUB_OFFLINE")
    client = HubClient.from_environment(chosen.retry)
    listing = list_files(client, reference)
    fetch = _Fetch(client, listing, partial)
    with partial.locked():
        now = int(time.time()) if chosen.verify.now is None else chosen.verify.now
        trusted = fetch.trusted(policy, now)
        files = _signed_files(trusted)
        left_out = _require_listed(listing, files)
        expected = {file.path: file.sha256 for file in files}
        expected |= {name: hashlib.sha256(raw).hexdigest() for name, raw in trusted.signatures.items()}
        partial.expect(expected)
        fetch.keep_manifest()
        fetch.bring([file.path for file in files], chosen.workers, progress)
        with disk_errors(f"cannot use {partial.root}"):
            for name, raw in trusted.signatures.items():
                partial.path(name).write_bytes(raw)
                sync(partial.path(name))
        verdict = verify_release(partial.tree, policy, chosen.verify, hashing)
        if not verdict.is_ok:
            for finding in verdict.findings:
                if finding.file in expected and finding.exit_code == ExitCode.CONTENT:
                    partial.remove(finding.file)
            raise refused_verdict(verdict, f"{reference} at commit {listing.commit}")
        partial.finish()
    return PullResult(
        repository=reference.repo_id,
        revision=reference.revision,
        commit=listing.commit,
        dest=partial.dest,
        root_digest=trusted.root_digest,
        identity=verdict.identity,
        counter=verdict.counter,
        num_files=len(expected),
        size_bytes=sum(file.size_bytes for file in listing.files if file.path in expected),
        left_out=left_out,
        warnings=verdict.warnings,
        seconds=time.monotonic() - started,
    )


def _signed_files(trusted: TrustedRelease) -> tuple[ReleaseFile, ...]:
    return tuple(ReleaseFile(name, trusted.sizes.get(name), digest) for name, digest in trusted.digests.items())


def _require_listed(listing: HubListing, files: tuple[ReleaseFile, ...]) -> tuple[str, ...]:
    """The remote files that are no part of the release; refuse now what 400 GB later could only be refused too."""
    found = compare(listing, files)
    where = f"{listing.reference} at commit {listing.commit}"
    if found.missing:
        raise MissingFileError(
            f"{where} lacks signed files: {named(found.missing)}", remedy="ask the publisher to push the release again"
        )
    if found.different:
        raise ContentError(
            f"{where}: size or digest differs from what was signed: {named(found.different)}",
            remedy="do not use this commit; ask the publisher",
        )
    for file in files:
        # What has no signed size (the manifest itself, SHA256SUMS) must not fill the disk.
        listed = listing.find(file.path)
        size = listed.size_bytes if listed is not None else 0
        if file.path in _UNSIZED and size > _MAX_UNSIZED_BYTES:
            raise ManifestError(f"{where}: {size:,} bytes, at most {_MAX_UNSIZED_BYTES:,} are read", file=file.path)
    return tuple(path for path in found.extra if not is_signature_name(path))


class _Fetch:
    """Brings files of one listing."""

    def __init__(self, client: HubClient, listing: HubListing, partial: PartialRelease) -> None:
        self._client = client
        self._listing = listing
        self._partial = partial

    def trusted(self, policy: TrustPolicy, now: int) -> TrustedRelease:
        """What the signatures say, once they and the policy hold; only signatures and the manifest were fetched."""
        head = self._partial.root / "head"
        with disk_errors(f"cannot use {head}"):
            shutil.rmtree(head, ignore_errors=True)
            head.mkdir()
            for file in self._signatures():
                self._fetch_small(file, head)
        root_fd = open_root(head)
        try:
            release = check_trust(root_fd, policy, now)
            manifest = self._manifest() if MANIFEST_NAME in release.digests else None
            if manifest is not None:
                with disk_errors(f"cannot use {head}"):
                    self._fetch_small(manifest, head)
            release = with_manifest(root_fd, release)
        finally:
            os.close(root_fd)
        for error in policy_errors(release, policy, now):
            raise error
        return release

    def _fetch_small(self, file: HubFile, folder: Path) -> None:
        self._client.fetch_file(self._target(file), folder / file.path, file.size_bytes, lambda _: None)

    def _signatures(self) -> list[HubFile]:
        found = [file for file in self._listing.files if is_signature_name(file.path)]
        if len(found) > MAX_SIGNATURES:
            raise BundleError(
                f"is one of {len(found)} signatures, at most {MAX_SIGNATURES} are read", file=found[-1].path
            )
        for file in found:
            if file.size_bytes > MAX_SIGNATURE_SIZE_BYTES:
                raise BundleError(
                    f"{file.size_bytes:,} bytes, at most {MAX_SIGNATURE_SIZE_BYTES:,} are read", file=file.path
                )
        return found

    def _manifest(self) -> HubFile | None:
        file = self._listing.find(MANIFEST_NAME)
        if file is not None and file.size_bytes > MAX_MANIFEST_SIZE_BYTES:
            raise ManifestError(
                f"{file.size_bytes:,} bytes, at most {MAX_MANIFEST_SIZE_BYTES:,} are read", file=MANIFEST_NAME
            )
        return file

    def keep_manifest(self) -> None:
        """The manifest that was fetched and compared becomes part of the tree: it need not come twice."""
        path = self._partial.root / "head" / MANIFEST_NAME
        if path.exists():
            with disk_errors(f"cannot use {self._partial.root}"):
                path.replace(self._partial.path(MANIFEST_NAME))

    def bring(self, names: list[str], workers: int, progress: ProgressCallback | None) -> None:
        """Every file of `names`, continued where an earlier run stopped."""
        files = [file for name in names if (file := self._listing.find(name)) is not None]
        with disk_errors(f"cannot use {self._partial.root}"):
            self._partial.check_space({file.path: file.size_bytes for file in files})
        meter = ProgressMeter(progress, files)

        def fetch(file: HubFile) -> None:
            path = self._partial.path(file.path)
            with disk_errors(f"{self._listing.reference}: cannot store {file.path}"):
                self._client.fetch_file(self._target(file), path, file.size_bytes, meter.ticker("download", file))
                sync(path)

        run_batch(fetch, files, workers, self._client.stop)

    def _target(self, file: HubFile) -> Target:
        return Target(self._listing.reference, self._listing.commit, file.path)
