"""What was recorded is what is told, and recording costs microseconds."""

from __future__ import annotations

import json
import time

import pytest
from page_reading_model import greedy, new_core, run

from memopt.runtime.engine.metrics import EngineMetrics, IntegrityMetrics, ReuseMetrics
from memopt.runtime.engine.metrics_recorder import MetricsRecorder


def metrics_of(recorder: MetricsRecorder, **changes: int) -> EngineMetrics:
    moment = {
        "num_pages": 64,
        "num_used_pages": 3,
        "peak_used_pages": 9,
        "num_quarantined_pages": 1,
        "num_tokens": 130,
        "size_bytes": 4096,
        "num_waiting": 2,
        "num_running": 1,
    }
    integrity, reuse = IntegrityMetrics(7, 1, 2), ReuseMetrics(2, 110, 64)
    return recorder.metrics(**{**moment, **changes}, integrity=integrity, reuse=reuse)


def test_counts() -> None:
    recorder = MetricsRecorder()
    for _ in range(3):
        recorder.record_submission()
    recorder.record_start(0.25)
    recorder.record_step(0.5, 36)
    recorder.record_token(0.75, is_first=True)
    recorder.record_step(0.25, 0)
    recorder.record_token(0.125, is_first=False)
    recorder.record_token(0.0, is_first=False)
    recorder.record_drafts(4, 3)
    recorder.record_preemptions(2)
    recorder.record_end("stop")
    recorder.record_end("stop")
    recorder.record_end("abort")
    metrics = metrics_of(recorder)

    capacity = metrics.capacity
    assert (capacity.num_pages, capacity.num_used_pages, capacity.peak_used_pages) == (64, 3, 9)
    assert (capacity.num_quarantined_pages, capacity.num_tokens, capacity.size_bytes) == (1, 130, 4096)
    performance = metrics.performance
    assert (performance.num_steps, performance.busy_seconds) == (2, 0.75)
    assert (performance.num_prompt_tokens, performance.num_generated_tokens) == (36, 3)
    assert performance.generated_tokens_per_second == 4.0
    assert (performance.num_submitted, performance.num_waiting, performance.num_running) == (3, 2, 1)
    assert (performance.num_preemptions, performance.num_finished) == (2, {"stop": 2, "abort": 1})
    assert performance.time_to_first_token.longest_seconds == 0.75
    assert performance.time_per_token.num_recorded == 2
    assert performance.queue_time.mean_seconds == 0.25
    assert metrics.integrity == IntegrityMetrics(num_checks=7, num_mismatches=1, num_lost_pages=2)
    reuse = metrics.reuse
    assert (reuse.num_lookups, reuse.num_lookup_tokens, reuse.num_hit_tokens) == (2, 110, 64)
    assert metrics.speculation.acceptance == 0.75


def test_the_peak_is_that_of_a_request_that_ends_with_its_first_step() -> None:
    core = new_core()
    core.submit(list(range(65)), greedy(1))
    assert len(run(core)) == 1
    capacity = core.metrics().capacity
    assert (capacity.num_used_pages, capacity.peak_used_pages) == (0, 2)


def test_an_engine_that_did_nothing() -> None:
    metrics = metrics_of(MetricsRecorder())
    assert metrics.performance.generated_tokens_per_second == 0.0
    assert metrics.speculation.acceptance == 0.0
    assert metrics.performance.num_finished == {}


def test_what_was_told_does_not_change_later() -> None:
    recorder = MetricsRecorder()
    before = metrics_of(recorder)
    recorder.record_end("length")
    recorder.record_token(1.0, is_first=True)
    assert before.performance.num_finished == {}
    assert before.performance.time_to_first_token.num_recorded == 0


def test_fields_are_plain_json_values() -> None:
    recorder = MetricsRecorder()
    recorder.record_token(0.5, is_first=True)
    fields = json.loads(json.dumps(metrics_of(recorder).fields()))
    assert fields["capacity"]["num_pages"] == 64
    assert fields["performance"]["time_to_first_token"]["count"] == 1
    assert fields["performance"]["time_to_first_token"]["p99_seconds"] == pytest.approx(0.5)
    assert set(fields) == {"capacity", "performance", "integrity", "reuse", "speculation"}


def test_recording_a_step_of_sixteen_requests_costs_little() -> None:
    recorder = MetricsRecorder()
    best = float("inf")
    for _ in range(50):
        start = time.thread_time()
        recorder.record_step(0.01, 0)
        for _ in range(16):
            recorder.record_token(0.01, is_first=False)
        best = min(best, time.thread_time() - start)
    # Measured: 7 microseconds; a step takes milliseconds.
    assert best < 2e-4
