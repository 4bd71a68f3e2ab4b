"""Rows 46 to 49 of docs/threat-model.md: somebody writes to the files while they are loaded.

A real writer thread meets the reader at a barrier before and after chosen reads. What is returned is the signed bytes,
or an error; never a mix, never a signal.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from refusals import within_seconds
from safetensors.torch import load_file
from signing_keys import fixed_key
from tiny_releases import (
    FEW_BYTES,
    KEY,
    NOW,
    POLICY,
    SHARDS,
    THREE_CHUNKS,
    flip_byte,
    same_tensors,
    sign,
    signed_release,
    write_release,
)

from memopt.errors import ContentError, MemoptError, MemoptIOError, MissingFileError, SignatureError
from memopt.manifests import trusted_release
from memopt.manifests.file_names import CHUNKS_NAME, MANIFEST_NAME, SIGNATURE_NAME
from memopt.manifests.release import Release, open_release
from memopt.manifests.verified_reader import PIECE_SIZE_BYTES

CHUNK = 4 * 2**20


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signed_release(tmp_path_factory.mktemp("original") / "release", rows=THREE_CHUNKS)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "release")


@pytest.fixture(scope="module")
def expected(original: Path) -> dict[str, torch.Tensor]:
    return load_file(original / SHARDS[0]) | load_file(original / SHARDS[1])


def opened(folder: Path, jobs: int = 1) -> Release:
    return open_release(folder, policy=POLICY, now=NOW, jobs=jobs)


@contextmanager
def writer_at(
    monkeypatch: pytest.MonkeyPatch, path: Path, offset: int, act: Callable[[], None], *, when: str
) -> Iterator[None]:
    """Another thread runs `act` while the reader waits, before or after its first read of byte `offset` of `path`."""
    meet = threading.Barrier(2, timeout=20)
    inode = path.stat().st_ino
    whole_read = os.preadv
    lock = threading.Lock()
    is_due = True

    def write() -> None:
        meet.wait()
        act()
        meet.wait()

    def preadv(descriptor: int, buffers: list[memoryview], position: int) -> int:
        nonlocal is_due
        covers = position <= offset < position + buffers[0].nbytes and os.fstat(descriptor).st_ino == inode
        with lock:
            is_mine = covers and is_due
            is_due = is_due and not is_mine
        if is_mine and when == "before":
            meet.wait()
            meet.wait()
        size = whole_read(descriptor, buffers, position)
        if is_mine and when == "after":
            meet.wait()
            meet.wait()
        return size

    monkeypatch.setattr(os, "preadv", preadv)
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        with within_seconds(60):
            yield
    finally:
        monkeypatch.undo()
        if is_due:
            meet.abort()
        writer.join(20)
    assert not is_due, "the read that the writer waited for never came"


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", [100, CHUNK + 5, 2 * CHUNK + 7])
def test_47_an_edit_in_place(
    folder: Path,
    expected: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    place: int,
    when: str,
    jobs: int,
) -> None:
    """A byte changes right before its piece is read (refused) or right after (the signed bytes are in memory)."""
    path = folder / SHARDS[0]
    with (
        opened(folder, jobs) as release,
        writer_at(monkeypatch, path, place, lambda: flip_byte(path, place), when=when),
    ):
        if when == "before":
            with pytest.raises(ContentError, match=rf"{SHARDS[0]}: chunk {place // CHUNK} "):
                release.load()
        else:
            assert same_tensors(release.load(), expected)


def test_47_an_edit_of_a_piece_between_two_pieces_of_its_chunk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk is half read: a change of the half to come is refused, no mix of old and new is handed out."""
    path = folder / SHARDS[1]
    later = CHUNK + 3 * PIECE_SIZE_BYTES

    def overwrite() -> None:
        with path.open("r+b") as file:
            file.seek(CHUNK)
            file.write(os.urandom(CHUNK))

    with (
        opened(folder) as release,
        writer_at(monkeypatch, path, later, overwrite, when="before"),
        pytest.raises(ContentError, match=f"{SHARDS[1]}: chunk 1"),
    ):
        release.load()


@pytest.mark.parametrize("jobs", [1, 3])
def test_47_a_writer_that_never_stops(folder: Path, expected: dict[str, torch.Tensor], jobs: int) -> None:
    """A thread flips a byte to and fro all the time: every load gives the signed bytes or CONTENT."""
    path = folder / SHARDS[0]
    stop = threading.Event()

    def write() -> None:
        with path.open("r+b", buffering=0) as file:
            signed = os.pread(file.fileno(), 1, CHUNK + 9)
            changed = bytes([signed[0] ^ 0xFF])
            while not stop.is_set():
                os.pwrite(file.fileno(), changed, CHUNK + 9)
                stop.wait(0.0005)
                os.pwrite(file.fileno(), signed, CHUNK + 9)
                stop.wait(0.0005)

    writer = threading.Thread(target=write, daemon=True)
    outcomes: set[str] = set()
    with opened(folder, jobs) as release:
        writer.start()
        try:
            for _ in range(25):
                try:
                    loaded = release.load()
                except ContentError:
                    outcomes.add("refused")
                else:
                    assert same_tensors(loaded, expected)
                    outcomes.add("signed bytes")
        finally:
            stop.set()
            writer.join()
    assert outcomes, "at least one of the two happens"


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 12345])
@pytest.mark.parametrize("jobs", [1, 3])
def test_48_a_truncation_while_loading(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int, jobs: int) -> None:
    path = folder / SHARDS[1]
    place = CHUNK + 12345
    with (
        opened(folder, jobs) as release,
        writer_at(monkeypatch, path, place, lambda: os.truncate(path, size), when="before"),
        pytest.raises((ContentError, MemoptIOError), match=SHARDS[1]),
    ):
        release.load()


def test_48_no_sigbus_in_a_process_of_its_own(folder: Path) -> None:
    """A mapped file that shrinks kills its reader with SIGBUS; here it is an error with an exit code."""
    code = f"""
import os, sys, threading
from memopt.manifests.release import open_release
from memopt.manifests.verified_reader import read_verified
from memopt.errors import MemoptError
release = open_release({str(folder)!r}, key=sys.stdin.buffer.read(), now={NOW}, jobs=2)
path, seen = {str(folder / SHARDS[0])!r}, []
whole_read = os.preadv
def preadv(descriptor, buffers, offset):
    if offset >= {CHUNK} and not seen:
        seen.append(offset)
        threading.Thread(target=os.truncate, args=(path, 4096)).run()
    return whole_read(descriptor, buffers, offset)
os.preadv = preadv
try:
    release.load()
except MemoptError as problem:
    print(problem)
    sys.exit(int(problem.exit_code))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=KEY.public_key.pem, capture_output=True, timeout=60, check=False
    )
    assert done.returncode in {4, 7}, done
    assert SHARDS[0].encode() in done.stdout


def test_48_the_tensors_in_hand_stay_when_the_file_is_cut(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    with opened(folder) as release:
        loaded = release.load()
        os.truncate(folder / SHARDS[0], 0)
        assert same_tensors(loaded, expected)
        with pytest.raises(ContentError, match="0 bytes"):
            release.load()


def swap(folder: Path, content: bytes) -> None:
    """Put another file in a shard's place, by rename: another inode under the same name."""
    other = folder.parent / "other"
    other.write_bytes(content)
    other.rename(folder / SHARDS[0])


def test_46_a_swap_between_verify_and_load(folder: Path) -> None:
    """The release was verified, then a shard is replaced by one of equal size (times set equal, too)."""
    path = folder / SHARDS[0]
    with opened(folder) as release:
        release.load()
        before = path.stat()
        content = bytearray(path.read_bytes())
        content[5 * 2**20] ^= 1
        swap(folder, bytes(content))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(ContentError, match=f"{SHARDS[0]}: chunk 1"):
            release.load()
        path.unlink()
        with pytest.raises(MissingFileError, match=SHARDS[0]):
            release.load()
        path.symlink_to(folder / SHARDS[1])
        with pytest.raises(MemoptError, match="symbolic link"):
            release.load()


def test_46_a_swap_in_the_middle_of_a_file(
    folder: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name now means another file; the open descriptor still means the signed one, and that is what is read."""
    path = folder / SHARDS[0]
    size = path.stat().st_size
    with (
        opened(folder) as release,
        writer_at(monkeypatch, path, CHUNK, lambda: swap(folder, os.urandom(size)), when="before"),
    ):
        assert same_tensors(release.load(), expected)
    assert path.read_bytes()[:100] != (folder / SHARDS[1]).read_bytes()[:100]
    with opened(folder) as release, pytest.raises(ContentError, match=f"{SHARDS[0]}: chunk 0"):
        release.load()


def test_46_the_whole_folder_is_swapped(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Another folder under the same path: the release stays the one that was opened."""
    with opened(folder) as release:
        folder.rename(folder.parent / "aside")
        other = folder.parent / "release"
        write_release(other, rows=FEW_BYTES)
        sign(other, fixed_key(2))
        assert same_tensors(release.load(), expected)
    with pytest.raises(SignatureError):
        opened(folder)


@pytest.mark.parametrize("name", [SIGNATURE_NAME, MANIFEST_NAME, CHUNKS_NAME])
def test_49_trust_files_replaced_right_after_they_were_read(
    folder: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each is read once, into memory; what is at its place afterwards does not count."""
    read_small_file = trusted_release.read_small_file

    def read_then_replace(root_fd: int, file: str, max_size_bytes: int) -> bytes:
        raw = read_small_file(root_fd, file, max_size_bytes)
        if file == name:
            thread = threading.Thread(target=(folder / name).write_bytes, args=(bytes(len(raw)),))
            thread.start()
            thread.join()
        return raw

    monkeypatch.setattr(trusted_release, "read_small_file", read_then_replace)
    with opened(folder) as release:
        assert same_tensors(release.load(), expected)
        assert release.manifest is not None
        assert release.manifest.counter == 7


@pytest.mark.parametrize("name", [SIGNATURE_NAME, MANIFEST_NAME, CHUNKS_NAME])
def test_49_trust_files_replaced_right_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A manifest of an older release with its own valid signature does not go with the signature already read."""
    older = folder.parent / "older"
    write_release(older, rows=FEW_BYTES)
    sign(older, counter=3)
    read_small_file = trusted_release.read_small_file

    def replace_then_read(root_fd: int, file: str, max_size_bytes: int) -> bytes:
        if file == name:
            shutil.copy(older / name, folder / name)
        return read_small_file(root_fd, file, max_size_bytes)

    monkeypatch.setattr(trusted_release, "read_small_file", replace_then_read)
    with pytest.raises(MemoptError) as caught:
        opened(folder)
    assert caught.value.exit_code in {4, 6}
