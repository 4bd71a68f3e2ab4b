"""A few transfers at a time, and how far they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Literal, TypeVar

from memopt.compressor.checkpoint.hub_types import HubFile, HubProgress, ProgressCallback
from memopt.manifests.workers import StartGate

T = TypeVar("T")

Stage = Literal["download", "verify"]
# A callback for each 64 KiB chunk of 700 GB would cost more than the hashing.
_REPORT_EVERY_BYTES = 4 * 2**20


class ProgressMeter:
    """Adds up the progress of one batch and reports it, from any thread, one call at a time."""

    def __init__(self, callback: ProgressCallback | None, files: Sequence[HubFile]) -> None:
        self._callback = callback
        self._total_size = sum(file.size_bytes for file in files)
        self._done: dict[tuple[Stage, str], int] = {}
        self._totals: dict[Stage, int] = {"download": 0, "verify": 0}
        self._lock = threading.Lock()

    def ticker(self, stage: Stage, file: HubFile) -> Callable[[int], None]:
        """A function to be told how many bytes of `file` are done."""
        if self._callback is None:
            return lambda _: None
        callback, reported = self._callback, 0

        def tick(done: int) -> None:
            nonlocal reported
            # Fewer bytes than before means that the server made the transfer start again.
            if reported <= done < min(reported + _REPORT_EVERY_BYTES, file.size_bytes):
                return
            reported = done
            with self._lock:
                self._totals[stage] += done - self._done.get((stage, file.path), 0)
                self._done[(stage, file.path)] = done
                callback(HubProgress(stage, file.path, done, file.size_bytes, self._totals[stage], self._total_size))

        return tick


def run_batch(
    work: Callable[[HubFile], T], files: Sequence[HubFile], workers: int, stop: threading.Event | None
) -> list[T]:
    """`work` on every file, up to `workers` at a time; the first failure sets `stop` and is raised.

    Results come in the order of `files`.
    """
    gate = StartGate()

    def run(file: HubFile) -> T:
        gate.enter()
        return work(file)

    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="memopt-hub") as pool:
        futures: list[Future[T]] = []
        try:
            futures += [pool.submit(run, file) for file in files]
            gate.open()
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            # The one that failed first, not one that was stopped because of it.
            failed = [future for future in futures if future in done and future.exception() is not None]
            if failed:
                failed[0].result()
        except BaseException:
            # Ctrl-C too: the pool waits for its threads, so they must be told to end.
            if stop is not None:
                stop.set()
            gate.stop()
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]
