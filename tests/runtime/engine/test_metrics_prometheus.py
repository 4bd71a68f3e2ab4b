"""Metrics as Prometheus reads them: the exact text, and that it is well formed."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_parser import parse

from memopt.runtime.engine.metrics import EngineMetrics, IntegrityMetrics, ReuseMetrics
from memopt.runtime.engine.metrics_recorder import MetricsRecorder
from memopt.runtime.engine.prometheus import CONTENT_TYPE, prometheus_text

GOLDEN_START = """\
# HELP memopt_kv_pages Pages of the KV cache.
# TYPE memopt_kv_pages gauge
memopt_kv_pages 64
# HELP memopt_kv_pages_used Pages that somebody holds.
# TYPE memopt_kv_pages_used gauge
memopt_kv_pages_used 3
# HELP memopt_kv_pages_used_peak Most pages that were ever used.
# TYPE memopt_kv_pages_used_peak gauge
memopt_kv_pages_used_peak 9
"""
GOLDEN_PARTS = [
    """\
# HELP memopt_prefix_hit_tokens_total Tokens that were found.
# TYPE memopt_prefix_hit_tokens_total counter
memopt_prefix_hit_tokens_total 128
""",
    """\
# HELP memopt_requests_finished_total Requests by how they ended.
# TYPE memopt_requests_finished_total counter
memopt_requests_finished_total{reason="stop"} 1
memopt_requests_finished_total{reason="length"} 0
memopt_requests_finished_total{reason="abort"} 0
memopt_requests_finished_total{reason="page_mismatch"} 2
""",
    """\
# HELP memopt_busy_seconds_total Time spent in steps.
# TYPE memopt_busy_seconds_total counter
memopt_busy_seconds_total 0.75
""",
    """\
memopt_time_to_first_token_seconds_bucket{le="0.5"} 1
memopt_time_to_first_token_seconds_bucket{le="2"} 2
memopt_time_to_first_token_seconds_bucket{le="8"} 2
memopt_time_to_first_token_seconds_bucket{le="32"} 2
memopt_time_to_first_token_seconds_bucket{le="128"} 2
memopt_time_to_first_token_seconds_bucket{le="512"} 2
memopt_time_to_first_token_seconds_bucket{le="+Inf"} 3
memopt_time_to_first_token_seconds_sum 2001.25
memopt_time_to_first_token_seconds_count 3
""",
    """\
# HELP memopt_integrity_mismatches_total Requests aborted for a page not their own.
# TYPE memopt_integrity_mismatches_total counter
memopt_integrity_mismatches_total 2
# HELP memopt_integrity_lost_pages_total Pages freed behind their holder's back.
# TYPE memopt_integrity_lost_pages_total counter
memopt_integrity_lost_pages_total 3
""",
]


@pytest.fixture
def metrics() -> EngineMetrics:
    recorder = MetricsRecorder()
    recorder.record_step(0.75, 36)
    for seconds in (0.5, 0.75, 2000.0):
        recorder.record_token(seconds, is_first=True)
    for reason in ("stop", "page_mismatch", "page_mismatch"):
        recorder.record_end(reason)  # type: ignore[arg-type]
    return recorder.metrics(
        num_pages=64,
        num_used_pages=3,
        peak_used_pages=9,
        num_quarantined_pages=1,
        num_tokens=130,
        size_bytes=4096,
        num_waiting=2,
        num_running=1,
        integrity=IntegrityMetrics(7, 2, 3),
        reuse=ReuseMetrics(5, 640, 128),
    )


def test_golden_text(metrics: EngineMetrics) -> None:
    text = prometheus_text(metrics)
    assert text.startswith(GOLDEN_START)
    for part in GOLDEN_PARTS:
        assert part in text


def test_a_strict_parser_reads_it(metrics: EngineMetrics) -> None:
    families = parse(prometheus_text(metrics))
    assert len(families) == 26
    for name, family in families.items():
        assert name.startswith("memopt_")
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert name.endswith("_seconds") == (family.kind == "histogram"), name
        assert family.help_text.endswith(".")
    assert families["memopt_kv_bytes"].samples == [("", {}, 4096.0)]


def test_every_metric_is_documented(metrics: EngineMetrics) -> None:
    page = (Path(__file__).parents[3] / "docs" / "runtime.md").read_text()
    assert [name for name in parse(prometheus_text(metrics)) if f"`{name}`" not in page] == []


def test_labels_stand_on_every_sample(metrics: EngineMetrics) -> None:
    labels = {"model": 'a"b\\c\nd', "rank": "0"}
    for family in parse(prometheus_text(metrics, labels)).values():
        for _, found, _ in family.samples:
            assert {name: found[name] for name in labels} == labels
    reasons = parse(prometheus_text(metrics, labels))["memopt_requests_finished_total"].samples
    assert {found["reason"] for _, found, _ in reasons} >= {"stop", "page_mismatch"}


def test_the_version_that_a_scraper_is_told() -> None:
    assert "version=0.0.4" in CONTENT_TYPE
