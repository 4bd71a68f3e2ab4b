"""Writing a small file of a release so that it is there whole or not at all."""

from __future__ import annotations

import errno
import os

from memopt.errors import DiskFullError, MemoptIOError

# In the release's folder, so that the rename stays on one file system; a crash leaves it, the next signing removes it.
TEMPORARY_NAME = ".memopt.sign.tmp"
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_at(root_fd: int, name: str) -> None:
    """Remove `name` below `root_fd` if it is there; MemoptIOError."""
    try:
        os.unlink(name, dir_fd=root_fd)
    except FileNotFoundError:
        return
    except OSError as problem:
        raise MemoptIOError(f"cannot remove: {problem.strerror}", file=name) from None


def write_at(root_fd: int, name: str, data: bytes) -> None:
    """Put `data` under `name` below `root_fd`: temporary name, fsync, rename, fsync of the folder.

    Raises DiskFullError, MemoptIOError; the temporary file is removed then.
    """
    try:
        remove_at(root_fd, TEMPORARY_NAME)
        descriptor = os.open(TEMPORARY_NAME, _FLAGS, 0o644, dir_fd=root_fd)
        try:
            done = 0
            while done < len(data):
                done += os.write(descriptor, data[done:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(TEMPORARY_NAME, name, src_dir_fd=root_fd, dst_dir_fd=root_fd)
        os.fsync(root_fd)
    except OSError as problem:
        remove_at(root_fd, TEMPORARY_NAME)
        error = DiskFullError if problem.errno in {errno.ENOSPC, errno.EDQUOT} else MemoptIOError
        raise error(f"cannot write: {problem.strerror}", file=name) from None
    except BaseException:
        remove_at(root_fd, TEMPORARY_NAME)
        raise
