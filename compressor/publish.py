"""A verified release goes to the Hub in one commit, and what the Hub then holds is compared with what was signed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from memopt.compressor.checkpoint.hub import HubListing, HubReference, RetryPolicy
from memopt.compressor.checkpoint.hub_http import HubClient, is_offline
from memopt.compressor.hub_release import (
    Comparison,
    compare,
    list_commit,
    list_files,
    named,
    refused_verdict,
    repository,
)
from memopt.compressor.hub_upload import CommitRequest, UploadProgress, upload_commit
from memopt.compressor.local_release import LocalRelease
from memopt.errors import ContentError, LayoutError, NetworkError, UsageError
from memopt.manifests.policy import TrustPolicy
from memopt.manifests.tree import open_root
from memopt.manifests.verify import ProgressCallback as HashCallback
from memopt.manifests.verify import VerifyOptions, verify_release


@dataclass(frozen=True)
class PushOptions:
    """`delete_extra`: remove remote files that the release lacks, in the same commit. `message`: the commit's."""

    delete_extra: bool = False
    message: str | None = None
    verify: VerifyOptions | None = None
    retry: RetryPolicy | None = None


@dataclass(frozen=True)
class PushResult:
    """`commit` (40 hex digits) holds exactly the release. Sizes in bytes."""

    repository: str
    branch: str
    commit: str
    root_digest: str
    num_files: int
    size_bytes: int
    sent_files: tuple[str, ...]
    sent_size_bytes: int
    deleted_files: tuple[str, ...]
    seconds: float


def push_release(
    folder: str | Path,
    repo: str | HubReference,
    policy: TrustPolicy,
    options: PushOptions | None = None,
    progress: UploadProgress | None = None,
    hashing: HashCallback | None = None,
) -> PushResult:
    """Verify `folder`, send what `repo` (org/name@branch) lacks, and compare every remote file with what was signed.

    Nothing is requested before the release verifies, and nothing is written into it. A second run sends only what is
    missing. Raises what the verification found, LayoutError (remote files that the release lacks; a remote file that
    is missing afterwards), ContentError (a remote digest differs), UsageError, NetworkError.
    """
    chosen = options or PushOptions()
    reference = repository(repo) if isinstance(repo, str) else repo
    started = time.monotonic()
    verdict = verify_release(folder, policy, chosen.verify, hashing)
    if not verdict.is_ok:
        raise refused_verdict(verdict, str(folder))
    if verdict.is_partial:
        raise UsageError("only a whole release is pushed", remedy="verify all ranks, without --quick")
    if is_offline():
        raise NetworkError(f"HF_HUB_OFFLINE forbids to push to {reference}", remedy="unset HF_HUB_OFFLINE")
    root_fd = open_root(folder)
    try:
        release = LocalRelease(root_fd, Path(folder).absolute(), policy, verdict.root_digest)
        client = HubClient.from_environment(chosen.retry or RetryPolicy())
        before = list_files(client, reference)
        if before.commit == reference.revision:
            raise UsageError(f"{reference} names a commit", remedy="name a branch: a commit cannot change")
        found = compare(before, release.files.values(), release.git_blob_id)
        if found.extra and not chosen.delete_extra:
            raise LayoutError(
                f"{reference} holds files that the release lacks: {named(found.extra)}",
                remedy="push to another repository or branch, or delete them with --delete-extra",
            )
        wanted = (*found.missing, *found.different)
        commit = before.commit
        if wanted or found.extra:
            message = chosen.message or f"Release {verdict.identity or release.root_digest[:12]}"
            uploads = tuple(release.upload(path) for path in wanted)
            request = CommitRequest(reference, before.commit, message, uploads, found.extra)
            commit = upload_commit(request, progress)
        after = list_commit(client, reference, commit)
        _require_same(after, compare(after, release.files.values(), release.git_blob_id))
    finally:
        os.close(root_fd)
    sizes = {path: file.size_bytes or 0 for path, file in release.files.items()}
    return PushResult(
        repository=reference.repo_id,
        branch=reference.revision,
        commit=commit,
        root_digest=release.root_digest,
        num_files=len(sizes),
        size_bytes=sum(sizes.values()),
        sent_files=wanted,
        sent_size_bytes=sum(sizes[path] for path in wanted),
        deleted_files=found.extra,
        seconds=time.monotonic() - started,
    )


def _require_same(listing: HubListing, found: Comparison) -> None:
    where = f"{listing.reference.repo_id}, commit {listing.commit}"
    remedy = "do not announce this commit: push again, or revert it"
    if found.different:
        raise ContentError(f"{where}: the digest differs from the signed one: {named(found.different)}", remedy=remedy)
    if found.missing:
        raise LayoutError(
            f"{where} lacks {named(found.missing)}", remedy=f"{remedy} (a .gitignore may have kept them out)"
        )
    if found.extra:
        raise LayoutError(f"{where} holds files that the release lacks: {named(found.extra)}", remedy=remedy)
