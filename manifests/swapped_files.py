"""Whether the bytes of a file that fails its digest are those signed for another file: then files were swapped.

Asked only of files that fail. A file that holds nobody's bytes costs one chunk more, a swapped one another read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from memopt.errors import ContentError, MemoptError
from memopt.manifests.digest import LEAF_SIZE_BYTES
from memopt.manifests.hashing import read_into
from memopt.manifests.tree import open_file_at
from memopt.manifests.trusted_release import TrustedRelease
from memopt.manifests.verified_reader import PIECE_SIZE_BYTES, SignedFile

# A file may hold the bytes of several that are equal; so many are tried for the one that took its place.
_MAX_PARTNERS = 8


class SwappedFiles:
    """Looks for the owner of misplaced bytes among the files of `release`, below a folder's descriptor."""

    def __init__(self, root_fd: int, release: TrustedRelease) -> None:
        self._root_fd = root_fd
        self._release = release
        self._owners: dict[str, tuple[str, ...]] = {}

    def problem(self, name: str) -> ContentError | None:
        """The refusal that says whose bytes lie at `name`, None if nobody's. Never raises for a bad file."""
        owners = self._owners_of(name)
        if not owners:
            return None
        for owner in owners[:_MAX_PARTNERS]:
            if name in self._owners_of(owner):
                return _misplaced(name, owner, "the two files were swapped")
        return _misplaced(name, owners[0], "files were mixed up")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Within the block a ContentError about a file that holds another's bytes says so."""
        try:
            yield
        except ContentError as problem:
            # Files may have been moved since the last failure.
            self._owners.clear()
            named = None if problem.file is None else self.problem(problem.file)
            if named is None:
                raise
            raise named from None

    def _owners_of(self, name: str) -> tuple[str, ...]:
        """The other signed files whose signed bytes lie at `name`."""
        if name not in self._owners:
            try:
                self._owners[name] = self._find_owners(name)
            except MemoptError:
                # It cannot be read: that is reported already.
                self._owners[name] = ()
        return self._owners[name]

    def _find_owners(self, name: str) -> tuple[str, ...]:
        if name not in self._release.digests:
            return ()
        descriptor = open_file_at(self._root_fd, name)
        try:
            size_bytes = os.fstat(descriptor).st_size
            if not size_bytes:
                return ()
            if self._release.leaves is None:
                found = _sha256(descriptor, 0, size_bytes, name).hex()
                return tuple(other for other in self._by_digest.get(found, ()) if other != name)
            own = self._release.digests[name]
            owners = [
                self._release.signed_file(other, size_bytes)
                for other in self._by_size.get(size_bytes, ())
                if self._release.digests[other] != own
            ]
            return tuple(file.name for file in _with_bytes_of(descriptor, owners, name))
        finally:
            os.close(descriptor)

    @cached_property
    def _by_size(self) -> dict[int, list[str]]:
        leaves = self._release.leaves
        by_size: dict[int, list[str]] = {}
        for name, size_bytes in sorted(self._release.sizes.items()):
            if leaves is not None and name in leaves.ranges:
                by_size.setdefault(size_bytes, []).append(name)
        return by_size

    @cached_property
    def _by_digest(self) -> dict[str, list[str]]:
        by_digest: dict[str, list[str]] = {}
        for name, sha256 in sorted(self._release.digests.items()):
            by_digest.setdefault(sha256, []).append(name)
        return by_digest


def _with_bytes_of(descriptor: int, files: list[SignedFile], name: str) -> list[SignedFile]:
    """Those of `files`, all of the size of the open file `name`, whose every signed chunk is what it holds."""
    for chunk in range(files[0].num_chunks if files else 0):
        found = _sha256(descriptor, *files[0].chunk_bounds(chunk), name)
        place = slice(chunk * LEAF_SIZE_BYTES, (chunk + 1) * LEAF_SIZE_BYTES)
        files = [file for file in files if file.leaves[place] == found]
        if not files:
            break
    return files


def _sha256(descriptor: int, start: int, end: int, name: str) -> bytes:
    state = hashlib.sha256()
    buffer = memoryview(bytearray(min(PIECE_SIZE_BYTES, end - start)))
    for offset in range(start, end, PIECE_SIZE_BYTES):
        piece = buffer[: min(PIECE_SIZE_BYTES, end - offset)]
        read_into(descriptor, piece, offset, name)
        state.update(piece)
    return state.digest()


def _misplaced(name: str, owner: str, fault: str) -> ContentError:
    return ContentError(
        f"its bytes are those signed for {owner}: {fault}",
        file=name,
        remedy="put the files back in their places, or fetch the release again",
    )
