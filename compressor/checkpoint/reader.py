"""Reading weights: positional reads from files opened once, and a check that no file changed meanwhile."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from memopt.compressor.checkpoint.checkpoint import Checkpoint, StoredTensor, WeightFile
from memopt.compressor.checkpoint.disk_errors import read_error
from memopt.compressor.checkpoint.file_stamp import FileStamp
from memopt.errors import LayoutError, SourceChangedError, TruncatedError
from memopt.manifests.open_file import read_exactly
from memopt.manifests.safetensors_header import LENGTH_SIZE_BYTES


def _header_digest(descriptor: int, size_bytes: int) -> str:
    length = int.from_bytes(read_exactly(descriptor, LENGTH_SIZE_BYTES, 0), "little")
    return hashlib.sha256(read_exactly(descriptor, min(LENGTH_SIZE_BYTES + length, size_bytes), 0)).hexdigest()


class OpenFiles:
    """Open files of a checkpoint or release. Reads are positional, so that several threads may share them."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def read_into(self, tensor: StoredTensor, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset` of `tensor`; TruncatedError, MemoptIOError."""
        descriptor = self._descriptors[tensor.file]
        position = tensor.start + offset
        while buffer:
            try:
                count = os.preadv(descriptor, [buffer], position)
            except OSError as problem:
                raise read_error(problem, tensor.file, tensor.name) from None
            if count == 0:
                raise TruncatedError(
                    f"the file ends at byte {position:,}, inside the tensor", tensor=tensor.name, file=tensor.file
                )
            buffer = buffer[count:]
            position += count

    def close(self) -> None:
        """Close every file."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SourceReader(OpenFiles):
    """All files of a checkpoint, open: one reader serves every worker thread."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.stamps: dict[str, FileStamp] = {}
        try:
            for name, file in checkpoint.files.items():
                self._open(name, file)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, file: WeightFile) -> None:
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as problem:
            raise read_error(problem, name) from None
        self._descriptors[name] = descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise LayoutError("is not a regular file", file=name)
        if status.st_size != file.size_bytes:
            raise SourceChangedError(
                f"has {status.st_size:,} bytes now, {file.size_bytes:,} when it was planned", file=name
            )
        if _header_digest(descriptor, status.st_size) != file.header_sha256:
            raise SourceChangedError("its header was changed since it was planned", file=name)
        self.stamps[name] = FileStamp.of(status)

    def open_files(self, _names: Collection[str]) -> AbstractContextManager[SourceReader]:
        """The reader itself: all files are open already, and a thread may read from any of them."""
        return nullcontext(self)

    def require_unchanged(self) -> None:
        """SourceChangedError if a file was touched since it was opened."""
        for name, stamp in self.stamps.items():
            if FileStamp.of(os.fstat(self._descriptors[name])) != stamp:
                raise SourceChangedError(
                    "was changed while it was read", file=name, remedy="compress from a checkpoint that stays still"
                )
