"""Counts what an engine does, while it does it: some microseconds a step."""

from __future__ import annotations

from memopt.runtime.engine.events import FinishReason
from memopt.runtime.engine.latency_histogram import LatencyHistogram
from memopt.runtime.engine.metrics import (
    CapacityMetrics,
    EngineMetrics,
    IntegrityMetrics,
    PerformanceMetrics,
    ReuseMetrics,
    SpeculationMetrics,
)


class MetricsRecorder:
    """Told by the engine, in its one thread. Times are differences of time.monotonic()."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._busy_seconds = 0.0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_submitted = 0
        self._num_preemptions = 0
        self._num_finished: dict[FinishReason, int] = {}
        self._time_to_first_token = LatencyHistogram()
        self._time_per_token = LatencyHistogram()
        self._queue_time = LatencyHistogram()
        self._num_drafted = 0
        self._num_accepted = 0

    def record_submission(self) -> None:
        """A request was taken in."""
        self._num_submitted += 1

    def record_start(self, queue_seconds: float) -> None:
        """A request is in a step for the first time."""
        self._queue_time.record(queue_seconds)

    def record_token(self, seconds: float, *, is_first: bool) -> None:
        """A token came `seconds` after the request's last one, or, the first, after its submission."""
        self._num_generated_tokens += 1
        (self._time_to_first_token if is_first else self._time_per_token).record(seconds)

    def record_end(self, reason: FinishReason) -> None:
        """A request ended."""
        self._num_finished[reason] = self._num_finished.get(reason, 0) + 1

    def record_preemptions(self, count: int) -> None:
        """So many running requests lost their pages to older ones, and wait again."""
        self._num_preemptions += count

    def record_step(self, seconds: float, num_prompt_rows: int) -> None:
        """A step ended. `num_prompt_rows`: tokens of prompts that it computed."""
        self._num_steps += 1
        self._busy_seconds += seconds
        self._num_prompt_tokens += num_prompt_rows

    def record_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Guesses of a step were verified."""
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted

    def metrics(
        self,
        *,
        num_pages: int,
        num_used_pages: int,
        peak_used_pages: int,
        num_quarantined_pages: int,
        num_tokens: int,
        size_bytes: int,
        num_waiting: int,
        num_running: int,
        integrity: IntegrityMetrics,
        reuse: ReuseMetrics,
    ) -> EngineMetrics:
        """All that was counted, with what only the engine knows of this moment (fields of EngineMetrics)."""
        return EngineMetrics(
            CapacityMetrics(num_pages, num_used_pages, peak_used_pages, num_quarantined_pages, num_tokens, size_bytes),
            PerformanceMetrics(
                self._num_steps,
                self._busy_seconds,
                self._num_prompt_tokens,
                self._num_generated_tokens,
                self._num_submitted,
                num_waiting,
                num_running,
                self._num_preemptions,
                dict(self._num_finished),
                self._time_to_first_token.summary(),
                self._time_per_token.summary(),
                self._queue_time.summary(),
            ),
            integrity,
            reuse,
            SpeculationMetrics(self._num_drafted, self._num_accepted),
        )
