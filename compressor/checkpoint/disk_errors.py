"""Operating-system errors in memopt's words."""

from __future__ import annotations

import errno

from memopt.errors import DiskFullError, MemoptIOError, OutputError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNUSABLE = {
    errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


def write_error(problem: OSError, file: str) -> MemoptIOError | OutputError:
    """The error for a failed write to `file`: disk full, an unusable folder, or another I/O fault."""
    if problem.errno in _FULL:
        return DiskFullError(
            f"no space: {problem.strerror}",
            file=file,
            remedy="free some space and run the same command again: finished units are kept",
        )
    if problem.errno in _UNUSABLE:
        return OutputError(f"cannot write: {problem.strerror}", file=file, remedy="choose a writable output folder")
    return MemoptIOError(
        f"cannot write: {problem.strerror}", file=file, remedy="run the same command again: finished units are kept"
    )


def read_error(problem: OSError, file: str, tensor: str | None = None) -> MemoptIOError:
    """The error for a failed read from `file`."""
    return MemoptIOError(
        f"cannot read: {problem.strerror}",
        file=file,
        tensor=tensor,
        remedy="run the same command again: finished units are kept",
    )
