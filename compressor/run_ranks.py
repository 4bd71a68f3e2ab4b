"""The processes that make one release together, as torchrun starts them: one output folder, seen by all of them.

Rank 0 has the folder's lock, the small files, the ledger and the signature; every rank calibrates, and writes units.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memopt.runtime.parallel.communicator import Communicator

# A rank may wait as long as another one solves; a rank that ended is noticed at once, its connections close.
TIMEOUT_SECONDS = 7.0 * 24 * 3600


class RunRanks:
    """This process among `num_ranks`. Without a communicator it is alone, and every call returns at once."""

    def __init__(self, communicator: Communicator | None = None, local_rank: int = 0) -> None:
        self.communicator = communicator
        self.rank = 0 if communicator is None else communicator.rank
        self.num_ranks = 1 if communicator is None else communicator.num_ranks
        self.local_rank = local_rank

    @property
    def is_first(self) -> bool:
        """Whether it is rank 0."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks; PeerError when one has ended."""
        if self.communicator is not None and self.num_ranks > 1:
            import torch

            self.communicator.maximum(torch.zeros(1, dtype=torch.int64))

    def from_first(self, message: bytes) -> bytes:
        """Rank 0's `message`, for all; PeerError when one has ended."""
        return message if self.communicator is None else self.communicator.bytes_from_first(message)


def is_first_process() -> bool:
    """Whether this process is the one that reports: rank 0, or alone."""
    return os.environ.get("RANK", "0") == "0"


def ranks_from_environment() -> RunRanks:
    """The ranks that torchrun started, once all have come; one rank where it did not. UsageError, PeerError."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return RunRanks()
    from memopt.runtime.parallel.launch import rank_environment

    found = rank_environment(os.environ)
    if found is None or found.num_ranks == 1:
        return RunRanks()
    from memopt.runtime.parallel.distributed import DistributedCommunicator

    communicator = DistributedCommunicator(found.rank, found.num_ranks, timeout_seconds=TIMEOUT_SECONDS)
    return RunRanks(communicator, found.local_rank)
