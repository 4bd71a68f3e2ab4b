"""The loop over tiles that rounds a chunk of rows to INT4, for the numba path."""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.cpu_number import round_bf16_bits
from memopt.kernels.cpu_search import SEARCH_ROWS, absmax_scale, search_scale
from memopt.kernels.cpu_search_error import POWERS, SQUARES, WEIGHTED_SQUARES
from memopt.kernels.cpu_tile import (
    LANES,
    decode_bf16,
    decode_fp8,
    gather_columns,
    gather_words,
    largest_weights,
    round_tile,
)
from memopt.kernels.layout import CODES_PER_WORD, FP8_PER_LOAD_WORD


@njit(nogil=True, error_model="numpy")
def quantize_tiles(
    source, items_a_word, scales, block_rows, block_columns, segment, group, groups_a_row, grid, signed, power,
    importance, packed, scale_bits, sq_error, energy, max_error, clipped,
):  # fmt: skip
    """Rounds a whole chunk, tile by tile; False (outputs then undefined) when a weight or scale is not finite.

    `source`: flat words of `items_a_word` weights. `segment`: weights that surely share group and block scale.
    `importance`: float32, one a column, or none at all: then errors are not weighted. Outputs are flat: `packed`
    uint32, `scale_bits` uint16, and a value a row of the other four.
    """
    kind = POWERS if power else SQUARES
    weighting = np.empty(0, np.float32)
    if importance.shape[0]:
        kind = WEIGHTED_SQUARES
        weighting = np.zeros(group * LANES, np.float32)
    scratch = np.empty(group // items_a_word * LANES, np.uint64)
    weights = np.zeros(group * LANES, np.float32)
    words = np.empty(group // CODES_PER_WORD * LANES, np.uint32)
    segment_scale = np.ones(group // segment * LANES, np.float32)
    largest = np.empty(LANES, np.float32)
    scale = np.empty(LANES, np.float32)
    lane_sq = np.empty(LANES, np.float32)
    lane_energy = np.empty(LANES, np.float32)
    lane_max = np.empty(LANES, np.float32)
    lane_clipped = np.empty(LANES, np.int32)
    bad = np.empty(LANES, np.uint32)
    rows = np.empty((SEARCH_ROWS, LANES), np.float32)
    state = np.empty(LANES, np.int32)
    words_a_group = group // CODES_PER_WORD
    parts = group // segment
    # Counted along instead of divided for: two divisions a group would cost as much as rounding it.
    block_of = np.arange(groups_a_row * parts) * segment // block_columns
    row, group_in_row, block_row = 0, 0, 0
    row_done, groups_done = 0, 0
    row_sq, row_energy, row_max, row_clipped = 0.0, 0.0, np.float32(0), 0
    for tile in range((scale_bits.shape[0] + LANES - 1) // LANES):
        first = tile * LANES
        lanes = min(LANES, scale_bits.shape[0] - first)
        if importance.shape[0]:
            gather_columns(importance, first % groups_a_row, groups_a_row, lanes, weighting)
        for lane in range(lanes):
            for part in range(parts):
                segment_scale[part * LANES + lane] = scales[block_row, block_of[group_in_row * parts + part]]
            group_in_row += 1
            if group_in_row == groups_a_row:
                group_in_row = 0
                row += 1
                block_row = row // block_rows
        gather_words(source, first, lanes, scratch)
        if items_a_word == FP8_PER_LOAD_WORD:
            finite = decode_fp8(scratch, segment_scale, segment, weights, bad)
            for k in range(segment_scale.shape[0]):
                finite &= bool(np.isfinite(segment_scale[k]))
        else:
            finite = decode_bf16(scratch, weights, bad)
        finite &= largest_weights(weights, largest, lane_sq, lane_max)
        if not finite:
            return False
        absmax_scale(largest, scale)
        if grid.shape[0]:
            search_scale(weights, weighting, largest, grid, signed, kind, scale, rows, state)
        round_tile(weights, scale, words, lane_sq, lane_energy, lane_max, lane_clipped)
        for k in range(words_a_group):
            for lane in range(lanes):
                packed[(first + lane) * words_a_group + k] = words[k * LANES + lane]
        for lane in range(lanes):
            scale_bits[first + lane] = round_bf16_bits(scale[lane])
            row_sq += np.float64(lane_sq[lane])
            row_energy += np.float64(lane_energy[lane])
            row_max = max(row_max, lane_max[lane])
            row_clipped += lane_clipped[lane]
            groups_done += 1
            if groups_done == groups_a_row:
                sq_error[row_done], energy[row_done] = row_sq, row_energy
                max_error[row_done], clipped[row_done] = row_max, row_clipped
                row_sq, row_energy, row_max, row_clipped = 0.0, 0.0, np.float32(0), 0
                groups_done = 0
                row_done += 1
    return True
