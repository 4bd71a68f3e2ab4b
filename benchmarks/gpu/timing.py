"""Medians of cold runs: a flushed L2 before each, CUDA events around each, the host ahead of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

WARM_UP_RUNS = 3
MIN_RUNS = 5
MAX_RUNS = 50
SECONDS_A_CASE = 1.5
# Much more than any L2 (50 MiB on Hopper, 126 MiB on Blackwell). Its 0.2 ms to fill also let the host queue a run of
# several launches before the device reaches the first event: a launch is not part of a measured time.
FLUSH_BYTES = 1 << 30
POISON_BYTE = 0xA5
BITS_PER_BYTE = 8


class Stopwatch(Protocol):
    """Times runs on a device."""

    def seconds(self, run: Callable[[], None], num_runs: int) -> list[float]:
        """Device seconds of each of `num_runs` cold runs."""

    def wall_seconds(self, run: Callable[[], None]) -> float:
        """Seconds of one run with everything around it, until the device is idle."""


@dataclass(frozen=True)
class EventStopwatch:
    """CUDA events around each run, after `flush` was overwritten. What the two events cost themselves is included."""

    flush: torch.Tensor

    def seconds(self, run: Callable[[], None], num_runs: int) -> list[float]:
        """Device seconds of each of `num_runs` runs, each after a flush of the L2."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(num_runs)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(num_runs)]
        for start, end in zip(starts, ends, strict=True):
            self.flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]

    def wall_seconds(self, run: Callable[[], None]) -> float:
        """Seconds of one flush and run, host included."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.flush.zero_()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - started


def cuda_stopwatch() -> EventStopwatch:
    """A stopwatch for the current CUDA device, with its own buffer of `FLUSH_BYTES`."""
    return EventStopwatch(torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda"))


def num_runs_for(wall_seconds: float, seconds_a_case: float = SECONDS_A_CASE) -> int:
    """How many runs of `wall_seconds` each fit into a case's time, within MIN_RUNS..MAX_RUNS."""
    return max(MIN_RUNS, min(MAX_RUNS, int(seconds_a_case / max(wall_seconds, 1e-9))))


def median_seconds(run: Callable[[], None], stopwatch: Stopwatch) -> float:
    """Median device seconds of cold runs, after warm-up runs (the first compiles)."""
    for _ in range(WARM_UP_RUNS):
        run()
    return statistics.median(stopwatch.seconds(run, num_runs_for(stopwatch.wall_seconds(run))))


def poison(tensor: torch.Tensor) -> None:
    """Fills any tensor with what no kernel writes by chance: NaN, or the byte 0xA5 throughout."""
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        info = torch.iinfo(tensor.dtype)
        pattern = int.from_bytes(bytes([POISON_BYTE]) * (info.bits // BITS_PER_BYTE), "little")
        tensor.fill_(pattern if pattern <= info.max else pattern - (1 << info.bits))
