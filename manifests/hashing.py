"""Digests of files on disk, one read each, in k threads."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping

from memopt.errors import ContentError, LayoutError, MemoptIOError
from memopt.manifests.digest import CHUNK_SIZE_BYTES, FileDigest
from memopt.manifests.tree import open_file_at
from memopt.manifests.workers import BUFFER_SIZE_BYTES, run_workers

# (name, bytes that were read just now)
AdvanceCallback = Callable[[str, int], None]
# (bytes, where they lie in the file)
WatchCallback = Callable[[memoryview, int], None]


def read_into(descriptor: int, memory: memoryview, offset: int, file: str) -> None:
    """Fill `memory` from byte `offset` on.

    Raises MemoptIOError if reading fails or gives less than the file still has, ContentError if the file ends before.
    """
    done = 0
    while done < memory.nbytes:
        try:
            size_bytes = os.preadv(descriptor, [memory[done:]], offset + done)
        except OSError as problem:
            raise MemoptIOError(f"cannot read: {problem.strerror}", file=file, remedy="try again") from None
        if not size_bytes:
            if os.fstat(descriptor).st_size > offset + done:
                raise MemoptIOError(f"nothing came from byte {offset + done:,}", file=file, remedy="try again")
            raise ContentError(
                f"ends at byte {offset + done:,}: it shrank while it was read", file=file, remedy="fetch it again"
            )
        done += size_bytes


def read_small_file(root_fd: int, name: str, max_size_bytes: int) -> bytes:
    """The bytes of file `name` below `root_fd`, read once.

    Raises as `open_file_at` and `read_into`, ContentError if it is larger than the cap.
    """
    descriptor = open_file_at(root_fd, name)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > max_size_bytes:
            raise ContentError(f"{size_bytes:,} bytes, at most {max_size_bytes:,} are read", file=name)
        buffer = bytearray(size_bytes)
        read_into(descriptor, memoryview(buffer), 0, name)
        return bytes(buffer)
    finally:
        os.close(descriptor)


def hash_file(
    descriptor: int,
    size_bytes: int,
    *,
    file: str = "",
    buffer: memoryview | None = None,
    advance: Callable[[int], None] | None = None,
    watch: WatchCallback | None = None,
) -> FileDigest:
    """SHA-256 of the whole and of each 4 MiB chunk of an open file, from one read of exactly `size_bytes`.

    `buffer`: reused memory of at most one chunk. `watch` sees every piece in order and may raise.
    Raises MemoptIOError, ContentError if the file is shorter.
    """
    memory = memoryview(bytearray(BUFFER_SIZE_BYTES)) if buffer is None else buffer
    whole = hashlib.sha256()
    leaves: list[bytes] = []
    for start in range(0, size_bytes, CHUNK_SIZE_BYTES):
        end = min(start + CHUNK_SIZE_BYTES, size_bytes)
        # The one chunk of a small file is the whole file: hashed once.
        chunk = hashlib.sha256() if size_bytes > CHUNK_SIZE_BYTES else None
        for offset in range(start, end, memory.nbytes):
            piece = memory[: min(memory.nbytes, end - offset)]
            read_into(descriptor, piece, offset, file)
            whole.update(piece)
            if watch is not None:
                watch(piece, offset)
            if chunk is not None:
                chunk.update(piece)
            if advance is not None:
                advance(piece.nbytes)
        leaves.append((chunk or whole).digest())
    return FileDigest(size_bytes, whole.hexdigest(), b"".join(leaves))


def hash_files(
    root_fd: int,
    sizes: Mapping[str, int],
    jobs: int,
    advance: AdvanceCallback | None = None,
    watch: Mapping[str, WatchCallback] | None = None,
) -> dict[str, FileDigest]:
    """The digest of every file below `root_fd` (name -> size in bytes), one file a thread, largest first.

    `watch`: for some names, what sees their bytes.

    Raises ContentError for a file that has another size or is written to meanwhile, MemoptIOError, LayoutError.
    """
    digests: dict[str, FileDigest] = {}

    def work(name: str, buffer: memoryview, check: Callable[[], None]) -> None:
        def advance_file(size_bytes: int) -> None:
            check()
            if advance is not None:
                advance(name, size_bytes)

        descriptor = open_file_at(root_fd, name)
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise LayoutError("is not a regular file", file=name)
            if before.st_size != sizes[name]:
                raise ContentError(f"has {before.st_size:,} bytes, {sizes[name]:,} a moment ago", file=name)
            watcher = None if watch is None else watch.get(name)
            digest = hash_file(
                descriptor, before.st_size, file=name, buffer=buffer, advance=advance_file, watch=watcher
            )
            after = os.fstat(descriptor)
            if (after.st_size, after.st_ctime_ns) != (before.st_size, before.st_ctime_ns):
                raise ContentError("was changed while it was hashed", file=name, remedy="wait for its writer to end")
        finally:
            os.close(descriptor)
        digests[name] = digest

    run_workers(sorted(sizes, key=lambda name: (-sizes[name], name)), work, min(jobs, len(sizes)))
    return dict(sorted(digests.items()))
