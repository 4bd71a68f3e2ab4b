"""Kernels that round FP8 or BF16 rows to INT4 in one pass on the GPU; the launcher is fp8_int4_triton.py.

A thread owns whole groups. Groups up to 64 stay in its registers; longer ones, whole rows included, are read again in
every pass, from the caches. Group sums of squares leave as float32, and `sum_rows` adds them in order in float64.
"""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from memopt.kernels.device.triton_math import constant
from memopt.kernels.int4_rounding_triton import (
    CHUNK_WEIGHTS,
    CHUNK_WORDS,
    absmax_scale,
    add_search_errors,
    better_scale,
    is_unsafe,
    load_chunk,
    round_chunk,
)
from memopt.kernels.layout import BF16_SHIFT, CODES_PER_WORD

_CHUNK = constant(CHUNK_WEIGHTS)
_CHUNK_WORDS = constant(CHUNK_WORDS)
_WORD = constant(CODES_PER_WORD)
_BF16_SHIFT = constant(BF16_SHIFT)


@triton.jit
def _store_figures(scale_bits, group_sums, max_square, num_clipped, flag, scale, square_sum, energy_sum, largest_square,
                   clipped_sum, unusable, place, is_valid, num_rows, num_groups, ROWS: tl.constexpr,
                   ROW_GROUPS: tl.constexpr):  # fmt: skip
    """What a tile of groups leaves besides its codes."""
    tl.store(scale_bits + place, (scale.to(tl.uint32, bitcast=True) >> _BF16_SHIFT).to(tl.int16), mask=is_valid)
    tl.store(group_sums + place, square_sum, mask=is_valid)
    tl.store(group_sums + tl.cast(num_rows, tl.int64) * num_groups + place, energy_sum, mask=is_valid)
    row_square = tl.max(tl.reshape(largest_square, [ROWS, ROW_GROUPS]), axis=1)
    row_clipped = tl.sum(tl.reshape(clipped_sum, [ROWS, ROW_GROUPS]), axis=1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.atomic_max(max_square + rows, row_square, mask=rows < num_rows, sem="relaxed")
    tl.atomic_add(num_clipped + rows, row_clipped, mask=rows < num_rows, sem="relaxed")
    # A sum of squares is NaN when a weight is; an infinite weight makes the scale unsafe.
    unusable = unusable | (energy_sum != energy_sum)
    tl.store(flag + tl.zeros_like(clipped_sum), 1, mask=unusable & is_valid)


@triton.jit
def quantize_groups(weight, scales, grid, packed, scale_bits, group_sums, max_square, num_clipped, flag,
                    num_rows, num_groups, num_scale_columns, IS_FP8: tl.constexpr, GROUP: tl.constexpr,
                    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, ONE_SCALE: tl.constexpr,
                    SEARCH: tl.constexpr, NORM: tl.constexpr, GRID: tl.constexpr, ROWS: tl.constexpr,
                    ROW_GROUPS: tl.constexpr, USE_ASSEMBLY: tl.constexpr):  # fmt: skip
    """A tile of ROWS rows and ROW_GROUPS short groups each, their weights in registers from load to store.

    `grid`: GRID factors of the absmax scale; the first is 1, under its positive sign only.
    `weight`: the bytes of FP8 or BF16 weights as int32.
    Outputs: `packed`, `scale_bits`; `group_sums` float32 [2, R, G] of d * d and w * w; `max_square` int32 [R], bits of
    the largest d * d, and `num_clipped` int32 [R], both updated atomically; `flag` int32 [1], 1 when none of it may be
    used.
    """
    CHUNKS: tl.constexpr = GROUP // _CHUNK
    WORDS: tl.constexpr = GROUP // _WORD
    GROUPS: tl.constexpr = ROWS * ROW_GROUPS
    PER_WORD: tl.constexpr = 4 if IS_FP8 else 2
    IS_SEARCHED: tl.constexpr = SEARCH != "absmax"
    SIGNED: tl.constexpr = SEARCH == "mse-signed"
    lane = tl.arange(0, GROUPS)
    row = tl.program_id(0) * ROWS + lane // ROW_GROUPS
    group = tl.program_id(1) * ROW_GROUPS + lane % ROW_GROUPS
    is_valid = (row < num_rows) & (group < num_groups)
    place = row.to(tl.int64) * num_groups + group
    row_scale = row // SCALE_ROWS * num_scale_columns
    # The weights are read as int32.
    start, column = place * (GROUP // PER_WORD), group * GROUP
    zero = tl.zeros([GROUPS], tl.float32)
    values, largest = (), zero
    for i in tl.static_range(CHUNKS):
        chunk, chunk_largest = load_chunk(
            weight, scales, start + i * _CHUNK // PER_WORD, column + i * _CHUNK, row_scale, is_valid, 0, IS_FP8, GROUPS,
            SCALE_COLUMNS, ONE_SCALE, False, USE_ASSEMBLY)  # fmt: skip
        values = values + chunk
        largest = tl.maximum(largest, chunk_largest)
    absmax = absmax_scale(largest, 1.0)
    scale = tl.where(absmax == 0, 1.0, absmax)
    if IS_SEARCHED:
        best = tl.full([GROUPS], float("inf"), tl.float32)
        for i in range(GRID):
            candidate = absmax_scale(largest, tl.load(grid + i))
            positive, negative = add_search_errors(values, candidate, zero, zero, GROUP, GROUPS, NORM, SIGNED)
            scale, best = better_scale(scale, best, candidate, positive, negative, SIGNED, i > 0)
        scale = tl.where(absmax == 0, 1.0, scale)

    none = tl.zeros([GROUPS], tl.int32)
    square_sum, energy_sum, largest_square, clipped_sum = zero, zero, none, none
    for i in tl.static_range(CHUNKS):
        four, square_sum, energy_sum, largest_square, clipped_sum = round_chunk(
            values, i * _CHUNK, scale, square_sum, energy_sum, largest_square, clipped_sum, GROUPS, IS_SEARCHED,
            USE_ASSEMBLY)  # fmt: skip
        at = (place * WORDS)[:, None] + (i * _CHUNK_WORDS + tl.arange(0, _CHUNK_WORDS))[None, :]
        tl.store(packed + at, four, mask=is_valid[:, None])
    _store_figures(scale_bits, group_sums, max_square, num_clipped, flag, scale, square_sum, energy_sum, largest_square,
                   clipped_sum, is_unsafe(largest, absmax, largest_square), place, is_valid, num_rows, num_groups, ROWS,
                   ROW_GROUPS)  # fmt: skip


@triton.jit
def quantize_long_groups(weight, scales, grid, packed, scale_bits, group_sums, max_square, num_clipped, flag,
                         num_rows, num_groups, num_scale_columns, group_size, IS_FP8: tl.constexpr,
                         HAS_TAIL: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
                         ONE_SCALE: tl.constexpr, SEARCH: tl.constexpr, NORM: tl.constexpr, GRID: tl.constexpr,
                         ROWS: tl.constexpr, ROW_GROUPS: tl.constexpr, USE_ASSEMBLY: tl.constexpr):  # fmt: skip
    """As `quantize_groups`, for groups of any multiple of 8 weights: each pass reads them again, 32 at a time.

    HAS_TAIL: a chunk does not divide `group_size`, which is then the whole row.
    """
    GROUPS: tl.constexpr = ROWS * ROW_GROUPS
    PER_WORD: tl.constexpr = 4 if IS_FP8 else 2
    IS_SEARCHED: tl.constexpr = SEARCH != "absmax"
    SIGNED: tl.constexpr = SEARCH == "mse-signed"
    lane = tl.arange(0, GROUPS)
    row = tl.program_id(0) * ROWS + lane // ROW_GROUPS
    group = tl.program_id(1) * ROW_GROUPS + lane % ROW_GROUPS
    is_valid = (row < num_rows) & (group < num_groups)
    place = row.to(tl.int64) * num_groups + group
    row_scale = row // SCALE_ROWS * num_scale_columns
    start, column = place * (group_size // PER_WORD), group * group_size

    zero = tl.zeros([GROUPS], tl.float32)
    largest = zero
    for first in range(0, group_size, _CHUNK):
        _, chunk_largest = load_chunk(
            weight, scales, start + first // PER_WORD, column + first, row_scale, is_valid, group_size, IS_FP8,
            GROUPS, SCALE_COLUMNS, ONE_SCALE, HAS_TAIL, USE_ASSEMBLY)  # fmt: skip
        largest = tl.maximum(largest, chunk_largest)
    absmax = absmax_scale(largest, 1.0)
    scale = tl.where(absmax == 0, 1.0, absmax)
    if IS_SEARCHED:
        best = tl.full([GROUPS], float("inf"), tl.float32)
        for i in range(GRID):
            candidate = absmax_scale(largest, tl.load(grid + i))
            positive, negative = zero, zero
            for first in range(0, group_size, _CHUNK):
                values, _ = load_chunk(
                    weight, scales, start + first // PER_WORD, column + first, row_scale, is_valid, group_size, IS_FP8,
                    GROUPS, SCALE_COLUMNS, ONE_SCALE, HAS_TAIL, USE_ASSEMBLY)  # fmt: skip
                positive, negative = add_search_errors(
                    values, candidate, positive, negative, _CHUNK, GROUPS, NORM, SIGNED
                )
            scale, best = better_scale(scale, best, candidate, positive, negative, SIGNED, i > 0)
        scale = tl.where(absmax == 0, 1.0, scale)

    none = tl.zeros([GROUPS], tl.int32)
    square_sum, energy_sum, largest_square, clipped_sum = zero, zero, none, none
    for first in range(0, group_size, _CHUNK):
        values, _ = load_chunk(
            weight, scales, start + first // PER_WORD, column + first, row_scale, is_valid, group_size, IS_FP8,
            GROUPS, SCALE_COLUMNS, ONE_SCALE, HAS_TAIL, USE_ASSEMBLY)  # fmt: skip
        four, square_sum, energy_sum, largest_square, clipped_sum = round_chunk(
            values, 0, scale, square_sum, energy_sum, largest_square, clipped_sum, GROUPS, IS_SEARCHED,
            USE_ASSEMBLY)  # fmt: skip
        word = (first // _WORD + tl.arange(0, _CHUNK_WORDS))[None, :]
        mask = is_valid[:, None]
        if HAS_TAIL:
            mask = mask & (word * _WORD < group_size)
        tl.store(packed + (place * (group_size // _WORD))[:, None] + word, four, mask=mask)
    _store_figures(scale_bits, group_sums, max_square, num_clipped, flag, scale, square_sum, energy_sum, largest_square,
                   clipped_sum, is_unsafe(largest, absmax, largest_square), place, is_valid, num_rows, num_groups, ROWS,
                   ROW_GROUPS)  # fmt: skip


@triton.jit
def sum_rows(group_sums, row_sums, num_rows, num_groups, ROWS: tl.constexpr, STEP: tl.constexpr):
    """float64 [2, R] of float32 group sums [2, R, G], groups added one after another; STEP loads are in flight."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = (tl.program_id(1).to(tl.int64) * num_rows + rows) * num_groups
    total = tl.zeros([ROWS], tl.float64)
    for first in range(0, num_groups, STEP):
        for i in tl.static_range(STEP):
            is_valid = (rows < num_rows) & (tl.full([ROWS], first + i, tl.int32) < num_groups)
            # Sums of squares are not negative, so adding zero past the end changes nothing.
            total += tl.load(group_sums + start + first + i, mask=is_valid, other=0.0).to(tl.float64)
    tl.store(row_sums + tl.program_id(1).to(tl.int64) * num_rows + rows, total, mask=rows < num_rows)
