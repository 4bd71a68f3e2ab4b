"""Doing many things in k threads: each thread has one buffer of its own, a failure or Ctrl-C stops them all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

# What is read and hashed at a time: 256 KiB to 4 MiB are equally fast, larger buffers fall out of the core's cache.
BUFFER_SIZE_BYTES = 2**20
MAX_DEFAULT_JOBS = 32

Item = TypeVar("Item")


class StoppedError(Exception):
    """Raised inside a worker once another one has failed."""


class StartGate:
    """Holds threads back until all of them are started, and tells them to stop.

    Ctrl-C can break off `Thread.start` (or an executor's `submit`) when the new thread runs already and nobody has
    noted it: without a gate it would work on, and report its progress, after everybody else has ended.
    """

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._is_stopped = False

    def open(self) -> None:
        """Let the threads work."""
        self._opened.set()

    def stop(self) -> None:
        """Make every `enter` and `check` from now on raise StoppedError."""
        self._is_stopped = True
        self._opened.set()

    def enter(self) -> None:
        """Wait until the gate is open. StoppedError."""
        self._opened.wait()
        self.check()

    def check(self) -> None:
        """Call now and then. StoppedError."""
        if self._is_stopped:
            raise StoppedError


def default_jobs() -> int:
    """One thread for each core that this process may use, at most 32: more is faster than any storage."""
    return min(len(os.sched_getaffinity(0)), MAX_DEFAULT_JOBS)


def run_workers(
    items: Iterable[Item], work: Callable[[Item, memoryview, Callable[[], None]], None], num_threads: int
) -> None:
    """Call `work(item, buffer, check)` for every item, in `num_threads` threads (1: in this one).

    `check` raises StoppedError once the work is to stop; call it now and then. The first exception is raised here when
    all threads have ended; so is KeyboardInterrupt.
    """
    if num_threads <= 1:
        buffer = memoryview(bytearray(BUFFER_SIZE_BYTES))
        for item in items:
            work(item, buffer, _go_on)
        return
    queue = iter(items)
    lock = threading.Lock()
    gate = StartGate()
    failures: list[BaseException] = []

    def loop() -> None:
        try:
            gate.enter()
            buffer = memoryview(bytearray(BUFFER_SIZE_BYTES))
            while True:
                gate.check()
                with lock:
                    item = next(queue, gate)
                if item is gate:
                    return
                work(item, buffer, gate.check)  # type: ignore[arg-type]  # the gate is the end, all else are items
        except StoppedError:
            pass
        except BaseException as failure:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(failure)
            gate.stop()

    threads = [threading.Thread(target=loop, name=f"memopt-hash-{n}", daemon=True) for n in range(num_threads)]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        gate.open()
        for thread in threads:
            thread.join()
    finally:
        gate.stop()
        for thread in started:
            thread.join()
    if failures:
        raise failures[0]


def _go_on() -> None:
    return
