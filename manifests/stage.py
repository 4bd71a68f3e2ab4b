"""A private copy of a release for engines that open files by path, as vLLM and SGLang do: they read what was verified.

Between a verification and an engine's own open(), whoever can write the original can swap it. The copy holds the bytes
that were hashed, in a folder that only this user can enter.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.errors import DiskFullError, MemoptIOError, OutputError

if TYPE_CHECKING:
    from memopt.manifests.release import Release

_FOLDER_MODE = 0o700
_FILE_MODE = 0o400
# Files written at a time; each is hashed and written in parallel chunks.
_BATCH = 16


def stage(
    release: Release,
    dest: str | Path,
    *,
    rank: int | None = None,
    tensor_parallel: int | None = None,
    expert_parallel: int | None = None,
) -> Path:
    """Copy the verified files of `release` (of `rank` only, if given) into the new folder `dest`; returns it.

    `tensor_parallel`, `expert_parallel`: which of several rank layouts, as in `Release.load`.

    The folder (mode 0700) appears under its name when all of it is verified and on disk; a failure leaves nothing.
    Raises OutputError if `dest` exists or its parent does not, DiskFullError, and what `Release.load` raises.
    """
    dest = Path(dest)
    names = release.files_for(rank, tensor_parallel=tensor_parallel, expert_parallel=expert_parallel)
    _check_dest(dest, release)
    with _refusals(dest):
        partial = Path(tempfile.mkdtemp(prefix=f".{dest.name[:100]}.", suffix=".partial", dir=dest.parent))
        try:
            _copy_all(release, partial, names)
            for name, raw in release.signature_files.items():
                _write_small(partial / name, raw)
            _sync_folders(partial)
            partial.rename(dest)
            _sync(dest.parent)
        except BaseException:
            # Also on Ctrl-C: half a copy is worth nothing, and nobody else removes it.
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return dest


def _check_dest(dest: Path, release: Release) -> None:
    if os.path.lexists(dest):
        raise OutputError("exists already", file=str(dest), remedy="name a new folder, or remove it")
    if not dest.parent.is_dir():
        raise OutputError("its parent folder does not exist", file=str(dest), remedy="make it, or mount the volume")
    parent = dest.parent.resolve()
    if release.path.resolve() in (parent, *parent.parents):
        raise OutputError("lies inside the release", file=str(dest), remedy="name a folder outside of it")


@contextmanager
def _refusals(dest: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise DiskFullError(
                f"no space for the copy: {problem.strerror}", file=str(dest), remedy="use a larger volume"
            ) from None
        if problem.errno in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
            raise OutputError("appeared while it was copied", file=str(dest), remedy="name a new folder") from None
        raise MemoptIOError(f"cannot write: {problem.strerror}", file=str(dest), remedy="try again") from None


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)


def _copy_all(release: Release, folder: Path, names: Sequence[str]) -> None:
    for start in range(0, len(names), _BATCH):
        with ExitStack() as opened:
            copies: list[tuple[str, int]] = []
            for name in names[start : start + _BATCH]:
                path = folder / name
                for parent in reversed(path.relative_to(folder).parents):
                    (folder / parent).mkdir(mode=_FOLDER_MODE, exist_ok=True)
                descriptor = _create(path)
                opened.callback(os.close, descriptor)
                copies.append((name, descriptor))
            release.copy_files(copies)
            for _, descriptor in copies:
                os.fsync(descriptor)


def _write_small(path: Path, raw: bytes) -> None:
    with os.fdopen(_create(path), "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folders(folder: Path) -> None:
    for current, _, _ in os.walk(folder, topdown=False):
        _sync(Path(current))
