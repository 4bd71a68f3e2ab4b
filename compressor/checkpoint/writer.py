"""Writing one safetensors file in file order: the header was planned, the data streams, every tensor is hashed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from memopt.compressor.checkpoint.disk_errors import write_error
from memopt.errors import SizeMismatchError
from memopt.manifests.safetensors_header import TensorHeader

WRITE_BUFFER_BYTES = 2**20
_FAULT_IN_MEMOPT = "this is a fault in memopt: report it with the tensor's name; the source and other files are sound"
Bytes = bytes | bytearray | memoryview


class UnitFile:
    """A file being written at a temporary path.

    Chunks of a tensor come in order; tensors may come in any order. What is ahead of its place waits in memory
    (an INT4 tensor's scales until its last words are written).
    """

    def __init__(self, path: Path, header: bytes, layout: tuple[TensorHeader, ...]) -> None:
        self._path = path
        self._layout = layout
        self._current = 0
        self._remaining = {tensor.name: tensor.size_bytes for tensor in layout}
        self._waiting: dict[str, list[bytes]] = {}
        self._hashes = {tensor.name: hashlib.sha256() for tensor in layout}
        try:
            self._stream = open(path, "wb", buffering=WRITE_BUFFER_BYTES)  # noqa: SIM115 (closed by finish or exit)
            self._stream.write(header)
        except OSError as problem:
            raise write_error(problem, str(path)) from None

    def append(self, name: str, chunk: Bytes) -> None:
        """Add the next bytes of tensor `name`; SizeMismatchError if it gets more than the plan gave it."""
        view = memoryview(chunk).cast("B")
        self._remaining[name] -= view.nbytes
        if self._remaining[name] < 0:
            raise SizeMismatchError(
                f"{-self._remaining[name]:,} bytes more than planned",
                tensor=name,
                file=self._path.name,
                remedy=_FAULT_IN_MEMOPT,
            )
        self._hashes[name].update(view)
        if self._layout[self._current].name != name:
            self._waiting.setdefault(name, []).append(bytes(view))
            return
        self._write(view)
        self._advance()

    def _advance(self) -> None:
        while self._current < len(self._layout):
            name = self._layout[self._current].name
            for chunk in self._waiting.pop(name, ()):
                self._write(chunk)
            if self._remaining[name]:
                return
            self._current += 1

    def _write(self, chunk: Bytes) -> None:
        try:
            self._stream.write(chunk)
        except OSError as problem:
            raise write_error(problem, str(self._path)) from None

    def finish(self) -> dict[str, str]:
        """Flush to disk and close; tensor name -> sha256. SizeMismatchError if a tensor got less than planned."""
        self._advance()
        short = [name for name, count in self._remaining.items() if count]
        if short:
            raise SizeMismatchError(
                f"{self._remaining[short[0]]:,} bytes fewer than planned",
                tensor=short[0],
                file=self._path.name,
                remedy=_FAULT_IN_MEMOPT,
            )
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        except OSError as problem:
            raise write_error(problem, str(self._path)) from None
        return {name: state.hexdigest() for name, state in self._hashes.items()}

    def __enter__(self) -> UnitFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failed write, closing flushes again and fails again: the first error is the one to report.
        try:
            self._stream.close()
        except OSError as problem:
            if kind is None:
                raise write_error(problem, str(self._path)) from None


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, temporary: Path) -> None:
    """Write `data` to `temporary`, flush it, and rename it to `path`; a crash leaves the old file or the new one."""
    write_stream_atomically(path, (data,), temporary)


def write_stream_atomically(path: Path, chunks: Iterable[bytes], temporary: Path) -> None:
    """`write_atomically` for what need not be in memory at once."""
    try:
        with open(temporary, "wb", buffering=WRITE_BUFFER_BYTES) as stream:
            stream.writelines(chunks)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as problem:
        raise write_error(problem, str(path)) from None
