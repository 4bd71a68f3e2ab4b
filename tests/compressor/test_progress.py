"""Progress adds up, whatever the threads and the resumed work."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.compressor import progress as progress_module
from memopt.compressor.progress import Progress, ProgressMeter


class Clock:
    """A clock that moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    hand = Clock()
    monkeypatch.setattr(progress_module.time, "monotonic", hand.monotonic)
    return hand


def _meter(seen: list[Progress], **options: float) -> ProgressMeter:
    return ProgressMeter(
        seen.append, 1000, 4, **({"resumed_bytes": 200, "num_resumed_units": 1, "interval_seconds": 0.1} | options)
    )  # type: ignore[arg-type]


def test_rate_counts_this_run_alone(clock: Clock) -> None:
    seen: list[Progress] = []
    meter = _meter(seen)
    clock.now += 2.0
    meter.advance(100, "b")
    assert seen == [Progress(300, 1000, 1, 1, 4, "b", 50.0, 14.0)]


def test_calls_are_at_most_one_an_interval_but_each_finished_unit_is_told(clock: Clock) -> None:
    seen: list[Progress] = []
    meter = _meter(seen)
    for _ in range(10):
        clock.now += 0.03
        meter.advance(10, "b")
    assert [progress.done_bytes for progress in seen] == [240, 280]
    meter.finish_unit("b")
    assert (seen[-1].num_done_units, seen[-1].done_bytes) == (2, 300)


def test_no_time_left_is_known_before_the_first_byte(clock: Clock) -> None:
    seen: list[Progress] = []
    meter = _meter(seen, resumed_bytes=0)
    clock.now += 1
    meter.finish_unit("empty")
    assert (seen[0].rate_bytes_per_second, seen[0].remaining_seconds) == (0.0, None)


def test_without_a_callback_nothing_happens() -> None:
    meter = ProgressMeter(None, 10, 1, resumed_bytes=0, num_resumed_units=0)
    meter.advance(10, "a")
    meter.finish_unit("a")


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=20), min_size=1, max_size=6))
def test_threads_lose_nothing(work: list[list[int]]) -> None:
    seen: list[Progress] = []
    total = sum(map(sum, work))
    meter = ProgressMeter(seen.append, total, len(work), resumed_bytes=0, num_resumed_units=0, interval_seconds=0.0)

    def run(number: int) -> None:
        for num_bytes in work[number]:
            meter.advance(num_bytes, str(number))
        meter.finish_unit(str(number))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (seen[-1].done_bytes, seen[-1].num_done_units) == (total, len(work))
    assert all(before.done_bytes <= after.done_bytes for before, after in pairwise(seen))
