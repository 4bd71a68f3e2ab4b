"""What a running job tells its caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["write", "check", "calibrate"]
WRITE_STAGE: Stage = "write"
# What an earlier run left is read again.
CHECK_STAGE: Stage = "check"
# Layers run over calibration data before anything is written.
CALIBRATE_STAGE: Stage = "calibrate"


@dataclass(frozen=True)
class Progress:
    """A moment of a run. `num_resumed_units` were finished by an earlier run.

    Bytes are source bytes in stages "write" and "calibrate"; in stage "check", all that is read again: of the source
    and of the output. `rate_bytes_per_second` counts this run's work alone; `remaining_seconds` is None until there is
    a rate.
    """

    done_bytes: int
    total_bytes: int
    num_done_units: int
    num_resumed_units: int
    num_units: int
    current_unit: str
    rate_bytes_per_second: float
    remaining_seconds: float | None
    stage: Stage = WRITE_STAGE


ProgressCallback = Callable[[Progress], None]
# Stage ("download" or "verify"), file, bytes done and bytes in all.
DownloadCallback = Callable[[str, str, int, int], None]


class ProgressMeter:
    """Adds up work from several threads and calls back at most every `interval_seconds`."""

    def __init__(
        self,
        callback: ProgressCallback | None,
        total_bytes: int,
        num_units: int,
        *,
        resumed_bytes: int,
        num_resumed_units: int,
        stage: Stage = WRITE_STAGE,
        interval_seconds: float = 0.1,
    ) -> None:
        self._callback = callback
        self._total_bytes = total_bytes
        self._num_units = num_units
        self._resumed_bytes = resumed_bytes
        self._num_resumed_units = num_resumed_units
        self._stage: Stage = stage
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._started = self._last_call = time.monotonic()
        self._done_bytes = 0
        self._num_done_units = num_resumed_units
        self._current_unit = ""

    def advance(self, num_bytes: int, unit: str) -> None:
        """Count `num_bytes` of source done for `unit`."""
        with self._lock:
            self._done_bytes += num_bytes
            self._current_unit = unit
            now = time.monotonic()
            if self._callback is not None and now - self._last_call >= self._interval_seconds:
                self._last_call = now
                self._callback(self._snapshot(now))

    def finish_unit(self, unit: str) -> None:
        """Count one finished unit, and say so at once."""
        with self._lock:
            self._num_done_units += 1
            self._current_unit = unit
            if self._callback is not None:
                self._last_call = time.monotonic()
                self._callback(self._snapshot(self._last_call))

    def _snapshot(self, now: float) -> Progress:
        rate = self._done_bytes / max(now - self._started, 1e-9)
        left = self._total_bytes - self._resumed_bytes - self._done_bytes
        return Progress(
            self._resumed_bytes + self._done_bytes,
            self._total_bytes,
            self._num_done_units,
            self._num_resumed_units,
            self._num_units,
            self._current_unit,
            rate,
            left / rate if rate else None,
            self._stage,
        )
