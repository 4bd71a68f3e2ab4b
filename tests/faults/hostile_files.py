"""Rows 1 to 19: bytes, names and kinds of files that differ from what was signed."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from tiny_releases import SHARDS, flip_byte, sign, sign_anyway

from faults.hostile_case import Case
from memopt.manifests.safetensors_index import INDEX_NAME

CHUNK = 4 * 2**20
FIRST, SECOND = SHARDS
_BAD = "not what was signed"


def _flip(name: str, offset: int, mask: int = 1) -> Callable[[Path], None]:
    return lambda folder: flip_byte(folder / name, offset, mask)


def _truncate(name: str, size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size((folder / name).stat().st_size))


def _append(name: str, data: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(data)

    return make


def _hole(folder: Path) -> None:
    path = folder / FIRST
    size = path.stat().st_size
    os.truncate(path, CHUNK)
    os.truncate(path, size)


def _swap(folder: Path) -> None:
    assert (folder / FIRST).stat().st_size == (folder / SECOND).stat().st_size
    (folder / FIRST).rename(folder / "aside")
    (folder / SECOND).rename(folder / FIRST)
    (folder / "aside").rename(folder / SECOND)


def _rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / old).rename(folder / new) and None


def _add(name: str, data: bytes = b"") -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return make


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _empty_folder(folder: Path) -> None:
    (folder / "empty" / "within").mkdir(parents=True)


def _not_utf8(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.json")).write_text("{}")


def _link_outside(folder: Path) -> None:
    (folder / FIRST).rename(folder.parent / "outside")
    (folder / FIRST).symlink_to(folder.parent / "outside")


def _link_inside(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(FIRST)


def _extra_link(target: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "link").symlink_to(target)


def _linked_folder(folder: Path) -> None:
    """A signed file lies in a folder that is now a link to a copy of it."""
    (folder / "part").mkdir()
    (folder / "part" / "notes.txt").write_text("signed")
    sign(folder)
    (folder / "part").rename(folder.parent / "part")
    (folder / "part").symlink_to(folder.parent / "part")


def _linked_root(folder: Path) -> Path:
    link = folder.parent / "linked"
    link.symlink_to(folder)
    return link


def _hard_link(folder: Path) -> None:
    os.link(folder / FIRST, folder.parent / "twin")


def _fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def _socket(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        # A socket's path may have 107 bytes at most.
        here = os.getcwd()
        os.chdir(folder)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(name)
        finally:
            os.chdir(here)

    return make


def _proc_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/proc/self/maps")


def _folder_for_file(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


def _file_for_folder(folder: Path) -> None:
    (folder / "part").mkdir()
    (folder / "part" / "notes.txt").write_text("signed")
    sign(folder)
    shutil.rmtree(folder / "part")
    (folder / "part").write_text("signed")


def _nothing(_folder: Path) -> None:
    return


@contextmanager
def _reads_fail(number: int) -> Iterator[None]:
    """Every read of a shard fails, as on a broken disk or a network file system whose server went away."""
    preadv = os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(SECOND):
            raise OSError(number, os.strerror(number))
        return preadv(descriptor, buffers, offset)

    with mock.patch("os.preadv", failing):
        yield


@contextmanager
def _opens_fail(number: int) -> Iterator[None]:
    whole_open = os.open

    def failing(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).endswith(SECOND):
            raise OSError(number, os.strerror(number))
        return whole_open(path, flags, mode, dir_fd=dir_fd)

    with mock.patch("os.open", failing):
        yield


@contextmanager
def _reads_give(size: int) -> Iterator[None]:
    """Reads give at most `size` bytes at a time."""
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:size]], offset) if size else 0

    with mock.patch("os.preadv", short):
        yield


@contextmanager
def _reads_stop() -> Iterator[None]:
    """The file system gives nothing more of a shard, whose size has not changed."""
    preadv = os.preadv

    def stopping(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        is_shard = os.readlink(f"/proc/self/fd/{descriptor}").endswith(SECOND)
        return 0 if is_shard else preadv(descriptor, buffers, offset)

    with mock.patch("os.preadv", stopping):
        yield


def _collision(first: str, second: str) -> Callable[[Path], None]:
    """Two files whose names are one on some systems, signed by a publisher who does not mind."""

    def make(folder: Path) -> None:
        (folder / "zz-1").write_text("one")
        (folder / "zz-2").write_text("two")

        def bend(payload: bytes) -> bytes:
            return payload.replace(b"zz-1", first.encode()).replace(b"zz-2", second.encode())

        sign_anyway(folder, bend_payload=bend)
        (folder / "zz-1").rename(folder / first)
        (folder / "zz-2").rename(folder / second)

    return make


_FLIPS = {"first byte": 0, "before a boundary": CHUNK - 1, "after it": CHUNK, "middle": 5 * 2**20, "last byte": -1}

CASES = (
    *(
        Case(1, f"flipped bit, {place}", 4, _flip(FIRST, at), (FIRST, _BAD), is_big=True)
        for place, at in _FLIPS.items()
    ),
    *(
        Case(1, f"flipped bit in {name}", 4, _flip(name, 2), (name,))
        for name in ("config.json", INDEX_NAME, "ledger.jsonl", "SHA256SUMS", "memopt.chunks", "memopt.manifest.json")
    ),
    Case(2, "one byte short", 4, _truncate(FIRST, lambda size: size - 1), (FIRST, "were signed"), is_big=True),
    Case(2, "empty", 4, _truncate(FIRST, lambda _: 0), (FIRST, "0 bytes"), is_big=True),
    Case(2, "cut at a page", 4, _truncate(FIRST, lambda size: size // 4096 * 4096), (FIRST,), is_big=True),
    Case(2, "cut at a chunk", 4, _truncate(FIRST, lambda _: CHUNK), (FIRST,), is_big=True),
    *(Case(2, f"{name} cut", 4, _truncate(name, lambda size: size // 2), (name,)) for name in ("memopt.chunks",)),
    Case(3, "a byte appended", 4, _append(FIRST, b"\0"), (FIRST, "were signed"), is_big=True),
    Case(3, "chunks appended", 4, _append("memopt.chunks", bytes(32)), ("memopt.chunks",)),
    Case(4, "a hole of zeros", 4, _hole, (FIRST, "chunk 1"), is_big=True),
    Case(5, "shards swapped", 4, _swap, (FIRST, SECOND), is_big=True),
    Case(7, "renamed", 6, _rename(SECOND, "model-00003-of-00002.safetensors"), (SECOND, "not listed", "not there")),
    Case(7, "case changed", 6, _rename("config.json", "Config.json"), ("config.json", "Config.json")),
    *(
        Case(8, f"extra {name}", 6, _add(name, data), (name, "not listed"))
        for name, data in {
            "modeling_x.py": b"print()",
            "__init__.py": b"",
            "pytorch_model.bin": b"x",
            "weights.pth": b"x",
            "part/deep/x.json": b"{}",
            "model-00003-of-00003.safetensors": b"x",
        }.items()
    ),
    *(
        Case(9, f"extra {name}", 6, _add(name, b"x"), (name,))
        for name in (".git/hooks/post-checkout", ".github/evil.py", ".gitattributes", ".gitignore", ".hidden")
    ),
    Case(10, "empty folder", 0, _empty_folder, ("warning", "empty")),
    Case(10, "empty folder, strict", 6, _empty_folder, ("empty",), strict=True),
    *(
        Case(11, f"{name} is missing", 6, _remove(name), (name, "not there"))
        for name in ("tokenizer.json", "config.json", INDEX_NAME, "SHA256SUMS", "memopt.chunks", "memopt.manifest.json")
    ),
    Case(12, "names equal but for case", 6, _collision("notes.txt", "Notes.txt"), ("one file on some systems",)),
    Case(12, "NFC and NFD", 6, _collision("caf\u00e9", "cafe\u0301"), ("one file on some systems",)),
    Case(14, "a name that is not UTF-8", 6, _not_utf8, ("\\udcff\\udcfe.json",)),
    Case(14, "a name that reads backwards", 6, _add("a\u202egpj.json"), ("\\u202e",)),
    Case(14, "a name with a line break", 6, _add("a\nmemopt verified"), ("a\\nmemopt",)),
    Case(15, "link to outside", 6, _link_outside, (FIRST, "symbolic link")),
    Case(15, "link to inside", 6, _link_inside, (SECOND, "symbolic link")),
    Case(15, "dangling link", 6, _extra_link("nowhere"), ("link", "symbolic link")),
    Case(15, "link to itself", 6, _extra_link("link"), ("link", "symbolic link")),
    Case(15, "link to the folder", 6, _extra_link("."), ("link", "symbolic link")),
    Case(15, "linked folder", 6, _linked_folder, ("part", "symbolic link")),
    Case(15, "linked root", 6, _linked_root, ("symbolic link",)),
    Case(15, "linked root, allowed", 0, _linked_root, ("verified",), allow_linked_root=True),
    Case(16, "hard link", 0, _hard_link, ("warning", FIRST)),
    Case(16, "hard link, strict", 6, _hard_link, (FIRST, "hard links"), strict=True),
    Case(17, "FIFO", 6, _fifo("extra"), ("extra", "FIFO")),
    Case(17, "FIFO for a shard", 6, _fifo(FIRST), (FIRST, "FIFO")),
    Case(17, "FIFO for the index", 6, _fifo(INDEX_NAME), (INDEX_NAME, "FIFO")),
    Case(17, "FIFO for the manifest", 6, _fifo("memopt.manifest.json"), ("memopt.manifest.json", "FIFO")),
    Case(17, "socket", 6, _socket(FIRST), (FIRST, "socket")),
    Case(17, "/proc file", 6, _proc_file, ("config.json", "symbolic link")),
    Case(18, "folder for a shard", 6, _folder_for_file(FIRST), (FIRST,)),
    Case(18, "folder for config.json", 6, _folder_for_file("config.json"), ("config.json",)),
    Case(18, "file for a folder", 6, _file_for_folder, ("part/notes.txt",)),
    *(
        Case(19, f"reads fail, {errno.errorcode[number]}", 7, _nothing, (SECOND, "try again"), around=around)
        for number, around in ((n, lambda n=n: _reads_fail(n)) for n in (errno.EIO, errno.ESTALE))
    ),
    *(
        Case(19, f"cannot open, {errno.errorcode[number]}", 7, _nothing, (SECOND, "try again"), around=around)
        for number, around in ((n, lambda n=n: _opens_fail(n)) for n in (errno.EACCES, errno.EIO))
    ),
    Case(19, "reads stop early", 7, _nothing, (SECOND, "try again"), around=_reads_stop),
    Case(19, "reads are short", 0, _nothing, ("verified",), around=lambda: _reads_give(100)),
)
