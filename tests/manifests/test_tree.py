"""Looking at a folder by descriptor: every kind of file, no link followed, nothing that blocks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import refusal, within_seconds

from memopt.errors import LayoutError, MissingFileError, UsageError
from memopt.manifests.tree import FileStatus, open_file_at, open_root, scan_tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "a").write_bytes(b"12345")
    (folder / "sub" / "deep" / "b").write_bytes(b"")
    (tmp_path / "outside").write_text("secret")
    return folder


@pytest.fixture
def root_fd(root: Path) -> Iterator[int]:
    descriptor = open_root(root)
    yield descriptor
    os.close(descriptor)


def test_files_sizes_links_and_empty_folders(root: Path, root_fd: int) -> None:
    os.link(root / "a", root / "sub" / "twin")
    (root / "empty").mkdir()
    (root / "sub" / "nothing").mkdir()
    tree = scan_tree(root_fd)
    assert tree.files == {
        "a": FileStatus(5, 2),
        "sub/twin": FileStatus(5, 2),
        "sub/deep/b": FileStatus(0, 1),
    }
    assert sorted(tree.empty_folders) == ["empty", "sub/nothing"]
    assert tree.problems == []


@pytest.mark.parametrize(
    "target",
    ["../outside", "a", "nowhere", ".", "sub", "loop"],
    ids=["out", "in", "dangling", "cycle", "folder", "self"],
)
def test_links_are_problems_and_are_not_followed(root: Path, root_fd: int, target: str) -> None:
    os.symlink(target, root / "loop")
    tree = scan_tree(root_fd)
    assert [(type(problem), problem.file) for problem in tree.problems] == [(LayoutError, "loop")]
    assert "symbolic link" in tree.problems[0].message
    with refusal(LayoutError, "loop", "symbolic link"):
        open_file_at(root_fd, "loop")
    with refusal(LayoutError, "loop"):
        open_file_at(root_fd, "loop/b")


def test_special_files_are_problems_and_do_not_block(root: Path, root_fd: int) -> None:
    os.mkfifo(root / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(root / "sock"))
    with within_seconds(5):
        tree = scan_tree(root_fd)
        assert sorted(problem.message for problem in tree.problems) == ["is a FIFO", "is a socket"]
        with refusal(LayoutError, "pipe", "FIFO"):
            open_file_at(root_fd, "pipe")
        with refusal(LayoutError, "sock", "socket"):
            open_file_at(root_fd, "sock")
    listener.close()


def test_open_file_reads_and_names_what_is_wrong(root: Path, root_fd: int) -> None:
    descriptor = open_file_at(root_fd, "sub/deep/b")
    os.close(descriptor)
    with refusal(MissingFileError, "sub/gone"):
        open_file_at(root_fd, "sub/gone")
    with refusal(MissingFileError, "gone/b"):
        open_file_at(root_fd, "gone/b")
    with refusal(LayoutError, "sub", "folder"):
        open_file_at(root_fd, "sub")
    with refusal(LayoutError, "a/b", "file where a folder"):
        open_file_at(root_fd, "a/b")


def test_no_descriptor_is_left_open(root: Path, root_fd: int) -> None:
    os.symlink("a", root / "link")
    before = set(os.listdir("/proc/self/fd"))
    for name in ("sub/deep/b", "sub/gone", "link/x", "a/b", "sub", "sub/deep"):
        try:
            os.close(open_file_at(root_fd, name))
        except LayoutError:
            continue
    scan_tree(root_fd)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_root_may_not_be_a_link(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    for name in (str(link), f"{link}/", f"{link}/."):
        with refusal(LayoutError, "symbolic link"):
            open_root(name)
    os.close(open_root(link, allow_link=True))
    above = tmp_path / "above"
    above.symlink_to(tmp_path)
    os.close(open_root(above / "release"))


def test_a_root_that_is_no_folder(root: Path) -> None:
    with refusal(UsageError, "there is no folder"):
        open_root(root / "gone")
    with refusal(UsageError, "no name"):
        open_root("")
    with refusal(UsageError, "not a path"):
        open_root("a\0b")
    with refusal(LayoutError, "not a folder"):
        open_root(root / "a")


def test_a_name_that_is_not_utf8_is_kept(root: Path, root_fd: int) -> None:
    with open(os.fsencode(root) + b"/\xff.bin", "wb"):
        pass
    assert "\udcff.bin" in scan_tree(root_fd).files


def test_folders_nested_too_deep(root: Path, root_fd: int) -> None:
    path = root
    for _ in range(70):
        path = path / "d"
    path.mkdir(parents=True)
    assert [problem.message for problem in scan_tree(root_fd).problems] == ["folders are nested deeper than 64"]
