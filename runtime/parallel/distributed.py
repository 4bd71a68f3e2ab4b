"""Ranks that talk through torch.distributed: gloo between CPUs, NCCL between GPUs. Nothing is pickled."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from memopt.errors import PeerError, UsageError

# Machines start minutes apart; who is not there by then was not started, or looks elsewhere.
START_TIMEOUT_SECONDS = 600.0
# A message of this many bytes, its length included, goes out in one broadcast instead of two.
FIRST_BLOCK_BYTES = 1024
LENGTH_BYTES = 8
MAX_MESSAGE_BYTES = 64 * 2**20
_TOO_LONG = -1
# Sums are made a slice at a time: every rank's slice lies in memory at once.
SUM_SLICE_ELEMENTS = 2**20

_Result = TypeVar("_Result")


class DistributedCommunicator:
    """The communicator of one process of several; they find each other by the environment that torchrun sets.

    A rank that ends, or does not answer within `timeout_seconds`, makes the others' next call raise PeerError, and all
    calls after it; the process should then end. Rank 0 may therefore not be silent for longer than that. Under NCCL a
    rank that hangs is found by torch's watchdog, which ends the process.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        device: torch.device | str = "cpu",
        timeout_seconds: float = 600.0,
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
    ) -> None:
        """`device`: where the tensors of `sum` and `gather_columns` are. Waits for the other ranks.

        Raises PeerError when they do not come within the shorter of the two times, UsageError for a second communicator
        in a process.
        """
        if dist.is_initialized():
            raise UsageError("this process has a process group already", remedy="close the first communicator")
        self.rank = rank
        self.num_ranks = num_ranks
        self._failure: str | None = None
        self._backend = "gloo" if torch.device(device).type == "cpu" else "cpu:gloo,cuda:nccl"
        start = timedelta(seconds=min(start_timeout_seconds, timeout_seconds))
        self._call(
            "waiting for the other ranks to start", lambda: self._meet(start, timedelta(seconds=timeout_seconds))
        )
        # A group that is left open aborts the interpreter at its end, and with it the exit code.
        atexit.register(self.close)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, written into `values` and returned.

        On the CPU ranks are added in their order, in float32 or better: an element's bits depend on the ranks' elements
        alone. (gloo's all_reduce adds in an order that depends on an element's place: from 3 ranks on, what else is in
        a batch would show.) On a GPU NCCL chooses the order.
        """
        if values.numel() == 0:
            return values
        if values.is_cuda:
            self._call("adding", lambda: dist.all_reduce(values))
            return values
        flat = values.contiguous().view(-1)
        for start in range(0, flat.numel(), SUM_SLICE_ELEMENTS):
            part = flat[start : start + SUM_SLICE_ELEMENTS]
            ranks = self._gather("adding", part)
            is_half = values.dtype in {torch.bfloat16, torch.float16}
            total = ranks[0].float() if is_half else ranks[0]
            for other in ranks[1:]:
                total = total.add_(other)
            part.copy_(total)
        return values if values.is_contiguous() else values.copy_(flat.view(values.shape))

    def maximum(self, values: Tensor) -> Tensor:
        """The maximum over ranks of an integer tensor, written into `values` and returned."""
        if values.is_floating_point():
            raise UsageError(f"maximum is for flags and counts, not {values.dtype}")
        return values if values.numel() == 0 else values.copy_(self._gather("comparing", values).amax(dim=0))

    def gather_columns(self, values: Tensor) -> Tensor:
        """[M, ranks * N] of [M, N], any type: the ranks' columns side by side, rank 0's first."""
        rows, columns = values.shape
        ranks = self._gather("gathering", values) if values.numel() else values.expand(self.num_ranks, rows, columns)
        return ranks.permute(1, 0, 2).reshape(rows, self.num_ranks * columns)

    def from_first(self, values: Tensor) -> Tensor:
        """Rank 0's `values`, written into `values` and returned."""
        if values.numel():
            contiguous = values.contiguous()
            doing = "waiting for rank 0" if self.rank else "telling the others"
            self._call(doing, lambda: dist.broadcast(_bytes_of(contiguous), src=0))
            if contiguous is not values:
                values.copy_(contiguous)
        return values

    def bytes_from_first(self, message: bytes) -> bytes:
        """Rank 0's `message`; what others pass is not looked at.

        Raises UsageError, on every rank, for more than MAX_MESSAGE_BYTES.
        """
        block = torch.zeros(FIRST_BLOCK_BYTES, dtype=torch.uint8)
        room = FIRST_BLOCK_BYTES - LENGTH_BYTES
        if self.rank == 0:
            length = len(message) if len(message) <= MAX_MESSAGE_BYTES else _TOO_LONG
            head = length.to_bytes(LENGTH_BYTES, "little", signed=True) + message[:room]
            block[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        raw = bytes(self.from_first(block).numpy())
        length = int.from_bytes(raw[:LENGTH_BYTES], "little", signed=True)
        if not 0 <= length <= MAX_MESSAGE_BYTES:
            raise UsageError(f"rank 0's message has more than {MAX_MESSAGE_BYTES:,} bytes", remedy="send it in parts")
        if length <= room:
            return raw[LENGTH_BYTES : LENGTH_BYTES + length]
        rest = torch.empty(length - room, dtype=torch.uint8)
        if self.rank == 0:
            rest.copy_(torch.frombuffer(bytearray(message[room:]), dtype=torch.uint8))
        return raw[LENGTH_BYTES:] + bytes(self.from_first(rest).numpy())

    def close(self) -> None:
        """End the group; other ranks that still wait for this one get a PeerError."""
        atexit.unregister(self.close)
        if self._failure is None:
            self._failure = "it is closed"
        if dist.is_initialized():
            dist.destroy_process_group()

    def _meet(self, start: timedelta, silence: timedelta) -> None:
        """Wait for all ranks for `start`, then make the group, whose calls wait for `silence`.

        By init_process_group alone a rank that never comes would be waited for as long as one that works.
        """
        store, _, _ = next(rendezvous("env://", self.rank, self.num_ranks, timeout=start))
        names = [f"memopt/rank-{number}" for number in range(self.num_ranks)]
        store.set(names[self.rank], "here")
        store.wait(names, start)
        store.set_timeout(silence)
        dist.init_process_group(
            self._backend,
            store=store,
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=silence,
        )

    def _gather(self, doing: str, values: Tensor) -> Tensor:
        """[ranks, ...] of a tensor [...] that is not empty."""
        contiguous = values.contiguous()
        gathered = torch.empty((self.num_ranks, *values.shape), dtype=values.dtype, device=values.device)
        parts = [_bytes_of(part) for part in gathered.unbind(0)]
        self._call(doing, lambda: dist.all_gather(parts, _bytes_of(contiguous)))
        return gathered

    def _call(self, doing: str, collective: Callable[[], _Result]) -> _Result:
        if self._failure is not None:
            raise PeerError(f"rank {self.rank} cannot go on: {self._failure}", remedy="start all ranks again")
        try:
            return collective()
        except RuntimeError as problem:
            self._failure = str(problem).splitlines()[0][:300]
            raise PeerError(
                f"rank {self.rank} of {self.num_ranks}, {doing}: another rank ended or is silent: {self._failure}",
                remedy="look for the first rank that failed, then start all of them again",
            ) from problem


def _bytes_of(contiguous: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view: no backend then needs to know its type."""
    return contiguous.view(-1).view(torch.uint8)
