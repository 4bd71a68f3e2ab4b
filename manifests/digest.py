"""Digests of a file: SHA-256 of the whole, and of its 4 MiB chunks with one root over them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

CHUNK_SIZE_BYTES = 4 * 2**20
LEAF_SIZE_BYTES = 32
CHUNK_ROOT_TAG = b"memopt-chunk-root-v1\x00"
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEX_DIGESTS = re.compile(r"[0-9a-f]{64}(?: [0-9a-f]{64})*")


@dataclass(frozen=True)
class FileDigest:
    """`sha256`: hex, of the whole file. `leaves`: packed SHA-256 digests of its chunks, 32 bytes each."""

    size_bytes: int
    sha256: str
    leaves: bytes

    @property
    def chunk_root(self) -> str:
        return chunk_root(self.size_bytes, self.leaves)


def num_chunks(size_bytes: int, chunk_size_bytes: int = CHUNK_SIZE_BYTES) -> int:
    """Chunks of a file; an empty file has none."""
    return -(-size_bytes // chunk_size_bytes)


def chunk_root(size_bytes: int, leaves: bytes, chunk_size_bytes: int = CHUNK_SIZE_BYTES) -> str:
    """SHA-256 (hex) of tag, size, chunk size (both 8 bytes, big-endian) and leaves: binds order, count and length."""
    state = hashlib.sha256(CHUNK_ROOT_TAG)
    state.update(size_bytes.to_bytes(8, "big") + chunk_size_bytes.to_bytes(8, "big"))
    state.update(leaves)
    return state.hexdigest()


def is_hex_digest(text: object) -> bool:
    """Whether `text` is 64 lower-case hex digits, and nothing else."""
    return isinstance(text, str) and _HEX_DIGEST.fullmatch(text) is not None


def are_hex_digests(texts: list[Any]) -> bool:
    """Whether every one of `texts` is, by one match over all of them: a ledger has a million."""
    try:
        joined = " ".join(texts)
    except TypeError:
        return False
    # As many spaces as join so many digests: none is within one of them.
    return joined.count(" ") == len(texts) - 1 and _HEX_DIGESTS.fullmatch(joined) is not None
