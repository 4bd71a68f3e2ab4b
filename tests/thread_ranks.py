"""Ranks as threads of one process: a communicator without a network, for what a model does with its ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


@dataclass
class _Board:
    num_ranks: int
    barrier: threading.Barrier = field(init=False)
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.num_ranks, timeout=60)


@dataclass(frozen=True)
class ThreadRank:
    """memopt.runtime.parallel.communicator.Communicator of one thread."""

    rank: int
    num_ranks: int
    board: _Board

    def _all(self, value: Any) -> list[Any]:
        self.board.values[self.rank] = value
        self.board.barrier.wait()
        values = [self.board.values[rank] for rank in range(self.num_ranks)]
        self.board.barrier.wait()
        return values

    def sum(self, values: Tensor) -> Tensor:
        return reduce(torch.add, self._all(values))

    def maximum(self, values: Tensor) -> Tensor:
        return reduce(torch.maximum, self._all(values))

    def gather_columns(self, values: Tensor) -> Tensor:
        return torch.cat(self._all(values), dim=1)

    def from_first(self, values: Tensor) -> Tensor:
        return self._all(values)[0].clone()

    def bytes_from_first(self, message: bytes) -> bytes:
        return self._all(message)[0]


def run_ranks(num_ranks: int, work: Callable[[ThreadRank], Result]) -> list[Result]:
    """What `work` returns on each rank; a rank that raises breaks the barrier, so that nobody waits for ever."""
    board = _Board(num_ranks)

    def run(rank: int) -> Result:
        try:
            return work(ThreadRank(rank, num_ranks, board))
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
