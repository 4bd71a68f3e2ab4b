"""BF16 rounding and FP8 decoding of one number for the numba path, as number_reference.py does it for tensors."""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.layout import (
    BF16_SHIFT,
    E4M3_BITS,
    E4M3_EXPONENT_BIAS,
    E4M3_MAGNITUDE_MASK,
    E4M3_MANTISSA_BITS,
    E4M3_MIN_SUBNORMAL,
    F32_BITS,
    F32_EXPONENT_BIAS,
    F32_MANTISSA_BITS,
    F32_SIGN_MASK,
)

_SHIFT_BF16 = np.uint32(BF16_SHIFT)
_BELOW_HALF = np.uint32((1 << (BF16_SHIFT - 1)) - 1)
_MAGNITUDE, _SIGN = np.uint32(E4M3_MAGNITUDE_MASK), np.uint32(F32_SIGN_MASK)
_TO_F32 = np.uint32(F32_MANTISSA_BITS - E4M3_MANTISSA_BITS)
_SIGN_TO_F32 = np.uint32(F32_BITS - E4M3_BITS)
_REBIAS = np.uint32((F32_EXPONENT_BIAS - E4M3_EXPONENT_BIAS) << F32_MANTISSA_BITS)
_FIRST_NORMAL = np.uint32(1 << E4M3_MANTISSA_BITS)
_SUBNORMAL = np.float32(E4M3_MIN_SUBNORMAL)


@njit(nogil=True, error_model="numpy")
def from_bits(bits):
    """float32 with the bits of an integer of 32 bits."""
    return np.uint32(bits).view(np.float32)


@njit(nogil=True, error_model="numpy")
def round_bf16_bits(value):
    """BF16 bits (uint32, 16 used) of a float32 that is not NaN, to nearest, ties to even."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32((bits >> _SHIFT_BF16) & np.uint32(1))
    return np.uint32(np.uint32(bits + np.uint32(odd + _BELOW_HALF)) >> _SHIFT_BF16)


@njit(nogil=True, error_model="numpy")
def round_bf16(value):
    """A float32 that is not NaN, rounded to the nearest BF16, ties to even."""
    return np.uint32(round_bf16_bits(value) << _SHIFT_BF16).view(np.float32)


@njit(nogil=True, error_model="numpy")
def decode_e4m3(code):
    """float32 of an e4m3fn code (uint32, 8 bits used). The NaN codes give 480: the caller looks for them itself.

    Integer only: a float32 subnormal as an intermediate would trap to microcode on some CPUs.
    """
    magnitude = np.uint32(code & _MAGNITUDE)
    sign = np.uint32(np.uint32(code << _SIGN_TO_F32) & _SIGN)
    normal = np.uint32(np.uint32(magnitude << _TO_F32) + _REBIAS)
    small = np.float32(np.float32(np.int32(magnitude)) * _SUBNORMAL).view(np.uint32)
    return from_bits(np.uint32((small if magnitude < _FIRST_NORMAL else normal) | sign))
