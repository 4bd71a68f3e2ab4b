"""numba's disk cache where it is safe and works; compiling anew in this process where not.

numba looks for a folder in this order: NUMBA_CACHE_DIR, the package's own `__pycache__`, the user's cache folder. In a
container with a read-only root it finds none and gives up, which must not stop a run: compiling takes seconds. What
it does find may hold anybody's files (HOME=/tmp): cached code is unpickled and run, so it is used only from a folder
that nobody else can write, or from the package's own, whose writers can change this file just as well.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit

ROOT_USER = 0


class CompiledKernel:
    """A jitted function that survives a cache it cannot read or write: then it compiles without one.

    Calling it again is safe, because a kernel does nothing but fill the arrays that it is given.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._uncached = njit(nogil=True, error_model="numpy")(function)
        self._cached = self._with_cache(function)

    @staticmethod
    def _with_cache(function: Callable[..., Any]) -> Any | None:
        try:
            cached = njit(cache=True, nogil=True, error_model="numpy")(function)
        except (RuntimeError, OSError):
            return None  # "no locator available": no folder can be written
        folder = Path(str(cached.stats.cache_path))
        return cached if folder.is_relative_to(Path(__file__).parent) or is_private(folder) else None

    @property
    def dispatcher(self) -> Any:
        """numba's object behind it, with its signatures and cache figures."""
        return self._uncached if self._cached is None else self._cached

    def __call__(self, *arguments: Any) -> Any:
        cached = self._cached
        if cached is not None:
            try:
                return cached(*arguments)
            # A full disk, a folder gone read-only, a torn file: unpickling can raise anything. An error of the kernel
            # itself comes again below.
            except Exception:  # noqa: BLE001
                self._cached = None
        return self._uncached(*arguments)


def compiled(function: Callable[..., Any]) -> CompiledKernel:
    """Decorator: compiles on the first call, releases the GIL while it runs."""
    return CompiledKernel(function)


def source_digest(*files: str | Path) -> str:
    """SHA-256 (hexadecimal) over the files that decide what a compiled function does, and over this one."""
    digest = sha256()
    for file in (*files, __file__):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def is_private(folder: Path) -> bool:
    """Whether only this user, or root, can put files into `folder`, directly or by renaming a folder above it."""
    ends = {folder.absolute(), folder.resolve()}  # of a link, both what holds it and what it leads to
    return all(_is_closed(place, is_leaf=place in ends) for end in ends for place in (end, *end.parents))


def _is_closed(folder: Path, *, is_leaf: bool) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    if found.st_uid not in (os.geteuid(), ROOT_USER):
        return False
    writable = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid())
    # In a sticky folder such as /tmp nobody renames what is another's, but anybody adds files.
    return not writable or (bool(found.st_mode & stat.S_ISVTX) and not is_leaf)
