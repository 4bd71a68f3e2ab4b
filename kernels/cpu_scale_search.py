"""The loop over tiles that searches the scales of float32 rows, for the numba path.

A calibrated solve starts from them and finds its own codes; they are the scales that cpu_quantize.py would take.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.cpu_number import round_bf16_bits
from memopt.kernels.cpu_search import SEARCH_ROWS, absmax_scale, search_scale
from memopt.kernels.cpu_search_error import POWERS, SQUARES, WEIGHTED_SQUARES
from memopt.kernels.cpu_tile import LANES, gather_columns, largest_weights


@njit(nogil=True, error_model="numpy")
def _gather_values(source, first_group, lanes, weights):
    """Transposes `lanes` groups of flat float32 `source` into `weights` [group * LANES]; False for a NaN."""
    group = weights.shape[0] // LANES
    start = first_group * group
    is_number = True
    weights[:] = 0
    for lane in range(lanes):
        for k in range(group):
            value = source[start + lane * group + k]
            is_number &= value == value
            weights[k * LANES + lane] = value
    return is_number


@njit(nogil=True, error_model="numpy")
def search_tiles(source, group, groups_a_row, grid, signed, power, importance, scale_bits):
    """Fills flat `scale_bits` uint16 for flat float32 `source`; False (then undefined) for a NaN or an infinite value.

    `grid`: factors to try, none for the absmax rule. `importance` as for `quantize_tiles`.
    """
    kind = POWERS if power else SQUARES
    weighting = np.empty(0, np.float32)
    if importance.shape[0]:
        kind = WEIGHTED_SQUARES
        weighting = np.zeros(group * LANES, np.float32)
    weights = np.empty(group * LANES, np.float32)
    largest = np.empty(LANES, np.float32)
    scale = np.empty(LANES, np.float32)
    rows = np.empty((SEARCH_ROWS, LANES), np.float32)
    state = np.empty(LANES, np.int32)
    for tile in range((scale_bits.shape[0] + LANES - 1) // LANES):
        first = tile * LANES
        lanes = min(LANES, scale_bits.shape[0] - first)
        if not _gather_values(source, first, lanes, weights):
            return False
        if not largest_weights(weights, largest, rows[0], rows[1]):
            return False
        if importance.shape[0]:
            gather_columns(importance, first % groups_a_row, groups_a_row, lanes, weighting)
        absmax_scale(largest, scale)
        if grid.shape[0]:
            search_scale(weights, weighting, largest, grid, signed, kind, scale, rows, state)
        for lane in range(lanes):
            scale_bits[first + lane] = round_bf16_bits(scale[lane])
    return True
