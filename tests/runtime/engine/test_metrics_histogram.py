"""Durations in buckets: nothing lost, quantiles within a bucket."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.runtime.engine.latency_histogram import (
    BUCKET_ENDS,
    LONGEST_SECONDS,
    SHORTEST_SECONDS,
    LatencyHistogram,
    LatencySummary,
)


def summary_of(durations: list[float]) -> LatencySummary:
    histogram = LatencyHistogram()
    for seconds in durations:
        histogram.record(seconds)
    return histogram.summary()


def test_buckets() -> None:
    assert BUCKET_ENDS[0] == SHORTEST_SECONDS
    assert BUCKET_ENDS[-1] == LONGEST_SECONDS
    assert all(end / start < 1.0906 for start, end in pairwise(BUCKET_ENDS))


@given(
    durations=st.lists(st.floats(SHORTEST_SECONDS, LONGEST_SECONDS), min_size=1, max_size=40),
    share=st.floats(0.01, 1),
)
@settings(max_examples=200, deadline=None)
def test_a_quantile_is_never_below_and_at_most_nine_percent_above(durations: list[float], share: float) -> None:
    true = sorted(durations)[math.ceil(share * len(durations)) - 1]
    assert true <= summary_of(durations).quantile(share) <= 1.0906 * true


@given(durations=st.lists(st.floats(0, 5000), max_size=30))
@settings(max_examples=100, deadline=None)
def test_all_are_counted(durations: list[float]) -> None:
    summary = summary_of(durations)
    assert summary.num_recorded == len(durations)
    assert summary.total_seconds == pytest.approx(sum(durations))
    assert summary.longest_seconds == max(durations, default=0.0)
    assert summary.num_up_to(BUCKET_ENDS[90]) == sum(seconds <= BUCKET_ENDS[90] for seconds in durations)


def test_the_ends_of_the_scale() -> None:
    summary = summary_of([-1.0, 0.0, 1e-9, 5000.0])
    assert summary.median_seconds == SHORTEST_SECONDS
    assert summary.p99_seconds == 5000.0
    assert summary_of([]).median_seconds == 0.0
    assert summary_of([]).mean_seconds == 0.0
    assert summary_of([0.5]).p90_seconds == 0.5
