"""What an engine tells of itself: capacity, performance, integrity, reuse, speculation. All since it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memopt.runtime.engine.events import FinishReason
from memopt.runtime.engine.latency_histogram import LatencySummary


@dataclass(frozen=True, slots=True)
class CapacityMetrics:
    """The KV cache now: `num_pages` that exist; `num_used_pages` that somebody holds and that are not quarantined.

    `peak_used_pages`: the most that were ever used. `num_tokens`: tokens whose keys running requests have stored.
    """

    num_pages: int
    num_used_pages: int
    peak_used_pages: int
    num_quarantined_pages: int
    num_tokens: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PerformanceMetrics:
    """Latencies by request and token; counts of rows that were computed.

    `time_to_first_token`: from submission. `time_per_token`: between a request's tokens. `queue_time`: from submission
    to the first step with it. `busy_seconds`: spent in steps. `num_prompt_tokens` counts what was computed for prompts,
    a preempted request's again.
    """

    num_steps: int
    busy_seconds: float
    num_prompt_tokens: int
    num_generated_tokens: int
    num_submitted: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_finished: Mapping[FinishReason, int]
    time_to_first_token: LatencySummary
    time_per_token: LatencySummary
    queue_time: LatencySummary

    @property
    def generated_tokens_per_second(self) -> float:
        """Generated tokens over the seconds in which the engine worked at all; 0 before it did."""
        return self.num_generated_tokens / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(frozen=True, slots=True)
class IntegrityMetrics:
    """`num_checks`: steps whose pages were compared; `num_mismatches`: requests that did not pass, and were aborted.

    `num_lost_pages`: pages that were freed behind their holder's back, found when it gave them back; quarantined.
    """

    num_checks: int
    num_mismatches: int
    num_lost_pages: int


@dataclass(frozen=True, slots=True)
class ReuseMetrics:
    """The prefix cache: requests that looked, tokens of their prompts, and how many of those were there."""

    num_lookups: int
    num_lookup_tokens: int
    num_hit_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """Tokens that were guessed and verified, and guesses that were right."""

    num_drafted: int
    num_accepted: int

    @property
    def acceptance(self) -> float:
        """Share of guesses that were right; 0 without any."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One engine at one time. engine/prometheus.py writes it for a scraper."""

    capacity: CapacityMetrics
    performance: PerformanceMetrics
    integrity: IntegrityMetrics
    reuse: ReuseMetrics
    speculation: SpeculationMetrics

    def fields(self) -> dict[str, Any]:
        """Plain JSON values, latencies as count, mean, median, p90, p99 and longest."""
        performance = self.performance
        return {
            "capacity": _numbers(self.capacity),
            "performance": {
                **_numbers(performance),
                "generated_tokens_per_second": performance.generated_tokens_per_second,
                "num_finished": dict(performance.num_finished),
                "time_to_first_token": _latency(performance.time_to_first_token),
                "time_per_token": _latency(performance.time_per_token),
                "queue_time": _latency(performance.queue_time),
            },
            "integrity": _numbers(self.integrity),
            "reuse": _numbers(self.reuse),
            "speculation": {**_numbers(self.speculation), "acceptance": self.speculation.acceptance},
        }


def _numbers(metrics: Any) -> dict[str, int | float]:
    values = {name: getattr(metrics, name) for name in metrics.__dataclass_fields__}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _latency(summary: LatencySummary) -> dict[str, int | float]:
    return {
        "count": summary.num_recorded,
        "mean_seconds": summary.mean_seconds,
        "median_seconds": summary.median_seconds,
        "p90_seconds": summary.p90_seconds,
        "p99_seconds": summary.p99_seconds,
        "longest_seconds": summary.longest_seconds,
    }
