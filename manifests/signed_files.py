"""Reading what a release says about itself (config, index, ledger, headers) from verified bytes alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Protocol

from memopt.errors import ContentError, LedgerError, MalformedError, UnsupportedError
from memopt.manifests.hashing import read_into
from memopt.manifests.safetensors_header import (
    LENGTH_SIZE_BYTES,
    MAX_HEADER_SIZE_BYTES,
    FileHeader,
    header_length,
    parse_header,
)
from memopt.manifests.tree import open_file_at
from memopt.manifests.verified_reader import FileRead, SignedFile, Target, check_open_file, read_verified

MAX_LINE_SIZE_BYTES = 16 * 2**20
# A ledger that was signed without chunks is held in memory until it is verified.
MAX_UNCHUNKED_LEDGER_BYTES = 512 * 2**20


class FileSource(Protocol):
    """Where checks read files from: verified bytes of a signed release, or a folder that is about to be signed."""

    def read(self, name: str, max_size_bytes: int, error: type[MalformedError]) -> bytes:
        """A small file; `error` if it is larger."""
        ...

    def header(self, name: str) -> FileHeader:
        """The header of a safetensors file."""
        ...

    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a text file, one after the other."""
        ...


class OpenFile:
    """A file below a folder's descriptor with everything that its readers need; a context manager."""

    def __init__(self, root_fd: int, name: str) -> None:
        self.name = name
        self.descriptor = open_file_at(root_fd, name)

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


class SignedFiles:
    """Files of a signed release: every byte is hashed in the memory that it is returned in.

    `describe` tells what was signed about a file, given the size that it has on disk. Methods raise ContentError for
    bytes that are not the signed ones, MissingFileError, LayoutError, MemoptIOError.
    """

    def __init__(self, root_fd: int, describe: Callable[[str, int], SignedFile]) -> None:
        self._root_fd = root_fd
        self._describe = describe

    def read(self, name: str, max_size_bytes: int, error: type[MalformedError]) -> bytes:
        with OpenFile(self._root_fd, name) as opened:
            file = self._checked(opened)
            _check_cap(name, file.size_bytes, max_size_bytes, error)
            memory = bytearray(file.size_bytes)
            read_verified([FileRead.of_all(opened.descriptor, file, memoryview(memory))], 1)
        return bytes(memory)

    def header(self, name: str) -> FileHeader:
        """Only the chunks that hold the header are read, or all of a file that was not signed in chunks."""
        with OpenFile(self._root_fd, name) as opened:
            file = self._checked(opened)
            # A look at the unverified length says how much to verify; only verified bytes are used.
            length = _claimed_length(opened.descriptor, file.size_bytes)
            memory = bytearray(min(LENGTH_SIZE_BYTES + length, file.size_bytes))
            read = FileRead(
                opened.descriptor,
                file,
                (Target(0, memoryview(memory)),) if memory else (),
                is_whole=file.chunk_size_bytes >= file.size_bytes,
            )
            read_verified([read], 1)
        if header_length(bytes(memory[:LENGTH_SIZE_BYTES]), file.size_bytes, name) != length:
            raise ContentError("was changed while it was read", file=name, remedy="fetch the file again")
        return parse_header(bytes(memory[LENGTH_SIZE_BYTES:]), file.size_bytes, name)

    def lines(self, name: str) -> Iterator[bytes]:
        with OpenFile(self._root_fd, name) as opened:
            file = self._checked(opened)
            if file.chunk_size_bytes >= file.size_bytes > MAX_UNCHUNKED_LEDGER_BYTES:
                raise UnsupportedError(
                    f"{file.size_bytes:,} bytes that were not signed in chunks", file=name, remedy="sign with memopt"
                )
            yield from split_lines(name, (_read_chunk(opened.descriptor, file, n) for n in range(file.num_chunks)))

    def _checked(self, opened: OpenFile) -> SignedFile:
        file = self._describe(opened.name, opened.size_bytes)
        check_open_file(opened.descriptor, file)
        return file


def _read_chunk(descriptor: int, file: SignedFile, chunk: int) -> bytes:
    start, end = file.chunk_bounds(chunk)
    memory = bytearray(end - start)
    read_verified([FileRead(descriptor, file, (Target(start, memoryview(memory)),))], 1)
    return bytes(memory)


def _claimed_length(descriptor: int, size_bytes: int) -> int:
    prefix = bytearray(min(LENGTH_SIZE_BYTES, size_bytes))
    read_into(descriptor, memoryview(prefix), 0, "")
    length = int.from_bytes(prefix, "little")
    return length if length <= MAX_HEADER_SIZE_BYTES else 0


class PlainFiles:
    """Files of a folder that is about to be signed: read as they are."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd

    def read(self, name: str, max_size_bytes: int, error: type[MalformedError]) -> bytes:
        with OpenFile(self._root_fd, name) as opened:
            _check_cap(name, opened.size_bytes, max_size_bytes, error)
            return _read_plain(opened, 0, opened.size_bytes)

    def header(self, name: str) -> FileHeader:
        with OpenFile(self._root_fd, name) as opened:
            size_bytes = opened.size_bytes
            length = header_length(_read_plain(opened, 0, min(LENGTH_SIZE_BYTES, size_bytes)), size_bytes, name)
            return parse_header(_read_plain(opened, LENGTH_SIZE_BYTES, length), size_bytes, name)

    def lines(self, name: str) -> Iterator[bytes]:
        step = 2**20
        with OpenFile(self._root_fd, name) as opened:
            size = opened.size_bytes
            yield from split_lines(
                name, (_read_plain(opened, start, min(step, size - start)) for start in range(0, size, step))
            )


def _read_plain(opened: OpenFile, offset: int, size_bytes: int) -> bytes:
    memory = bytearray(size_bytes)
    read_into(opened.descriptor, memoryview(memory), offset, opened.name)
    return bytes(memory)


def _check_cap(name: str, size_bytes: int, max_size_bytes: int, error: type[MalformedError]) -> None:
    if size_bytes > max_size_bytes:
        raise error(f"{size_bytes:,} bytes, at most {max_size_bytes:,} are read", file=name)


def split_lines(name: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their line feed from pieces of a file; LedgerError for one longer than 16 MiB."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE_SIZE_BYTES:
            raise LedgerError(f"a line is longer than {MAX_LINE_SIZE_BYTES:,} bytes", file=name)
    if rest:
        yield rest
