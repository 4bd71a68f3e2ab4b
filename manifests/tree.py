"""A release's folder by descriptor: what is in it, and opening a file of it without ever following a link."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from memopt.errors import LayoutError, MemoptError, MemoptIOError, MissingFileError, UsageError

MAX_ENTRIES = 1_100_000
MAX_DEPTH = 64
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO must not wait for a writer.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A regular file. `num_links` above 1: another name, perhaps outside the release, is the same file."""

    size_bytes: int
    num_links: int


@dataclass
class Tree:
    """`files`: by name relative to the root, "/" between parts; a name that is not UTF-8 holds surrogate escapes.

    `problems`: links, special files, folders that cannot be read; each names its place in `file`.
    """

    files: dict[str, FileStatus] = field(default_factory=dict)
    problems: list[MemoptError] = field(default_factory=list)
    empty_folders: list[str] = field(default_factory=list)


def open_root(path: str | Path, *, allow_link: bool = False) -> int:
    """A descriptor of folder `path`; the caller closes it. Folders above it may be links, it may not.

    Raises UsageError if there is no such folder, LayoutError for a link or another kind of file, MemoptIOError.
    """
    # Path drops a closing slash, which would make the kernel follow a link.
    plain = Path(path)
    if not str(path):
        raise UsageError("the release has no name", remedy="name a folder")
    flags = _FOLDER_FLAGS & ~os.O_NOFOLLOW if allow_link else _FOLDER_FLAGS
    try:
        return os.open(plain, flags)
    except FileNotFoundError:
        raise UsageError(f"there is no folder {str(path)!a}", remedy="check the path, or mount the volume") from None
    except ValueError:
        raise UsageError(f"{str(path)!a} is not a path") from None
    except OSError as problem:
        if problem.errno not in {errno.ENOTDIR, errno.ELOOP}:
            raise MemoptIOError(f"cannot open: {problem.strerror}", file=str(path), remedy="try again") from None
    if os.path.islink(plain):
        raise LayoutError("the release's folder is a symbolic link", file=str(path), remedy="name the folder itself")
    raise LayoutError("is not a folder", file=str(path), remedy="name the folder of a release")


def kind_name(mode: int) -> str:
    """What a file that is not regular is, in words."""
    return next((name for test, name in _KINDS if test(mode)), "a special file")


def scan_tree(root_fd: int) -> Tree:
    """Everything below `root_fd`, folders first; nothing is opened but folders, no link is followed.

    Raises nothing but MemoptIOError for the root itself: what is wrong with an entry stands in `problems`.
    """
    tree = Tree()
    _scan_folder(root_fd, "", 0, tree)
    return tree


def _scan_folder(folder_fd: int, prefix: str, depth: int, tree: Tree) -> None:
    folders: list[str] = []
    num_entries = 0
    try:
        with os.scandir(folder_fd) as entries:
            for entry in entries:
                num_entries += 1
                if len(tree.files) + len(tree.problems) > MAX_ENTRIES:
                    raise LayoutError(f"holds more than {MAX_ENTRIES:,} files", file=prefix or ".")
                if not _scan_entry(entry, prefix, tree):
                    folders.append(entry.name)
    except OSError as problem:
        place = prefix.rstrip("/") or "."
        error = MemoptIOError(f"cannot list the folder: {problem.strerror}", file=place, remedy="try again")
        if not prefix:
            raise error from None
        tree.problems.append(error)
        return
    if not num_entries and prefix:
        tree.empty_folders.append(prefix.rstrip("/"))
    for name in sorted(folders):
        _enter_folder(folder_fd, prefix + name, name, depth, tree)


def _scan_entry(entry: os.DirEntry[str], prefix: str, tree: Tree) -> bool:
    """Record one entry; False if it is a folder to enter."""
    name = prefix + entry.name
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return True  # gone between listing and looking: if it was listed in the manifest, it is missing
    except OSError as problem:
        tree.problems.append(MemoptIOError(f"cannot look at it: {problem.strerror}", file=name, remedy="try again"))
        return True
    if stat.S_ISREG(status.st_mode):
        tree.files[name] = FileStatus(status.st_size, status.st_nlink)
    elif stat.S_ISDIR(status.st_mode):
        return False
    else:
        tree.problems.append(not_regular(name, status.st_mode))
    return True


def not_regular(name: str, mode: int) -> LayoutError:
    """The refusal of a link or special file."""
    return LayoutError(f"is {kind_name(mode)}", file=name, remedy="a release holds plain files only: remove it")


def _enter_folder(parent_fd: int, path: str, name: str, depth: int, tree: Tree) -> None:
    if depth >= MAX_DEPTH:
        tree.problems.append(LayoutError(f"folders are nested deeper than {MAX_DEPTH}", file=path))
        return
    try:
        folder_fd = os.open(name, _FOLDER_FLAGS, dir_fd=parent_fd)
    except OSError as problem:
        if problem.errno in {errno.ENOTDIR, errno.ELOOP}:
            tree.problems.append(LayoutError("turned from a folder into something else", file=path))
        elif problem.errno != errno.ENOENT:
            error = MemoptIOError(f"cannot open the folder: {problem.strerror}", file=path, remedy="try again")
            tree.problems.append(error)
        return
    try:
        _scan_folder(folder_fd, path + "/", depth + 1, tree)
    finally:
        os.close(folder_fd)


def open_file_at(root_fd: int, name: str) -> int:
    """Open the regular file `name` below `root_fd`, part by part, no links; the caller closes the descriptor.

    `name` must have passed `check_file_name`. Raises MissingFileError, LayoutError for links, folders and special
    files, MemoptIOError for the rest.
    """
    *folders, last = name.split("/")
    current = root_fd
    try:
        for folder in folders:
            below = _open_part(current, folder, _FOLDER_FLAGS, name)
            if current != root_fd:
                os.close(current)
            current = below
        descriptor = _open_part(current, last, _FILE_FLAGS, name)
    finally:
        if current != root_fd:
            os.close(current)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise not_regular(name, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_part(parent_fd: int, part: str, flags: int, name: str) -> int:
    try:
        return os.open(part, flags, dir_fd=parent_fd)
    except FileNotFoundError:
        raise MissingFileError("is listed but not there", file=name, remedy="fetch the release again") from None
    except OSError as problem:
        # ENXIO: a socket; ELOOP, and ENOTDIR for a folder: a symbolic link; ENOTDIR: a file where a folder must be.
        if problem.errno not in {errno.ELOOP, errno.ENOTDIR, errno.ENXIO}:
            raise MemoptIOError(f"cannot open: {problem.strerror}", file=name, remedy="try again") from None
    try:
        mode = os.stat(part, dir_fd=parent_fd, follow_symlinks=False).st_mode
    except OSError:
        mode = 0
    if stat.S_ISREG(mode):
        raise LayoutError(f"{part!r} is a file where a folder must be", file=name, remedy="fetch the release again")
    raise not_regular(name, mode)
