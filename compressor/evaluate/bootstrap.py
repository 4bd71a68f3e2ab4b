"""Intervals by resampling whole documents, whose tokens depend on each other (Efron 1979; Koehn, EMNLP 2004)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 2_000

Array = np.ndarray[Any, np.dtype[np.float64]]
Weights = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure on all data, and the ends of its CONFIDENCE interval (percentiles of the resamples)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Resampling:
    """`counts` int64 [num_resamples, units]: how often each unit is in each resample."""

    counts: Weights

    @property
    def num_resamples(self) -> int:
        """Rows of `counts`."""
        return len(self.counts)


def resampling(num_units: int, seed: int, num_resamples: int = NUM_RESAMPLES) -> Resampling:
    """Draws of `num_units` units with replacement, the same for the same seed (numpy's PCG64)."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return Resampling(generator.multinomial(num_units, np.full(num_units, 1 / num_units), size=num_resamples))


def sums_by_unit(values: Array, unit: Weights, num_units: int) -> Array:
    """float64 [num_units]: sums of `values` [N] over the predictions of each unit; `unit` [N] counts from zero."""
    sums: Array = np.bincount(unit, weights=values.astype(np.float64), minlength=num_units).astype(np.float64)
    return sums


def mean_interval(sums: Array, num_tokens: Array, draws: Resampling, *, is_exponential: bool = False) -> Interval:
    """Mean per token and its interval, from sums and tokens of each unit [units]; exp of all three if asked for.

    One unit gives an interval without width: nothing is known of others.
    """
    tail = 100 * (1 - CONFIDENCE) / 2
    means = (draws.counts @ sums) / (draws.counts @ num_tokens)
    low, high = np.percentile(means, [tail, 100 - tail])
    value = sums.sum() / num_tokens.sum()
    ends = (float(value), float(low), float(high))
    return Interval(*(float(np.exp(end)) for end in ends)) if is_exponential else Interval(*ends)
