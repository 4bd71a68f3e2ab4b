"""How much a probe changes KL, window by window against the default: what windows have in common cancels."""

from __future__ import annotations

import numpy as np

from benchmarks.smollm2.probes.window_kl import WindowScores
from memopt.compressor.evaluate.bootstrap import Interval, Resampling, mean_intervals
from memopt.errors import ShapeError

SEED = 0


def paired_change(probe: WindowScores, base: WindowScores) -> Interval:
    """The probe's mean KL relative to the base's, minus 1, with its 95 % interval over resampled windows.

    A resample has the same windows of both. ShapeError for scores of different windows.
    """
    if probe.num_tokens != base.num_tokens:
        raise ShapeError(
            f"{len(probe.num_tokens)} windows of {sum(probe.num_tokens)} predictions beside {len(base.num_tokens)} of "
            f"{sum(base.num_tokens)}",
            remedy="measure both on the same windows",
        )
    of_probe, of_base = np.array(probe.kl_sums), np.array(base.kl_sums)
    # A ratio of sums: the base's KL stands where a mean has its number of tokens.
    (change,) = mean_intervals((of_probe - of_base)[None], of_base, Resampling(len(of_base), SEED))
    return change
