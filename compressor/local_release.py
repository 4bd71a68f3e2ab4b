"""The files of a verified release on this machine, read for an upload: what is sent is what was signed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from memopt.compressor.hub_release import ReleaseFile
from memopt.compressor.hub_upload import Upload
from memopt.errors import ContentError, MemoptIOError, UsageError
from memopt.manifests.policy import TrustPolicy
from memopt.manifests.tree import open_file_at, scan_tree
from memopt.manifests.trusted_release import load_trusted

# Up to this size a file is read once, compared with its digest, and that very memory is sent. The Hub takes larger
# files into LFS, where the digest is taken while they are sent.
WHOLE_FILE_SIZE_BYTES = 10 * 2**20
_READ_SIZE_BYTES = 4 * 2**20
_FORBIDDEN_PARTS = frozenset({".git", ".cache"})


class LocalRelease:
    """The signed files and the signatures themselves, read below one descriptor without following links.

    `files`: by name. Raises what `load_trusted` raises, ContentError if the release is not the one of `root_digest`,
    UsageError for a name that the Hub refuses.
    """

    def __init__(self, root_fd: int, folder: Path, policy: TrustPolicy, root_digest: str | None) -> None:
        self._root_fd = root_fd
        self._folder = folder
        self._blob_ids: dict[str, str] = {}
        trusted = load_trusted(root_fd, policy)
        if trusted.root_digest != root_digest:
            raise ContentError("the release was exchanged after it was verified", remedy="run the same command again")
        self.root_digest = trusted.root_digest
        # A manifest does not give its own size, nor that of SHA256SUMS.
        sizes = {name: status.size_bytes for name, status in scan_tree(root_fd).files.items()} | trusted.sizes
        files = [ReleaseFile(name, sizes.get(name), digest) for name, digest in trusted.digests.items()]
        files += [
            ReleaseFile(name, len(raw), hashlib.sha256(raw).hexdigest()) for name, raw in trusted.signatures.items()
        ]
        self.files = {file.path: file for file in files}
        for path in self.files:
            if not _FORBIDDEN_PARTS.isdisjoint(path.split("/")):
                raise UsageError("the Hub takes no file in a .git or .cache folder", file=path)

    def upload(self, path: str) -> Upload:
        """What to send for `path`; ContentError if a small file is not what was signed."""
        file = self.files[path]
        size_bytes = file.size_bytes or 0
        if size_bytes > WHOLE_FILE_SIZE_BYTES:
            return Upload(path, self._folder / path, size_bytes, file.sha256)
        raw = self._read(path, file.sha256)
        return Upload(path, raw, len(raw), file.sha256)

    def git_blob_id(self, path: str) -> str:
        """Git's SHA-1 of the file, of bytes whose SHA-256 is the signed one; ContentError if it is not."""
        if path not in self._blob_ids:
            raw = self._read(path, self.files[path].sha256)
            blob = hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False)
            self._blob_ids[path] = blob.hexdigest()
        return self._blob_ids[path]

    def _read(self, path: str, sha256: str) -> bytes:
        descriptor = open_file_at(self._root_fd, path)
        raw = bytearray()
        try:
            while piece := os.read(descriptor, _READ_SIZE_BYTES):
                raw += piece
        except OSError as problem:
            raise MemoptIOError(f"cannot read: {problem.strerror}", file=path, remedy="try again") from None
        finally:
            os.close(descriptor)
        found = hashlib.sha256(raw).hexdigest()
        if found != sha256:
            raise ContentError(
                f"has SHA-256 {found}, the release says {sha256}: it changed after it was verified",
                file=path,
                remedy="stop whatever writes into the release, make it again, then push",
            )
        return bytes(raw)
