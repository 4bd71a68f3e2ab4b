"""What a block multiplies with: x [M, K] to [M, N], whatever form the weight is stored in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Linear(Protocol):
    """A projection. Results are in x's type; sums are float32 or better."""

    @property
    def num_rows(self) -> int:
        """N: elements of a result (of this rank)."""
        ...

    @property
    def num_columns(self) -> int:
        """K: elements of x (of this rank)."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes that the weight takes in memory."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[M, N] of x [M, K], contiguous."""
        ...
