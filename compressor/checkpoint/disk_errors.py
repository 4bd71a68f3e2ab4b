"""Operating-system errors in memopt's words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from memopt.errors import DiskFullError, MemoptIOError, OutputError

RUN_AGAIN = "run the same command again: finished files are kept and partial ones continue"

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


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn the system's errors about a path into DiskFullError or MemoptIOError, naming `what`: for downloads."""
    try:
        yield
    except OSError as problem:
        if problem.errno in _FULL:
            raise DiskFullError(f"{what}: no space is left", remedy=f"free some space, then {RUN_AGAIN}") from problem
        reason = problem.strerror or type(problem).__name__
        raise MemoptIOError(f"{what}: {reason}", file=problem.filename, remedy=RUN_AGAIN) from problem
