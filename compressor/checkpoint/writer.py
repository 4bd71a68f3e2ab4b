"""Writing one safetensors file: header and places were planned, the data streams, every tensor is hashed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from memopt.compressor.checkpoint.disk_errors import write_error
from memopt.errors import SizeMismatchError
from memopt.manifests.safetensors_header import TensorHeader

WRITE_BUFFER_BYTES = 2**20
FAULT_IN_MEMOPT = "this is a fault in memopt: report it with the tensor's name; the source and other files are sound"
Bytes = bytes | bytearray | memoryview


class TensorSink(Protocol):
    """Where the work on tensors goes: chunks of whole rows (whole elements of what has no rows), in order."""

    def append(self, name: str, chunk: Bytes, /) -> None:
        """Take the next bytes of tensor `name`."""


class UnitFile:
    """A file being written at a temporary path.

    Chunks of a tensor come in order; tensors may come in any order, for every one's place is planned. `unhashed`:
    tensors whose digest is known from elsewhere.
    """

    def __init__(
        self, path: Path, header: bytes, layout: tuple[TensorHeader, ...], unhashed: frozenset[str] = frozenset()
    ) -> None:
        self._path = path
        self._position = {tensor.name: len(header) + tensor.start for tensor in layout}
        self._remaining = {tensor.name: tensor.size_bytes for tensor in layout}
        self._hashes = {tensor.name: hashlib.sha256() for tensor in layout if tensor.name not in unhashed}
        try:
            self._stream = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by finish or exit)
        except OSError as problem:
            raise write_error(problem, str(path)) from None
        try:
            self._write(memoryview(header), 0)
        except BaseException:
            self._stream.close()
            raise

    def append(self, name: str, chunk: Bytes) -> None:
        """Add the next bytes of tensor `name`; SizeMismatchError if it gets more than the plan gave it."""
        view = memoryview(chunk).cast("B")
        self._remaining[name] -= view.nbytes
        if self._remaining[name] < 0:
            raise SizeMismatchError(
                f"{-self._remaining[name]:,} bytes more than planned",
                tensor=name,
                file=self._path.name,
                remedy=FAULT_IN_MEMOPT,
            )
        if name in self._hashes:
            self._hashes[name].update(view)
        self._write(view, self._position[name])
        self._position[name] += view.nbytes

    def _write(self, view: memoryview, position: int) -> None:
        try:
            while view:
                count = os.pwrite(self._stream.fileno(), view, position)
                view = view[count:]
                position += count
        except OSError as problem:
            raise write_error(problem, str(self._path)) from None

    def finish(self) -> dict[str, str]:
        """Flush to disk and close; hashed tensor -> sha256 (hex). SizeMismatchError if a tensor got too little."""
        short = [name for name, count in self._remaining.items() if count]
        if short:
            raise SizeMismatchError(
                f"{self._remaining[short[0]]:,} bytes fewer than planned",
                tensor=short[0],
                file=self._path.name,
                remedy=FAULT_IN_MEMOPT,
            )
        try:
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
        # Whatever closing may find after a failed write, the first error is the one to report.
        with suppress(OSError):
            self._stream.close()


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
