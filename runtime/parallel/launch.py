"""Which rank this process is: read from the environment that torchrun sets, and from nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from memopt.errors import UsageError
from memopt.manifests.rank_folders import MAX_RANKS
from memopt.runtime.parallel.communicator import Communicator, SingleRank

# What torchrun sets for every process (torch docs, "Torchrun: environment variables").
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
_ALL = (*_NUMBERS, "MASTER_ADDR")
_MAX_PORT = 2**16 - 1


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """`rank` of `num_ranks` in all, `local_rank` on this machine."""

    rank: int
    num_ranks: int
    local_rank: int


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """What torchrun says of this process; None if it says nothing. Raises UsageError for half of it or for nonsense."""
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ]
    if not given:
        return None
    missing = [name for name in _ALL if not environ.get(name)]
    if missing:
        raise UsageError(
            f"{', '.join(given)} set, but not {', '.join(missing)}",
            remedy="start the ranks with torchrun, or unset them",
        )
    rank, num_ranks, local_rank, port = (_number(name, environ[name]) for name in _NUMBERS)
    for name, value, end in (
        ("WORLD_SIZE", num_ranks - 1, MAX_RANKS),
        ("RANK", rank, num_ranks),
        ("LOCAL_RANK", local_rank, num_ranks),
        ("MASTER_PORT", port - 1, _MAX_PORT),
    ):
        if not 0 <= value < end:
            raise UsageError(f"{name} is {environ[name]} and WORLD_SIZE {num_ranks}", remedy="start with torchrun")
    return RankEnvironment(rank, num_ranks, local_rank)


def communicator_from_environment(
    tensor_parallel: int,
    device: torch.device | str = "cpu",
    environ: Mapping[str, str] | None = None,
    *,
    timeout_seconds: float = 600.0,
) -> Communicator:
    """The communicator of this process, once all ranks have come: SingleRank for one, else torch.distributed's.

    `device` "cuda" without a number becomes this machine's GPU LOCAL_RANK. Raises UsageError when torchrun did not
    start `tensor_parallel` processes, PeerError when they do not find each other.
    """
    if not 1 <= tensor_parallel <= MAX_RANKS:
        raise UsageError(f"tensor_parallel is {tensor_parallel}, it must be within 1 and {MAX_RANKS}")
    found = rank_environment(os.environ if environ is None else environ)
    num_ranks = 1 if found is None else found.num_ranks
    if num_ranks != tensor_parallel:
        started = "torchrun did not start this process" if found is None else f"torchrun started {num_ranks} processes"
        raise UsageError(
            f"tensor_parallel is {tensor_parallel}, but {started}",
            remedy=f"start torchrun --standalone --nproc-per-node {tensor_parallel} --no-python memopt generate ...",
        )
    if found is None or num_ranks == 1:
        return SingleRank()
    from memopt.runtime.parallel.distributed import DistributedCommunicator

    if torch.device(device).type == "cuda":
        torch.cuda.set_device(found.local_rank)
    return DistributedCommunicator(found.rank, num_ranks, device=device, timeout_seconds=timeout_seconds)


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise UsageError(f"{name} is {text[:40]!r}, not a number", remedy="start the ranks with torchrun")
    return int(text)
