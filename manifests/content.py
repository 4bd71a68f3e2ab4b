"""Checking the content of files against their signed digests, in k threads, and listing all that differs."""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memopt.errors import ContentError, MemoptError
from memopt.manifests.digest import LEAF_SIZE_BYTES
from memopt.manifests.hashing import read_into
from memopt.manifests.tree import open_file_at
from memopt.manifests.verified_reader import BadChunkError, SignedFile, check_open_file
from memopt.manifests.workers import run_workers

# Chunks that a thread takes at a time: one huge file keeps all threads busy, a file is opened once per 64 MiB.
BATCH_CHUNKS = 16
MAX_REPORTED_CHUNKS = 8
# (bytes that were hashed just now, file)
ContentProgress = Callable[[int, str], None]


@dataclass
class ContentReport:
    """`verified_files`: names whose every byte is the signed one. `verified_bytes`: how many bytes that are."""

    problems: list[MemoptError] = field(default_factory=list)
    verified_files: set[str] = field(default_factory=set)
    verified_bytes: int = 0


@dataclass
class _FileState:
    file: SignedFile
    first_chunk: int
    num_batches: int
    bad: list[BadChunkError] = field(default_factory=list)
    num_bad: int = 0
    failure: MemoptError | None = None


def check_content(
    root_fd: int,
    files: Sequence[SignedFile],
    jobs: int,
    progress: ContentProgress | None = None,
    verified_chunks: Mapping[str, int] | None = None,
) -> ContentReport:
    """Hash the chunks of `files` below `root_fd`. `progress` is called from one thread at a time.

    `verified_chunks`: how many chunks at the start of a file the caller has verified; they are not read again.
    Never raises for a bad file: BadChunkError (the first eight of a file, and how many more), ContentError for a
    wrong size, MissingFileError, LayoutError, MemoptIOError stand in the report.
    """
    states = [_state(file, (verified_chunks or {}).get(file.name, 0)) for file in files]
    lock = threading.Lock()

    def work(item: tuple[_FileState, int], buffer: memoryview, check: Callable[[], None]) -> None:
        state, first = item
        last = min(first + BATCH_CHUNKS, state.file.num_chunks)
        bad: list[int] = []
        failure: MemoptError | None = None
        if state.failure is None:
            try:
                bad = _check_chunks(root_fd, state.file, range(first, last), buffer, check)
            except MemoptError as problem:
                failure = problem
        with lock:
            state.num_bad += len(bad)
            state.failure = state.failure or failure
            room = MAX_REPORTED_CHUNKS - len(state.bad)
            state.bad += [BadChunkError(state.file.name, n, *state.file.chunk_bounds(n)) for n in bad[:room]]
            if progress is not None:
                start = min(first * state.file.chunk_size_bytes, state.file.size_bytes)
                progress(min(last * state.file.chunk_size_bytes, state.file.size_bytes) - start, state.file.name)

    largest_first = sorted(states, key=lambda state: (-state.file.size_bytes, state.file.name))
    run_workers(_batches(largest_first), work, min(jobs, max(1, sum(state.num_batches for state in states))))
    return _report(states)


def _state(file: SignedFile, first_chunk: int) -> _FileState:
    # A file without chunks to hash is opened all the same: it must be there and of its size.
    return _FileState(file, first_chunk, max(1, -(-(file.num_chunks - first_chunk) // BATCH_CHUNKS)))


def _batches(states: Sequence[_FileState]) -> Iterator[tuple[_FileState, int]]:
    for state in states:
        for number in range(state.num_batches):
            yield state, state.first_chunk + number * BATCH_CHUNKS


def _check_chunks(
    root_fd: int, file: SignedFile, chunks: range, buffer: memoryview, check: Callable[[], None]
) -> list[int]:
    """The chunks among `chunks` that are not the signed ones."""
    bad: list[int] = []
    descriptor = open_file_at(root_fd, file.name)
    try:
        check_open_file(descriptor, file)
        for chunk in chunks:
            start, end = file.chunk_bounds(chunk)
            state = hashlib.sha256()
            for offset in range(start, end, buffer.nbytes):
                check()
                piece = buffer[: min(buffer.nbytes, end - offset)]
                read_into(descriptor, piece, offset, file.name)
                state.update(piece)
            signed = file.leaves[chunk * LEAF_SIZE_BYTES : (chunk + 1) * LEAF_SIZE_BYTES]
            if not hmac.compare_digest(state.digest(), signed):
                bad.append(chunk)
    finally:
        os.close(descriptor)
    return bad


def _report(states: Sequence[_FileState]) -> ContentReport:
    report = ContentReport()
    for state in states:
        reported: list[BadChunkError] = sorted(state.bad, key=lambda bad: bad.chunk)
        report.problems += reported
        if state.num_bad > len(state.bad):
            more = state.num_bad - len(state.bad)
            report.problems.append(
                ContentError(
                    f"{more:,} more of its {state.file.num_chunks:,} chunks are not what was signed",
                    file=state.file.name,
                    remedy="fetch the file again",
                )
            )
        if state.failure is not None:
            report.problems.append(state.failure)
        if not state.num_bad and state.failure is None:
            report.verified_files.add(state.file.name)
            report.verified_bytes += state.file.size_bytes
    return report
