"""A tensor in steps of whole rows, small enough for memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

STEP_SIZE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class RowStep:
    """Rows [first, first + count) of a tensor: bytes [start, start + size_bytes) of it."""

    first: int
    count: int
    start: int
    size_bytes: int


def row_steps(shape: tuple[int, ...], size_bytes: int, step_size_bytes: int = STEP_SIZE_BYTES) -> Iterator[RowStep]:
    """Steps through a tensor of `shape` and `size_bytes`, about `step_size_bytes` each and at least a row; () is a row.

    Nothing for a tensor without bytes.
    """
    rows = shape[0] if shape else 1
    if size_bytes == 0:
        return
    row_bytes = size_bytes // rows
    count = max(1, step_size_bytes // row_bytes)
    for first in range(0, rows, count):
        taken = min(count, rows - first)
        yield RowStep(first, taken, first * row_bytes, taken * row_bytes)
