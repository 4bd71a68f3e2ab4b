"""What a rank needs of the others. The forms: `SingleRank` here, torch.distributed in `distributed.py`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """Every rank calls the same methods in the same order. Results are equal to the bit on all ranks."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of `values`, any shape, in place where that is possible."""
        ...

    def maximum(self, values: Tensor) -> Tensor:
        """The maximum over ranks, element by element, of an integer tensor."""
        ...

    def gather_columns(self, values: Tensor) -> Tensor:
        """[M, ranks * N] of [M, N]: the ranks' columns side by side, rank 0's first."""
        ...

    def from_first(self, values: Tensor) -> Tensor:
        """Rank 0's `values`; others pass a tensor of the same shape and type, which is overwritten."""
        ...

    def bytes_from_first(self, message: bytes) -> bytes:
        """Rank 0's `message`, of any length; what others pass is not looked at."""
        ...


class SingleRank:
    """The communicator of a process that is alone."""

    rank = 0
    num_ranks = 1

    def sum(self, values: Tensor) -> Tensor:
        """`values` itself."""
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """`values` itself."""
        return values

    def gather_columns(self, values: Tensor) -> Tensor:
        """`values` itself."""
        return values

    def from_first(self, values: Tensor) -> Tensor:
        """`values` itself."""
        return values

    def bytes_from_first(self, message: bytes) -> bytes:
        """`message` itself."""
        return message
