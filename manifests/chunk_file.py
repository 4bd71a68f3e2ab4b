"""memopt.chunks: packed 32-byte SHA-256 digests of 4 MiB chunks, file after file as the manifest lists them.

It covers every file of the manifest but itself. The signed digest of the file, the signed chunk root of every run of
digests and the sizes must agree.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memopt.errors import ManifestError
from memopt.manifests.digest import LEAF_SIZE_BYTES, chunk_root, num_chunks
from memopt.manifests.file_names import CHUNKS_NAME
from memopt.manifests.manifest import Manifest, ManifestFile

# 32 bytes for 4 MiB: enough for 32 TiB of weights.
MAX_CHUNKS_SIZE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ChunkLeaves:
    """The digests of every file, in one piece of memory."""

    raw: bytes
    ranges: Mapping[str, tuple[int, int]]

    def of(self, path: str) -> bytes:
        """The packed digests of file `path`; KeyError for a file that the manifest does not list."""
        start, end = self.ranges[path]
        return self.raw[start:end]


def covered_files(manifest: Manifest) -> tuple[ManifestFile, ...]:
    """The files whose digests memopt.chunks holds, in its order."""
    return tuple(sorted((file for file in manifest.files if file.path != CHUNKS_NAME), key=lambda file: file.path))


def chunks_size_bytes(manifest: Manifest) -> int:
    """The exact size of the chunk file that belongs to `manifest`."""
    return sum(num_chunks(file.size_bytes) for file in covered_files(manifest)) * LEAF_SIZE_BYTES


def render_chunks(leaves: Iterable[tuple[str, bytes]]) -> bytes:
    """The chunk file's bytes from (path, packed digests) of every file."""
    return b"".join(packed for _, packed in sorted(leaves))


def parse_chunks(raw: bytes, manifest: Manifest) -> ChunkLeaves:
    """Give every file its digests; ManifestError unless size and every chunk root are as the manifest says."""
    expected = chunks_size_bytes(manifest)
    if len(raw) != expected:
        raise ManifestError(
            f"{len(raw):,} bytes, the manifest's files need {expected:,}",
            file=CHUNKS_NAME,
            remedy="the release was signed wrongly: sign it again",
        )
    ranges: dict[str, tuple[int, int]] = {}
    position = 0
    for file in covered_files(manifest):
        end = position + num_chunks(file.size_bytes) * LEAF_SIZE_BYTES
        if not hmac.compare_digest(chunk_root(file.size_bytes, raw[position:end]), file.chunk_root):
            raise ManifestError(
                f"the digests of {file.path} are not those under its chunk root",
                file=CHUNKS_NAME,
                remedy="the release was signed wrongly: sign it again",
            )
        ranges[file.path] = (position, end)
        position = end
    return ChunkLeaves(raw, ranges)
