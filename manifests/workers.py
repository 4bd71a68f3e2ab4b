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
    stop = threading.Event()
    failures: list[BaseException] = []

    def check() -> None:
        if stop.is_set():
            raise StoppedError

    def loop() -> None:
        buffer = memoryview(bytearray(BUFFER_SIZE_BYTES))
        try:
            while not stop.is_set():
                with lock:
                    item = next(queue, stop)
                if item is stop:
                    return
                work(item, buffer, check)  # type: ignore[arg-type]  # `stop` is the end, all else are items
        except StoppedError:
            pass
        except BaseException as failure:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(failure)
            stop.set()

    threads = [threading.Thread(target=loop, name=f"memopt-hash-{n}", daemon=True) for n in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]


def _go_on() -> None:
    return
