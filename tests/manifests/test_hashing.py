"""Digests from one read: equal to hashlib's at every size around a chunk, and changes while hashing are seen."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refusal

from memopt.errors import ContentError, LayoutError, MemoptIOError
from memopt.manifests.digest import CHUNK_SIZE_BYTES
from memopt.manifests.hashing import hash_file, hash_files, read_into, read_small_file
from memopt.manifests.sign import digest_of
from memopt.manifests.tree import open_root
from memopt.manifests.workers import run_workers

SIZES = [0, 1, 2**20, 2**20 + 1, CHUNK_SIZE_BYTES - 1, CHUNK_SIZE_BYTES, CHUNK_SIZE_BYTES + 1, 2 * CHUNK_SIZE_BYTES + 5]


def open_fd(path: Path) -> int:
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("size", SIZES)
def test_whole_and_chunks_are_those_of_hashlib(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    descriptor = open_fd(tmp_path / "f")
    seen: list[int] = []
    digest = hash_file(descriptor, size, file="f", advance=seen.append)
    odd = hash_file(descriptor, size, file="f", buffer=memoryview(bytearray(300_007)))
    os.close(descriptor)
    chunks = [data[start : start + CHUNK_SIZE_BYTES] for start in range(0, size, CHUNK_SIZE_BYTES)]
    assert digest.sha256 == hashlib.sha256(data).hexdigest()
    assert digest.leaves == b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    assert digest == odd == digest_of(data)
    assert sum(seen) == size


def test_a_file_that_is_shorter_than_said(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    descriptor = open_fd(tmp_path / "f")
    with refusal(ContentError, "f", "byte 3"):
        hash_file(descriptor, 4, file="f")
    os.close(descriptor)


def test_a_read_error_is_retryable(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with refusal(MemoptIOError, "f", "cannot read"):
        read_into(descriptor, memoryview(bytearray(1)), 0, "f")
    os.close(descriptor)


def test_small_files_have_a_cap(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    root = open_root(tmp_path)
    assert read_small_file(root, "f", 5) == b"12345"
    with refusal(ContentError, "f", "at most 4"):
        read_small_file(root, "f", 4)
    os.close(root)


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_hash_files_gives_the_same_for_any_number_of_threads(tmp_path: Path, jobs: int) -> None:
    (tmp_path / "sub").mkdir()
    data = {f"sub/f{n}": os.urandom(n * 700_000) for n in range(9)}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    root = open_root(tmp_path)
    digests = hash_files(root, {name: len(content) for name, content in data.items()}, jobs)
    os.close(root)
    assert digests == {name: digest_of(content) for name, content in data.items()}
    assert list(digests) == sorted(data)


def test_a_file_of_another_size_or_kind(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("f")
    root = open_root(tmp_path)
    with refusal(ContentError, "f", "5 bytes"):
        hash_files(root, {"f": 4}, 1)
    with refusal(LayoutError, "link"):
        hash_files(root, {"link": 5}, 2)
    os.close(root)


def test_a_file_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(3 * 2**20))
    root = open_root(tmp_path)

    def touch(_name: str, _size: int) -> None:
        os.utime(path, ns=(1, 1))

    with refusal(ContentError, "f", "changed while"):
        hash_files(root, {"f": 3 * 2**20}, 1, touch)
    os.close(root)


def test_the_first_failure_stops_all_workers() -> None:
    started = threading.Event()
    done: list[int] = []

    def work(item: int, _buffer: memoryview, check: Callable[[], None]) -> None:
        if item == 0:
            started.wait(5)
            raise ValueError("first")
        started.set()
        for _ in range(10_000):
            check()
            threading.Event().wait(0.001)
        done.append(item)

    with pytest.raises(ValueError, match="first"):
        run_workers(range(8), work, 2)
    assert done == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memopt-hash")]


def test_ctrl_c_while_threads_are_started_leaves_none_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread runs already when its `start` is broken off, and nobody knows of it."""
    start = threading.Thread.start
    broken_off: list[threading.Thread] = []

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "memopt-hash-1":
            broken_off.append(thread)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run_workers(range(8), lambda item, _buffer, _check: done.append(item), 4)
    broken_off[0].join(5)
    assert (done, broken_off[0].is_alive()) == ([], False)
