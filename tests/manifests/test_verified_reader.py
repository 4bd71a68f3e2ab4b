"""Chunks are read into their targets and are the signed ones, or nothing is used."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal, within_seconds

from memopt.errors import ContentError, MemoptError, MemoptIOError
from memopt.manifests import verified_reader
from memopt.manifests.verified_reader import (
    BadChunkError,
    FileRead,
    SignedFile,
    Target,
    check_open_file,
    read_verified,
)

CHUNK = 1000


def leaves_of(content: bytes, chunk: int = CHUNK) -> bytes:
    return b"".join(hashlib.sha256(content[start : start + chunk]).digest() for start in range(0, len(content), chunk))


def signed(content: bytes, chunk: int = CHUNK) -> SignedFile:
    return SignedFile("model.safetensors", len(content), leaves_of(content, chunk), chunk)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[object]:
    """A function that writes bytes to a file and gives a descriptor of it."""
    descriptors: list[int] = []

    def write(content: bytes) -> int:
        path = tmp_path / f"file-{len(descriptors)}"
        path.write_bytes(content)
        descriptors.append(os.open(path, os.O_RDWR))
        return descriptors[-1]

    yield write
    for descriptor in descriptors:
        os.close(descriptor)


def read_all(descriptor: int, file: SignedFile, threads: int = 1) -> bytes:
    memory = memoryview(bytearray(file.size_bytes))
    read_verified([FileRead.of_all(descriptor, file, memory)], threads)
    return bytes(memory)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 13])
@pytest.mark.parametrize("threads", [1, 3])
def test_whole_file(opened, size: int, threads: int) -> None:
    content = os.urandom(size)
    assert read_all(opened(content), signed(content), threads) == content


@settings(max_examples=150, deadline=None)
@given(
    st.binary(min_size=1, max_size=5000),
    st.integers(1, 1700),
    st.lists(st.integers(0, 5000), max_size=8),
    st.integers(1, 3),
    st.integers(1, 700),
)
def test_any_targets(content: bytes, chunk: int, cuts: list[int], threads: int, piece: int) -> None:
    cuts = sorted({min(cut, len(content)) for cut in cuts})
    targets = tuple(
        Target(start, memoryview(bytearray(end - start))) for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    )
    descriptor = os.memfd_create("content")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verified_reader, "PIECE_SIZE_BYTES", piece)
        try:
            os.write(descriptor, content)
            read_verified([FileRead(descriptor, signed(content, chunk), targets)], threads)
        finally:
            os.close(descriptor)
    for target in targets:
        assert bytes(target.memory) == content[target.start : target.end]


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=4000), st.data())
def test_a_changed_byte_is_refused_where_it_is_covered(content: bytes, data: st.DataObject) -> None:
    changed_at = data.draw(st.integers(0, len(content) - 1))
    start = data.draw(st.integers(0, len(content) - 1))
    end = data.draw(st.integers(start + 1, len(content)))
    changed = bytearray(content)
    changed[changed_at] ^= 1 << data.draw(st.integers(0, 7))
    target = Target(start, memoryview(bytearray(end - start)))
    descriptor = os.memfd_create("content")
    try:
        os.write(descriptor, changed)
        read = FileRead(descriptor, signed(content), (target,))
        if changed_at // CHUNK in range(start // CHUNK, (end - 1) // CHUNK + 1):
            with pytest.raises(BadChunkError) as caught:
                read_verified([read], 2)
            assert caught.value.chunk == changed_at // CHUNK
            assert caught.value.start_bytes <= changed_at < caught.value.end_bytes
        else:
            read_verified([read], 2)
            assert bytes(target.memory) == content[start:end]
    finally:
        os.close(descriptor)


def test_the_message_names_file_chunk_and_bytes(opened) -> None:
    content = os.urandom(3 * CHUNK)
    file = signed(content)
    with pytest.raises(ContentError, match=r"model\.safetensors: chunk 1 \(bytes 1,000 to 2,000\)"):
        read_all(opened(content[:1500] + bytes([content[1500] ^ 1]) + content[1501:]), file)


def test_a_whole_file_digest(opened) -> None:
    content = os.urandom(5000)
    file = SignedFile.whole("a", 5000, hashlib.sha256(content).hexdigest())
    assert read_all(opened(content), file) == content
    with pytest.raises(BadChunkError):
        read_all(opened(content[:-1] + b"\0"), SignedFile.whole("a", 5000, hashlib.sha256(b"other").hexdigest()))


def test_an_empty_file_signed_as_a_whole(opened) -> None:
    assert read_all(opened(b""), SignedFile.whole("a", 0, hashlib.sha256(b"").hexdigest())) == b""
    with pytest.raises(BadChunkError):
        read_all(opened(b""), SignedFile.whole("a", 0, hashlib.sha256(b"x").hexdigest()))


def test_missing_leaves_are_no_licence(opened) -> None:
    content = os.urandom(2 * CHUNK)
    with pytest.raises(BadChunkError):
        read_all(opened(content), SignedFile("a", len(content), leaves_of(content)[:32], CHUNK))


def test_sizes(opened) -> None:
    content = os.urandom(2 * CHUNK)
    file = signed(content)
    check_open_file(opened(content), file)
    for other in (content[:-1], b"", content + b"\0"):
        with refusal(ContentError, "model.safetensors", f"{len(other):,} bytes", "2,000 were signed"):
            check_open_file(opened(other), file)


def test_a_file_that_is_shorter_is_an_error_not_a_signal(opened) -> None:
    content = os.urandom(5 * CHUNK)
    with refusal(ContentError, "model.safetensors", "ends at byte 4,321"):
        read_all(opened(content[:4321]), signed(content), 2)


def test_a_read_error_is_retryable(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(CHUNK)
    descriptor = opened(content)

    def stale(*_: object) -> int:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "preadv", stale)
    with refusal(MemoptIOError, "model.safetensors", "Stale file handle"):
        read_all(descriptor, signed(content))


def test_short_reads_are_continued(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(3 * CHUNK + 5)
    descriptor = opened(content)
    whole_read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole_read(fd, [buffers[0][:7]], offset))
    assert read_all(descriptor, signed(content)) == content


def test_the_first_bad_chunk_stops_all_threads(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(4000 * 100)
    file = SignedFile("a", len(content), leaves_of(content, 100), 100)
    descriptor = opened(b"\1" + content[1:])
    read_offsets: list[int] = []
    whole_read = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        read_offsets.append(offset)
        return whole_read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    before = threading.active_count()
    with pytest.raises(BadChunkError):
        read_all(descriptor, file, 4)
    assert len(read_offsets) < 2000
    assert threading.active_count() == before, "no thread may still write into the targets"


def test_two_bad_files_give_one_error_and_no_deadlock(opened) -> None:
    content = os.urandom(20 * CHUNK)
    reads = [
        FileRead.of_all(opened(bytes(len(content))), signed(content), memoryview(bytearray(len(content))))
        for _ in range(4)
    ]
    with within_seconds(20), pytest.raises(MemoptError):
        read_verified(reads, 8)
