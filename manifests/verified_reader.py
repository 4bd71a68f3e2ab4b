"""Reading signed bytes: into memory of our own first, hashed there, handed out only if every chunk is the signed one.

A file is never mapped: what somebody writes to it later cannot reach memory that was read, and a file that shrinks
gives a short read instead of a SIGBUS. Between the read and the hash nobody else can touch the memory.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from memopt.errors import ContentError, MemoptIOError
from memopt.manifests.digest import CHUNK_SIZE_BYTES, LEAF_SIZE_BYTES, num_chunks
from memopt.manifests.hashing import read_into
from memopt.manifests.workers import BUFFER_SIZE_BYTES, run_workers

# What is read and hashed at a time: small enough to be hashed from the core's cache.
PIECE_SIZE_BYTES = BUFFER_SIZE_BYTES


@dataclass(frozen=True)
class SignedFile:
    """A file's signed size and packed SHA-256 digests of its chunks."""

    name: str
    size_bytes: int
    leaves: bytes
    chunk_size_bytes: int = CHUNK_SIZE_BYTES

    @classmethod
    def whole(cls, name: str, size_bytes: int, sha256: str) -> SignedFile:
        """A file with one digest over all of it: one chunk."""
        return cls(name, size_bytes, bytes.fromhex(sha256), max(size_bytes, 1))

    @property
    def num_chunks(self) -> int:
        # An empty file has no chunk to hash, but one signed as a whole has a digest to hold.
        return max(num_chunks(self.size_bytes, self.chunk_size_bytes), len(self.leaves) // LEAF_SIZE_BYTES)

    def chunk_bounds(self, chunk: int) -> tuple[int, int]:
        start = chunk * self.chunk_size_bytes
        return start, min(start + self.chunk_size_bytes, self.size_bytes)

    def chunks_covering(self, start: int, end: int) -> range:
        """The chunks that hold bytes `start` to `end`; none for an empty range."""
        if end <= start:
            return range(0)
        return range(start // self.chunk_size_bytes, num_chunks(end, self.chunk_size_bytes))


@dataclass(frozen=True)
class Target:
    """Where the bytes of a file from `start` on go: writable bytes that nobody else sees."""

    start: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.start + self.memory.nbytes


@dataclass(frozen=True)
class FileRead:
    """Parts of one open file to be read: `targets` in rising order, not overlapping.

    Bytes of their chunks that are in no target are hashed only; `is_whole`: so are all other chunks. `sink` gets every
    piece (offset, memory) that was hashed, from several threads; it must discard them if the read fails.
    """

    descriptor: int
    file: SignedFile
    targets: tuple[Target, ...] = ()
    is_whole: bool = False
    sink: Callable[[int, memoryview], None] | None = None

    @classmethod
    def of_all(cls, descriptor: int, file: SignedFile, memory: memoryview) -> FileRead:
        return cls(descriptor, file, (Target(0, memory),), is_whole=True)

    @property
    def chunks(self) -> Iterable[int]:
        """The chunks that must be hashed."""
        if self.is_whole:
            return range(self.file.num_chunks)
        return sorted({c for target in self.targets for c in self.file.chunks_covering(target.start, target.end)})


def check_open_file(descriptor: int, file: SignedFile) -> None:
    """ContentError if the open file has not the signed size; nothing is read."""
    try:
        size_bytes = os.fstat(descriptor).st_size
    except OSError as problem:
        raise MemoptIOError(f"cannot read: {problem.strerror}", file=file.name, remedy="try again") from None
    if size_bytes != file.size_bytes:
        raise ContentError(
            f"the file has {size_bytes:,} bytes, {file.size_bytes:,} were signed",
            file=file.name,
            remedy="fetch the file again; if it still differs, somebody changed it",
        )


def read_verified(reads: Sequence[FileRead], num_threads: int) -> None:
    """Fill every target; raises unless the SHA-256 of every chunk, of the very memory it is in, is the signed one.

    The first failure stops all threads: BadChunkError naming file, chunk and byte offsets, ContentError for a file that
    ends too early, MemoptIOError.
    After a failure the targets hold bytes that must not be used.
    """
    chunks = [(read, chunk) for read in reads for chunk in read.chunks]
    run_workers(chunks, _read_chunk, min(num_threads, len(chunks)))


def _pieces(targets: tuple[Target, ...], start: int, end: int, scratch: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(offset, memory) of at most a piece each, which together take bytes `start` to `end`; gaps go to `scratch`."""
    position = start
    number = max(bisect_right(targets, position, key=lambda target: target.start) - 1, 0)
    while position < end:
        while number < len(targets) and targets[number].end <= position:
            number += 1
        if number < len(targets) and targets[number].start <= position:
            target = targets[number]
            size = min(PIECE_SIZE_BYTES, end - position, target.end - position)
            offset = position - target.start
            yield position, target.memory[offset : offset + size]
        else:
            gap_end = targets[number].start if number < len(targets) else end
            size = min(PIECE_SIZE_BYTES, scratch.nbytes, min(gap_end, end) - position)
            yield position, scratch[:size]
        position += size


def _read_chunk(item: tuple[FileRead, int], scratch: memoryview, check: Callable[[], None]) -> None:
    read, chunk = item
    start, end = read.file.chunk_bounds(chunk)
    state = hashlib.sha256()
    for offset, memory in _pieces(read.targets, start, end, scratch):
        check()
        read_into(read.descriptor, memory, offset, read.file.name)
        state.update(memory)
        if read.sink is not None:
            read.sink(offset, memory)
    signed = read.file.leaves[chunk * LEAF_SIZE_BYTES : (chunk + 1) * LEAF_SIZE_BYTES]
    if not hmac.compare_digest(state.digest(), signed):
        raise BadChunkError(read.file.name, chunk, start, end)


class BadChunkError(ContentError):
    """A chunk is not what was signed. `chunk` counts from 0; its bytes are `start_bytes` to `end_bytes` of the file."""

    def __init__(self, file: str, chunk: int, start_bytes: int, end_bytes: int) -> None:
        super().__init__(
            f"chunk {chunk} (bytes {start_bytes:,} to {end_bytes:,}) is not what was signed",
            file=file,
            remedy="fetch the file again; if it still differs, somebody changed it",
        )
        self.chunk = chunk
        self.start_bytes = start_bytes
        self.end_bytes = end_bytes
