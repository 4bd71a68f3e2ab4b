"""Opening a file of a checkpoint: regular files only, never blocking, errors in memopt's words."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memopt.errors import LayoutError, MemoptIOError, MissingFileError


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Yield (descriptor, status) of a regular file opened for reading; links are followed (the Hub's cache uses them).

    Raises MissingFileError, LayoutError for anything that is not a regular file, MemoptIOError for the rest.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingFileError(
            f"there is no {path.name} in {path.parent}", remedy="check the path; a checkpoint or release must be whole"
        ) from None
    except OSError as problem:
        error = (
            LayoutError
            if problem.errno in {errno.ENXIO, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG}
            else MemoptIOError
        )
        raise error(f"cannot open: {problem.strerror}", file=str(path)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise LayoutError("is not a regular file", file=str(path), remedy="a checkpoint holds plain files only")
        yield descriptor, status
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, size_bytes: int, offset: int) -> bytes:
    """Read up to `size_bytes` at `offset`; fewer come back only at the end of the file."""
    parts: list[bytes] = []
    while size_bytes > 0:
        part = os.pread(descriptor, size_bytes, offset)
        if not part:
            break
        parts.append(part)
        size_bytes -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
