"""Durations counted in buckets: constant memory, under a microsecond a duration, quantiles to within a bucket."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

SHORTEST_SECONDS = 2.0**-17
LONGEST_SECONDS = 2.0**10
# Each bucket ends at 2 ** (1/8) times the one before it: a quantile is at most 9 % too long or too short.
BUCKETS_AN_OCTAVE = 8
NUM_OCTAVES = round(math.log2(LONGEST_SECONDS / SHORTEST_SECONDS))
# 7.6 microseconds to 17 minutes; longer ones are counted in one more bucket.
BUCKET_ENDS = tuple(
    SHORTEST_SECONDS * 2.0 ** (place / BUCKETS_AN_OCTAVE) for place in range(NUM_OCTAVES * BUCKETS_AN_OCTAVE + 1)
)


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """`counts`: durations by bucket, each up to its BUCKET_ENDS and above the one before, then those above all."""

    counts: tuple[int, ...]
    total_seconds: float
    longest_seconds: float

    @property
    def num_recorded(self) -> int:
        """How many durations."""
        return sum(self.counts)

    @property
    def mean_seconds(self) -> float:
        """Their mean; 0 without any."""
        return self.total_seconds / self.num_recorded if self.num_recorded else 0.0

    @property
    def median_seconds(self) -> float:
        """Half of them are shorter."""
        return self.quantile(0.5)

    @property
    def p90_seconds(self) -> float:
        """Nine in ten are shorter."""
        return self.quantile(0.9)

    @property
    def p99_seconds(self) -> float:
        """99 in a hundred are shorter."""
        return self.quantile(0.99)

    def quantile(self, share: float) -> float:
        """The end of the bucket that holds that quantile, or the longest duration if that is shorter; 0 without any.

        Never below the true quantile (the smallest duration that at least `share` of them do not exceed), and at most
        9 % above it between SHORTEST_SECONDS and LONGEST_SECONDS.
        """
        num_needed = max(1, math.ceil(share * self.num_recorded))
        num_seen = 0
        for end, count in zip(BUCKET_ENDS, self.counts, strict=False):
            num_seen += count
            if num_seen >= num_needed:
                return min(end, self.longest_seconds)
        return self.longest_seconds

    def num_up_to(self, seconds: float) -> int:
        """How many are at most `seconds`, which must be one of BUCKET_ENDS."""
        return sum(self.counts[: BUCKET_ENDS.index(seconds) + 1])


@dataclass(slots=True)
class LatencyHistogram:
    """What is still counted."""

    _counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_ENDS) + 1))
    _total_seconds: float = 0.0
    _longest_seconds: float = 0.0

    def record(self, seconds: float) -> None:
        """Count one duration; one below 0 (a clock that was set back) counts as 0."""
        seconds = max(seconds, 0.0)
        self._counts[bisect_left(BUCKET_ENDS, seconds)] += 1
        self._total_seconds += seconds
        if seconds > self._longest_seconds:
            self._longest_seconds = seconds

    def summary(self) -> LatencySummary:
        """What was counted until now."""
        return LatencySummary(tuple(self._counts), self._total_seconds, self._longest_seconds)
