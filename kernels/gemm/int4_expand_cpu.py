"""INT4 rows to float32 weights for numba, with the nibbles of a byte apart: even codes first, then odd ones.

In that order a row is two runs of plain vector code; who multiplies it brings x into the same order. The inner loop's
length must not be a constant: sixteen fixed steps are unrolled before LLVM could vectorise them (nine times as long).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.cpu_number import from_bits
from memopt.kernels.layout import BF16_SHIFT, INT4_BITS, INT4_CODE_MASK, INT4_CODE_OFFSET

_MASK, _SHIFT = np.uint32(INT4_CODE_MASK), np.uint32(INT4_BITS)
_OFFSET = np.float32(INT4_CODE_OFFSET)
_TO_F32 = np.uint32(BF16_SHIFT)


@njit(nogil=True, error_model="numpy")
def _expand_row(row, scales, group_bytes, even, odd):
    for g in range(scales.shape[0]):
        scale = scales[g]
        first = g * group_bytes
        for i in range(group_bytes):
            pair = np.uint32(row[first + i])
            even[first + i] = (np.float32(np.int32(pair & _MASK)) - _OFFSET) * scale
            odd[first + i] = (np.float32(np.int32(pair >> _SHIFT)) - _OFFSET) * scale


@njit(nogil=True, error_model="numpy")
def expand_rows(packed, scale_bits, weights):
    """Fills `weights` float32 [R, K] with code * scale (exact): column j is code 2 * j, column K / 2 + j is 2 * j + 1.

    `packed` uint8 [R, K / 2], `scale_bits` uint16 [R, G] (BF16), one for each K / G codes, an even number.
    """
    pairs = packed.shape[1]
    scales = np.empty(scale_bits.shape[1], np.float32)
    for row in range(packed.shape[0]):
        for g in range(scales.shape[0]):
            scales[g] = from_bits(np.uint32(np.uint32(scale_bits[row, g]) << _TO_F32))
        _expand_row(packed[row], scales, pairs // scales.shape[0], weights[row, :pairs], weights[row, pairs:])
