"""Rows of a type in a file, read and written in ranges: hidden states of all tokens, shared by several ranks.

No memory map: mapped pages count as resident, and the budget of host memory would not hold.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from memopt.compressor.checkpoint.disk_errors import read_error, write_error
from memopt.errors import TruncatedError


class RowFile:
    """`num_rows` rows of `num_columns` elements at `path`, which is made by the first write.

    With `is_hashed`, `digests` has the SHA-256 of what every write put there, by its first row.
    """

    def __init__(
        self, path: Path, num_rows: int, num_columns: int, dtype: torch.dtype, *, is_hashed: bool = False
    ) -> None:
        self.path = path
        self.is_hashed = is_hashed
        self.digests: dict[int, bytes] = {}
        self.num_rows = num_rows
        self.num_columns = num_columns
        self.dtype = dtype
        self._row_bytes = num_columns * dtype.itemsize
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return self.num_rows * self._row_bytes

    def read(self, first: int, count: int) -> Tensor:
        """Rows [count, num_columns] from `first` on. TruncatedError for rows that were not written, MemoptIOError."""
        rows = torch.empty(count, self.num_columns, dtype=self.dtype)
        view = _bytes_of(rows)
        position = first * self._row_bytes
        while view:
            try:
                done = os.preadv(self._descriptor, [view], position)
            except OSError as problem:
                raise read_error(problem, self.path.name) from None
            if not done:
                raise TruncatedError(f"ends at byte {position:,}", file=self.path.name)
            view, position = view[done:], position + done
        return rows

    def read_rows(self, numbers: Tensor) -> Tensor:
        """The rows with `numbers` int64 [N], one after the other."""
        parts = [self.read(int(number), 1) for number in numbers]
        return torch.cat(parts) if parts else torch.empty(0, self.num_columns, dtype=self.dtype)

    def read_sha256(self, first: int, count: int) -> bytes:
        """SHA-256 of the bytes of `count` rows from `first` on. Raises as `read`."""
        return hashlib.sha256(_bytes_of(self.read(first, count))).digest()

    def write(self, first: int, rows: Tensor) -> None:
        """Put `rows` at row `first`. DiskFullError, MemoptIOError."""
        values = rows.to("cpu", self.dtype).contiguous()
        view = _bytes_of(values)
        if self.is_hashed:
            self.digests[first] = hashlib.sha256(view).digest()
        position = first * self._row_bytes
        try:
            while view:
                done = os.pwrite(self._descriptor, view, position)
                view, position = view[done:], position + done
        except OSError as problem:
            raise write_error(problem, str(self.path)) from None

    def sync(self) -> None:
        """Flush to disk, so that other machines, and a later run, find it."""
        try:
            os.fsync(self._descriptor)
        except OSError as problem:
            raise write_error(problem, str(self.path)) from None

    def close(self) -> None:
        """Close the file; it stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bytes_of(rows: Tensor) -> memoryview:
    """The memory of contiguous `rows` on the CPU."""
    return rows.view(torch.uint8).numpy().data.cast("B")
