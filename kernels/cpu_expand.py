"""FP8 and INT4 back to BF16 bits, row by row, for the numba path."""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.cpu_number import decode_e4m3, from_bits, round_bf16_bits
from memopt.kernels.layout import (
    BF16_INFINITY_BITS,
    BF16_MAGNITUDE_MASK,
    BF16_SHIFT,
    CODES_PER_WORD,
    E4M3_MAGNITUDE_MASK,
    E4M3_NAN_MAGNITUDE,
    E4M3_SIGN_MASK,
    F32_QUIET_NAN_BITS,
    INT4_BITS,
    INT4_CODE_MASK,
    INT4_CODE_OFFSET,
)

_MAGNITUDE_E4M3 = np.uint32(E4M3_MAGNITUDE_MASK)
_NAN_E4M3 = np.uint32(E4M3_NAN_MAGNITUDE)
_MAGNITUDE_BYTE = np.uint8(E4M3_MAGNITUDE_MASK)
_ONE_BYTE = np.uint8(1)
_SIGN_BYTE = np.uint8(E4M3_SIGN_MASK)
_NAN = np.uint32(F32_QUIET_NAN_BITS)
_MAGNITUDE_BF16 = np.uint32(BF16_MAGNITUDE_MASK)
_INFINITY_BF16 = np.uint32(BF16_INFINITY_BITS)
_SHIFT_BF16 = np.uint32(BF16_SHIFT)
_CODE_MASK = np.uint32(INT4_CODE_MASK)
_NIBBLE = np.uint32(INT4_BITS)
_OFFSET = np.int32(INT4_CODE_OFFSET)


@njit(nogil=True, error_model="numpy")
def scaled_bits(codes, scale):
    """float32 bits uint32 [C] of e4m3fn codes uint8 [C] times scale float32 [C]; NaN codes give NaN."""
    bits = np.empty(codes.shape[0], np.uint32)
    for i in range(codes.shape[0]):
        code = np.uint32(codes[i])
        product = np.float32(decode_e4m3(code) * scale[i]).view(np.uint32)
        bits[i] = _NAN if np.uint32(code & _MAGNITUDE_E4M3) == _NAN_E4M3 else product
    return bits


@njit(nogil=True, error_model="numpy")
def expand_fp8(codes, scales, block_rows, block_columns, result):
    """BF16 bits uint16 [R, C] of FP8 codes uint8 [R, C]; False when a code, a scale or a result is NaN or infinite."""
    rows, columns = codes.shape
    flat = codes.reshape(-1)
    out = result.reshape(-1)
    highest = np.uint32(0)
    nan_bytes = np.uint8(0)
    finite = True
    for row in range(rows):
        for block in range((columns + block_columns - 1) // block_columns):
            begin = block * block_columns
            scale = scales[row // block_rows, block]
            finite &= bool(np.isfinite(scale))
            source = flat[row * columns + begin : row * columns + min(columns, begin + block_columns)]
            target = out[row * columns + begin : row * columns + min(columns, begin + block_columns)]
            for i in range(source.shape[0]):
                bits = round_bf16_bits(decode_e4m3(np.uint32(source[i])) * scale)
                target[i] = np.uint16(bits)
                highest = np.uint32(max(highest, np.uint32(bits & _MAGNITUDE_BF16)))
            for i in range(source.shape[0]):
                nan_bytes = np.uint8(nan_bytes | np.uint8(np.uint8(source[i] & _MAGNITUDE_BYTE) + _ONE_BYTE))
    return finite and highest < _INFINITY_BF16 and np.uint8(nan_bytes & _SIGN_BYTE) == 0


@njit(nogil=True, error_model="numpy")
def expand_int4(packed, scale_bits, group, result):
    """BF16 bits uint16 [R * C] of packed codes int32 [R * C / 8] with BF16 scale bits uint16 [R * G]."""
    words = group // CODES_PER_WORD
    for g in range(scale_bits.shape[0]):
        scale = from_bits(np.uint32(scale_bits[g]) << _SHIFT_BF16)
        source = packed[g * words : (g + 1) * words]
        target = result[g * group : (g + 1) * group]
        for k in range(words):
            for j in range(CODES_PER_WORD):
                nibble = np.uint32(np.uint32(np.uint32(source[k]) >> np.uint32(_NIBBLE * np.uint32(j))) & _CODE_MASK)
                code = np.int32(np.int32(nibble) - _OFFSET)
                target[k * CODES_PER_WORD + j] = np.uint16(round_bf16_bits(np.float32(code) * scale))
