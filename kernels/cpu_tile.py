"""Loads and rounds a tile of LANES groups for the numba path: element-major scratch, so every sum is vertical.

A tile holds LANES consecutive groups (of the flattened chunk) as float32 [group, LANES]. Loops over lanes vectorise
without reassociating a sum, so no fast-math is needed and the pinned order of int4_reference.py holds bit for bit.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.cpu_number import decode_e4m3, from_bits
from memopt.kernels.layout import (
    BF16_INFINITY_BITS,
    BF16_MAGNITUDE_MASK,
    BF16_PER_LOAD_WORD,
    BF16_SHIFT,
    BITS_PER_BYTE,
    CODES_PER_WORD,
    E4M3_MAGNITUDE_MASK,
    E4M3_SIGN_MASK,
    EACH_BYTE,
    EACH_HALF,
    EACH_NIBBLE,
    FP8_PER_LOAD_WORD,
    INT4_BITS,
    INT4_CODE_MAX,
    INT4_CODE_MIN,
    INT4_CODE_OFFSET,
    WORD_BITS,
)

# Four AVX-512 registers of float32, or eight of AVX2. With 16 lanes LLVM unrolls the small loops before it could
# vectorise them and finishes none of them in vectors (measured: the search takes 1.6 times as long).
LANES = 64
WORD_TYPE = np.uint64

_WORD_HALF, _BYTE = np.uint64(WORD_BITS), np.uint32(BITS_PER_BYTE)
_CODE_MIN, _CODE_MAX = np.float32(INT4_CODE_MIN), np.float32(INT4_CODE_MAX)
_SHIFT_BF16 = np.uint32(BF16_SHIFT)
_HIGH_HALF = np.uint32(0xFFFF << BF16_SHIFT)
_BYTES_MAGNITUDE = np.uint32(EACH_BYTE * E4M3_MAGNITUDE_MASK)
_BYTES_ONE = np.uint32(EACH_BYTE)
_BYTES_SIGN = np.uint32(EACH_BYTE * E4M3_SIGN_MASK)
_INFINITE_PAIR = np.uint32(EACH_HALF * BF16_INFINITY_BITS)
_PAIR_ONE = np.uint32(EACH_HALF * (BF16_MAGNITUDE_MASK + 1 - BF16_INFINITY_BITS))
_PAIR_SIGN = np.uint32(EACH_HALF * (BF16_MAGNITUDE_MASK + 1))
_ZERO, _F32_INFINITY = np.float32(0), np.float32(np.inf)
_NIBBLE = np.uint32(INT4_BITS)
_NIBBLE_OFFSETS = np.uint32(EACH_NIBBLE * INT4_CODE_OFFSET)


@njit(nogil=True, error_model="numpy")
def gather_words(source, first_group, lanes, scratch):
    """Transposes the 64-bit words of `lanes` groups from flat `source` into `scratch` [words a group * LANES]."""
    per_group = scratch.shape[0] // LANES
    start = first_group * per_group
    if lanes == LANES:
        for k in range(per_group):
            for lane in range(LANES):
                scratch[k * LANES + lane] = source[start + lane * per_group + k]
    else:
        scratch[:] = 0
        for k in range(per_group):
            for lane in range(lanes):
                scratch[k * LANES + lane] = source[start + lane * per_group + k]


@njit(nogil=True, error_model="numpy")
def gather_columns(columns, group_in_row, groups_a_row, lanes, tile):
    """Spreads one number a column, flat [C], over a tile [group * LANES] whose first group is `group_in_row`."""
    group = tile.shape[0] // LANES
    for lane in range(lanes):
        start = group_in_row * group
        for k in range(group):
            tile[k * LANES + lane] = columns[start + k]
        group_in_row += 1
        if group_in_row == groups_a_row:
            group_in_row = 0


@njit(nogil=True, error_model="numpy")
def decode_fp8(scratch, segment_scale, segment, weights, bad):
    """Fills `weights` [group * LANES] from FP8 words `scratch`; False when one of them is a NaN.

    `segment_scale` [group / segment * LANES] holds the block scale of each run of `segment` weights; `bad` uint32
    [LANES] is working space.
    """
    for lane in range(LANES):
        bad[lane] = 0
    words = segment // FP8_PER_LOAD_WORD
    for part in range(segment_scale.shape[0] // LANES):
        for k in range(words):
            at = (part * words + k) * LANES
            out = at * FP8_PER_LOAD_WORD
            for lane in range(LANES):
                low = np.uint32(scratch[at + lane])
                high = np.uint32(scratch[at + lane] >> _WORD_HALF)
                scale = segment_scale[part * LANES + lane]
                nan_low = np.uint32(np.uint32(low & _BYTES_MAGNITUDE) + _BYTES_ONE)
                nan_high = np.uint32(np.uint32(high & _BYTES_MAGNITUDE) + _BYTES_ONE)
                bad[lane] = np.uint32(bad[lane] | np.uint32(nan_low | nan_high))
                weights[out + lane] = decode_e4m3(low) * scale
                weights[out + LANES + lane] = decode_e4m3(np.uint32(low >> _BYTE)) * scale
                weights[out + 2 * LANES + lane] = decode_e4m3(np.uint32(low >> 2 * _BYTE)) * scale
                weights[out + 3 * LANES + lane] = decode_e4m3(np.uint32(low >> 3 * _BYTE)) * scale
                weights[out + 4 * LANES + lane] = decode_e4m3(high) * scale
                weights[out + 5 * LANES + lane] = decode_e4m3(np.uint32(high >> _BYTE)) * scale
                weights[out + 6 * LANES + lane] = decode_e4m3(np.uint32(high >> 2 * _BYTE)) * scale
                weights[out + 7 * LANES + lane] = decode_e4m3(np.uint32(high >> 3 * _BYTE)) * scale
    every = np.uint32(0)
    for lane in range(LANES):
        every = np.uint32(every | bad[lane])
    return np.uint32(every & _BYTES_SIGN) == 0


@njit(nogil=True, error_model="numpy")
def decode_bf16(scratch, weights, bad):
    """Fills `weights` [group * LANES] from BF16 words `scratch`; False when one of them is NaN or infinite."""
    for lane in range(LANES):
        bad[lane] = 0
    for k in range(scratch.shape[0] // LANES):
        at = k * LANES
        out = at * BF16_PER_LOAD_WORD
        for lane in range(LANES):
            low = np.uint32(scratch[at + lane])
            high = np.uint32(scratch[at + lane] >> _WORD_HALF)
            nan_low = np.uint32(np.uint32(low & _INFINITE_PAIR) + _PAIR_ONE)
            nan_high = np.uint32(np.uint32(high & _INFINITE_PAIR) + _PAIR_ONE)
            bad[lane] = np.uint32(bad[lane] | np.uint32(nan_low | nan_high))
            weights[out + lane] = from_bits(np.uint32(low << _SHIFT_BF16))
            weights[out + LANES + lane] = from_bits(np.uint32(low & _HIGH_HALF))
            weights[out + 2 * LANES + lane] = from_bits(np.uint32(high << _SHIFT_BF16))
            weights[out + 3 * LANES + lane] = from_bits(np.uint32(high & _HIGH_HALF))
    every = np.uint32(0)
    for lane in range(LANES):
        every = np.uint32(every | bad[lane])
    return np.uint32(every & _PAIR_SIGN) == 0


@njit(nogil=True, error_model="numpy")
def largest_weights(weights, largest, low, high):
    """Puts each lane's weight of largest magnitude into `largest` [LANES]; False when one is infinite.

    `low` and `high` [LANES] are working space.
    """
    for lane in range(LANES):
        low[lane] = _ZERO
        high[lane] = _ZERO
    for k in range(weights.shape[0] // (4 * LANES)):
        at = 4 * k * LANES
        for lane in range(LANES):
            w0, w1 = weights[at + lane], weights[at + LANES + lane]
            w2, w3 = weights[at + 2 * LANES + lane], weights[at + 3 * LANES + lane]
            low[lane] = min(min(min(w0, w1), min(w2, w3)), low[lane])
            high[lane] = max(max(max(w0, w1), max(w2, w3)), high[lane])
    infinite = np.int32(0)
    for lane in range(LANES):
        largest[lane] = low[lane] if -low[lane] > high[lane] else high[lane]
        infinite = np.int32(infinite | np.int32(abs(largest[lane]) == _F32_INFINITY))
    return infinite == 0


@njit(nogil=True, error_model="numpy")
def _clamp(code):
    code = _CODE_MIN if code < _CODE_MIN else code
    return _CODE_MAX if code > _CODE_MAX else code


@njit(nogil=True, error_model="numpy")
def _larger(largest, error):
    magnitude = abs(error)
    return magnitude if magnitude > largest else largest


@njit(nogil=True, error_model="numpy")
def _pack(q0, q1, q2, q3, q4, q5, q6, q7):
    """Eight codes -8..7 as one word. Carries of the two's complement sum cancel, so + 8 is added once for all."""
    low = np.uint32(np.int32(q0)) + (np.uint32(np.int32(q1)) << _NIBBLE)
    high = (np.uint32(np.int32(q2)) << 2 * _NIBBLE) + (np.uint32(np.int32(q3)) << 3 * _NIBBLE)
    low = np.uint32(low) + np.uint32(high)
    high = (np.uint32(np.int32(q4)) << 4 * _NIBBLE) + (np.uint32(np.int32(q5)) << 5 * _NIBBLE)
    top = (np.uint32(np.int32(q6)) << 6 * _NIBBLE) + (np.uint32(np.int32(q7)) << 7 * _NIBBLE)
    return np.uint32(_NIBBLE_OFFSETS + np.uint32(np.uint32(low) + np.uint32(np.uint32(high) + np.uint32(top))))


@njit(nogil=True, error_model="numpy")
def round_tile(weights, scale, packed, sq_error, energy, max_error, clipped):
    """Codes and error figures of a tile: `packed` uint32 [group / 8 * LANES], the others [LANES], one each group."""
    for lane in range(LANES):
        sq_error[lane] = _ZERO
        energy[lane] = _ZERO
        max_error[lane] = _ZERO
        clipped[lane] = 0
    for word in range(packed.shape[0] // LANES):
        at = word * LANES
        first = at * CODES_PER_WORD
        for lane in range(LANES):
            s = scale[lane]
            w0 = weights[first + lane]
            w1 = weights[first + LANES + lane]
            w2 = weights[first + 2 * LANES + lane]
            w3 = weights[first + 3 * LANES + lane]
            w4 = weights[first + 4 * LANES + lane]
            w5 = weights[first + 5 * LANES + lane]
            w6 = weights[first + 6 * LANES + lane]
            w7 = weights[first + 7 * LANES + lane]
            r0, r1, r2, r3 = np.rint(w0 / s), np.rint(w1 / s), np.rint(w2 / s), np.rint(w3 / s)
            r4, r5, r6, r7 = np.rint(w4 / s), np.rint(w5 / s), np.rint(w6 / s), np.rint(w7 / s)
            q0, q1, q2, q3 = _clamp(r0), _clamp(r1), _clamp(r2), _clamp(r3)
            q4, q5, q6, q7 = _clamp(r4), _clamp(r5), _clamp(r6), _clamp(r7)
            d0, d1, d2, d3 = w0 - q0 * s, w1 - q1 * s, w2 - q2 * s, w3 - q3 * s
            d4, d5, d6, d7 = w4 - q4 * s, w5 - q5 * s, w6 - q6 * s, w7 - q7 * s
            packed[at + lane] = _pack(q0, q1, q2, q3, q4, q5, q6, q7)
            largest = _larger(_larger(_larger(_larger(max_error[lane], d0), d1), d2), d3)
            max_error[lane] = _larger(_larger(_larger(_larger(largest, d4), d5), d6), d7)
            clips = np.int32(r0 != q0) + np.int32(r1 != q1) + np.int32(r2 != q2) + np.int32(r3 != q3)
            clips += np.int32(r4 != q4) + np.int32(r5 != q5) + np.int32(r6 != q6) + np.int32(r7 != q7)
            clipped[lane] += np.int32(clips)
            low = (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)
            sq_error[lane] += low + ((d4 * d4 + d5 * d5) + (d6 * d6 + d7 * d7))
            low = (w0 * w0 + w1 * w1) + (w2 * w2 + w3 * w3)
            energy[lane] += low + ((w4 * w4 + w5 * w5) + (w6 * w6 + w7 * w7))
