"""What is known of a release once its signatures hold: its names, digests, manifest and chunk digests.

Order, never another: signatures over the received bytes, statement, names, the manifest's digest, the manifest, the
policy, the chunk file. Nothing of a payload is used before its signature holds, nothing of a file before its digest.
Every file is read once, into memory, and that memory is what is checked and used.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from memopt.errors import (
    BundleError,
    ContentError,
    LayoutError,
    LfsPointerError,
    ManifestError,
    MemoptError,
    MemoptIOError,
    MissingFileError,
    UnsignedError,
)
from memopt.manifests.chunk_file import MAX_CHUNKS_SIZE_BYTES, ChunkLeaves, parse_chunks
from memopt.manifests.digest import LEAF_SIZE_BYTES
from memopt.manifests.file_names import (
    CHUNKS_NAME,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    SUMS_NAME,
    is_signature_name,
)
from memopt.manifests.hashing import read_small_file
from memopt.manifests.manifest import MAX_MANIFEST_SIZE_BYTES, Manifest, parse_manifest
from memopt.manifests.verified_reader import SignedFile

if TYPE_CHECKING:
    from memopt.manifests.keys import PublicKey
    from memopt.manifests.policy import TrustPolicy
    from memopt.manifests.statement import Statement
    from memopt.manifests.tree import Tree

MAX_SIGNATURE_SIZE_BYTES = 64 * 2**20
MAX_SIGNATURES = 16
_LFS_MAGIC = b"version https://git-lfs"
_REMEDY = "fetch the release again, or ask its publisher for a signed one"


@dataclass(frozen=True)
class TrustedRelease:
    """`manifest` and `leaves` are None for a release that another tool signed (whole-file digests only).

    `signatures`: name -> bytes of the signature files, as read. `manifest_digest`: SHA-256 (hex) of the manifest file.
    """

    statement: Statement
    root_digest: str
    signers: tuple[PublicKey, ...]
    signatures: Mapping[str, bytes]
    manifest: Manifest | None = None
    manifest_digest: str | None = None
    leaves: ChunkLeaves | None = None

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 (hex) of every signed file, by name."""
        return {resource.name: resource.sha256 for resource in self.statement.resources}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Signed sizes in bytes; all files of the manifest, so none without one."""
        return {} if self.manifest is None else {file.path: file.size_bytes for file in self.manifest.files}

    def signed_file(self, name: str, size_bytes: int) -> SignedFile:
        """How to check file `name`, by chunks if they are signed; `size_bytes` counts only where no size is signed."""
        size_bytes = self.sizes.get(name, size_bytes)
        if self.leaves is not None and name in self.leaves.ranges:
            return SignedFile(name, size_bytes, self.leaves.of(name))
        return SignedFile.whole(name, size_bytes, self.digests[name])


def read_signatures(root_fd: int) -> list[tuple[str, bytes]]:
    """(name, bytes) of every signature file at the top of a release, model.sig first.

    Raises UnsignedError if there is none, BundleError if one is empty or a folder, LfsPointerError, LayoutError for a
    link, MemoptIOError.
    """
    try:
        names = sorted((name for name in os.listdir(root_fd) if is_signature_name(name)), key=_signature_order)
    except OSError as problem:
        raise MemoptIOError(f"cannot list the release: {problem.strerror}", file=".", remedy="try again") from None
    if not names:
        raise UnsignedError("is missing: this release is not signed", file=SIGNATURE_NAME, remedy=_REMEDY)
    if len(names) > MAX_SIGNATURES:
        raise BundleError(f"is one of {len(names)} signature files, at most {MAX_SIGNATURES} are read", file=names[-1])
    return [(name, _read_signature(root_fd, name)) for name in names]


def _signature_order(name: str) -> tuple[bool, str]:
    return name != SIGNATURE_NAME, name


def _read_signature(root_fd: int, name: str) -> bytes:
    try:
        raw = read_small_file(root_fd, name, MAX_SIGNATURE_SIZE_BYTES)
    except (LayoutError, ContentError) as problem:
        if isinstance(problem, ContentError) or "a folder" in problem.message:
            raise BundleError(problem.message, file=name, remedy=_REMEDY) from None
        raise
    if not raw:
        raise BundleError("is empty", file=name, remedy=_REMEDY)
    if raw.startswith(_LFS_MAGIC):
        raise LfsPointerError("is a Git-LFS pointer, not a signature", file=name, remedy="run `git lfs pull`")
    return raw


def check_trust(root_fd: int, policy: TrustPolicy, now: int) -> TrustedRelease:
    """Who signed and what: signatures, statement and names. `now`: seconds since 1970.

    Raises SignatureError, BundleError, UnsupportedError, FileNameError, LayoutError (two names that are one file on
    some systems), PolicyError (left out files), MemoptIOError.
    """
    from memopt.manifests.trust import check_signatures

    bundles = read_signatures(root_fd)
    trusted = check_signatures(bundles, policy, now)
    return TrustedRelease(trusted.statement, trusted.root_digest, tuple(trusted.signers), dict(bundles))


def read_signed(root_fd: int, name: str, sha256: str, max_size_bytes: int) -> bytes:
    """A small file's bytes, read once and equal to the signed digest; ContentError, or as `read_small_file`."""
    raw = read_small_file(root_fd, name, max_size_bytes)
    if not hmac.compare_digest(hashlib.sha256(raw).hexdigest(), sha256):
        raise ContentError(
            f"its {len(raw):,} bytes are not what was signed",
            file=name,
            remedy="fetch the file again; if it still differs, somebody changed it",
        )
    return raw


def with_manifest(root_fd: int, release: TrustedRelease) -> TrustedRelease:
    """`release` with its manifest, if it lists one.

    Raises MissingFileError, ContentError, ManifestError (also if manifest and statement differ), MemoptIOError.
    """
    digest = release.digests.get(MANIFEST_NAME)
    if digest is None:
        return release
    manifest = parse_manifest(read_signed(root_fd, MANIFEST_NAME, digest, MAX_MANIFEST_SIZE_BYTES))
    _check_same_files(manifest, release.digests)
    return replace(release, manifest=manifest, manifest_digest=digest)


def _check_same_files(manifest: Manifest, signed: dict[str, str]) -> None:
    """ManifestError unless the manifest lists every signed file but itself and SHA256SUMS, with the same digest."""
    listed = {file.path: file.sha256 for file in manifest.files}
    others = {name: digest for name, digest in signed.items() if name not in {MANIFEST_NAME, SUMS_NAME}}
    if listed == others:
        return
    name = min(name for name in listed.keys() | others.keys() if listed.get(name) != others.get(name))
    fault = "differs between manifest and signature" if name in listed and name in others else "is in only one of them"
    raise ManifestError(f"{name}: {fault}", file=MANIFEST_NAME, remedy="sign the release again")


def policy_errors(release: TrustedRelease, policy: TrustPolicy, now: int) -> list[MemoptError]:
    """Everything that the policy holds against `release`."""
    from memopt.manifests.policy import check_policy

    return check_policy(policy, release.manifest, release.statement, release.signers, now)


def with_leaves(root_fd: int, release: TrustedRelease) -> TrustedRelease:
    """`release` with the digests of its chunks, if its manifest has them.

    Raises MissingFileError, ContentError, ManifestError, MemoptIOError.
    """
    if release.manifest is None:
        return release
    entry = release.manifest.file(CHUNKS_NAME)
    if entry is None:
        raise ManifestError(f"lists no {CHUNKS_NAME}", file=MANIFEST_NAME, remedy="sign the release again")
    if entry.size_bytes > MAX_CHUNKS_SIZE_BYTES or entry.size_bytes % LEAF_SIZE_BYTES:
        raise ManifestError(f"gives {CHUNKS_NAME} {entry.size_bytes:,} bytes", file=MANIFEST_NAME)
    raw = read_signed(root_fd, CHUNKS_NAME, entry.sha256, MAX_CHUNKS_SIZE_BYTES)
    return replace(release, leaves=parse_chunks(raw, release.manifest))


def load_trusted(root_fd: int, policy: TrustPolicy, now: int | None = None) -> TrustedRelease:
    """All of the above in order; raises the first problem. `now`: seconds since 1970, UTC (None: the clock's).

    What it returns says what the files must be; the files themselves are still to be checked.
    """
    seconds = int(time.time()) if now is None else now
    release = with_manifest(root_fd, check_trust(root_fd, policy, seconds))
    for error in policy_errors(release, policy, seconds):
        raise error
    return with_leaves(root_fd, release)


def check_tree(tree: Tree, release: TrustedRelease, policy: TrustPolicy) -> list[MemoptError]:
    """What lies on disk that nobody signed, links and special files; missing files are not looked for."""
    known = release.digests.keys() | release.signatures.keys()
    # A link in place of a folder that holds signed files would hide them behind files that nobody signed.
    folders = {name[: place.start()] for name in known for place in re.finditer("/", name)}

    def is_allowed(name: str) -> bool:
        return name not in known and name not in folders and policy.allows_extra(name)

    return [
        *(error for error in tree.problems if not is_allowed(error.file or ".")),
        *(unlisted(name) for name in sorted(tree.files.keys() - known) if not is_allowed(name)),
    ]


def unlisted(name: str) -> LayoutError:
    """The refusal of a file that nobody signed."""
    shown = name if name.isprintable() else ascii(name)
    return LayoutError("is not listed by the signed release", file=shown, remedy="remove it, or allow it in the policy")


def missing(name: str) -> MissingFileError:
    """The refusal for a signed file that is not there."""
    return MissingFileError("is listed but not there", file=name, remedy="fetch the release again")
