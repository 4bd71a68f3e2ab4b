"""An engine's metrics for Prometheus: text format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from memopt.runtime.engine.events import FinishReason
from memopt.runtime.engine.latency_histogram import BUCKET_ENDS, BUCKETS_AN_OCTAVE, LatencySummary
from memopt.runtime.engine.metrics import EngineMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# One series each two octaves is enough for a dashboard; engine.metrics() has the fine ones.
SERIES_ENDS = BUCKET_ENDS[:: 2 * BUCKETS_AN_OCTAVE]


@dataclass(frozen=True, slots=True)
class _Family:
    """A metric and its samples: (what follows the name, value)."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help_text: str
    samples: tuple[tuple[str, float], ...]

    def lines(self, labels: str) -> Iterator[str]:
        yield f"# HELP {self.name} {self.help_text}"
        yield f"# TYPE {self.name} {self.kind}"
        for suffix, value in self.samples:
            name, _, own = suffix.partition("{")
            inner = ",".join(part for part in (labels, own.rstrip("}")) if part)
            yield f"{self.name}{name}{f'{{{inner}}}' if inner else ''} {_number(value)}"


def prometheus_text(metrics: EngineMetrics, labels: Mapping[str, str] | None = None) -> str:
    """One scrape. `labels` (as {"model": "glm-5.2-int4"}) stand on every sample; names as Prometheus allows them."""
    common = ",".join(f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items())
    return "\n".join(line for family in _families(metrics) for line in family.lines(common)) + "\n"


def _families(metrics: EngineMetrics) -> Iterable[_Family]:
    capacity, performance = metrics.capacity, metrics.performance
    yield _gauge("kv_pages", "Pages of the KV cache.", capacity.num_pages)
    yield _gauge("kv_pages_used", "Pages that somebody holds.", capacity.num_used_pages)
    yield _gauge("kv_pages_used_peak", "Most pages that were ever used.", capacity.peak_used_pages)
    yield _gauge("kv_pages_quarantined", "Pages never used again after a mismatch.", capacity.num_quarantined_pages)
    yield _gauge("kv_tokens", "Tokens that running requests have in the KV cache.", capacity.num_tokens)
    yield _gauge("kv_bytes", "Bytes of the KV cache.", capacity.size_bytes)
    yield _gauge("requests_waiting", "Requests in the queue.", performance.num_waiting)
    yield _gauge("requests_running", "Requests with pages.", performance.num_running)
    yield _counter("requests_submitted", "Requests taken in.", performance.num_submitted)
    # A reason that never occurred is 0, not absent: a rate over it is then defined from the start.
    ends = {f'{{reason="{reason}"}}': performance.num_finished.get(reason, 0) for reason in get_args(FinishReason)}
    yield _Family("memopt_requests_finished_total", "counter", "Requests by how they ended.", tuple(ends.items()))
    yield _counter("preemptions", "Requests that lost their pages and wait again.", performance.num_preemptions)
    yield _counter("steps", "Forward passes.", performance.num_steps)
    yield _counter("busy_seconds", "Time spent in steps.", performance.busy_seconds)
    yield _counter("prompt_tokens", "Tokens of prompts that were computed.", performance.num_prompt_tokens)
    yield _counter("generated_tokens", "Tokens that were generated.", performance.num_generated_tokens)
    yield _histogram(
        "time_to_first_token_seconds", "From submission to the first token.", performance.time_to_first_token
    )
    yield _histogram("time_per_token_seconds", "Between a request's tokens.", performance.time_per_token)
    yield _histogram("queue_time_seconds", "From submission to the first step.", performance.queue_time)
    yield _counter("integrity_checks", "Steps whose pages were compared.", metrics.integrity.num_checks)
    yield _counter(
        "integrity_mismatches", "Requests aborted for a page not their own.", metrics.integrity.num_mismatches
    )
    yield _counter("integrity_lost_pages", "Pages freed behind their holder's back.", metrics.integrity.num_lost_pages)
    yield _counter("prefix_lookups", "Requests that looked in the prefix cache.", metrics.reuse.num_lookups)
    yield _counter("prefix_lookup_tokens", "Tokens of their prompts.", metrics.reuse.num_lookup_tokens)
    yield _counter("prefix_hit_tokens", "Tokens that were found.", metrics.reuse.num_hit_tokens)
    yield _counter("draft_tokens", "Tokens guessed and verified.", metrics.speculation.num_drafted)
    yield _counter("draft_tokens_accepted", "Guesses that were right.", metrics.speculation.num_accepted)


def _gauge(name: str, help_text: str, value: float) -> _Family:
    return _Family(f"memopt_{name}", "gauge", help_text, (("", value),))


def _counter(name: str, help_text: str, value: float) -> _Family:
    return _Family(f"memopt_{name}_total", "counter", help_text, (("", value),))


def _histogram(name: str, help_text: str, summary: LatencySummary) -> _Family:
    buckets = [(f'_bucket{{le="{_number(end)}"}}', float(summary.num_up_to(end))) for end in SERIES_ENDS]
    count = summary.num_recorded
    whole = [('_bucket{le="+Inf"}', float(count)), ("_sum", summary.total_seconds), ("_count", float(count))]
    return _Family(f"memopt_{name}", "histogram", help_text, tuple(buckets + whole))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
