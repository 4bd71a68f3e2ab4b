"""Rows of float32 to e4m3 bytes in a pool and back, for numba. A pool is its bytes in one line."""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.cpu_number import decode_e4m3, from_bits
from memopt.kernels.layout import (
    E4M3_BITS,
    E4M3_EXPONENT_BIAS,
    E4M3_MAGNITUDE_MASK,
    E4M3_MANTISSA_BITS,
    E4M3_MAX,
    E4M3_NAN_MAGNITUDE,
    E4M3_SIGN_MASK,
    F32_BELOW_NEXT_POWER,
    F32_BITS,
    F32_EXPONENT_BIAS,
    F32_INFINITY_BITS,
    F32_MAGNITUDE_MASK,
    F32_MANTISSA_BITS,
    F32_QUIET_NAN_BITS,
)

_MAGNITUDE, _INFINITY = np.uint32(F32_MAGNITUDE_MASK), np.uint32(F32_INFINITY_BITS)
_TO_E4M3 = np.uint32(F32_MANTISSA_BITS - E4M3_MANTISSA_BITS)
_BELOW_HALF = np.uint32((1 << (F32_MANTISSA_BITS - E4M3_MANTISSA_BITS - 1)) - 1)
_REBIAS = np.uint32((F32_EXPONENT_BIAS - E4M3_EXPONENT_BIAS) << E4M3_MANTISSA_BITS)
# Smallest normal number, as bits. Below it, adding this power of two leaves multiples of the smallest subnormal.
_FIRST_NORMAL = np.uint32((F32_EXPONENT_BIAS - E4M3_EXPONENT_BIAS + 1) << F32_MANTISSA_BITS)
_SUBNORMAL_STEP = np.float32(2.0 ** (F32_MANTISSA_BITS - E4M3_MANTISSA_BITS - E4M3_EXPONENT_BIAS + 1))
_SUBNORMAL_ZERO = _SUBNORMAL_STEP.view(np.uint32)
_NAN, _LARGEST = np.uint32(E4M3_NAN_MAGNITUDE), np.uint32(E4M3_NAN_MAGNITUDE - 1)
_SIGN, _TO_SIGN = np.uint32(E4M3_SIGN_MASK), np.uint32(F32_BITS - E4M3_BITS)
_MAX = np.float32(E4M3_MAX)
_BELOW_NEXT_POWER = np.uint32(F32_BELOW_NEXT_POWER)
_CODE_MAGNITUDE, _F32_NAN = np.uint32(E4M3_MAGNITUDE_MASK), np.uint32(F32_QUIET_NAN_BITS)


@njit(nogil=True, error_model="numpy")
def e4m3_code(value):
    """e4m3fn code (uint8) of a float32: nearest, ties to even, saturating at 448; any NaN is 0x7F."""
    bits = np.float32(value).view(np.uint32)
    magnitude = np.uint32(bits & _MAGNITUDE)
    small = np.uint32(np.float32(from_bits(magnitude) + _SUBNORMAL_STEP).view(np.uint32) - _SUBNORMAL_ZERO)
    odd = np.uint32((magnitude >> _TO_E4M3) & np.uint32(1))
    normal = np.uint32(np.uint32(np.uint32(magnitude + np.uint32(_BELOW_HALF + odd)) >> _TO_E4M3) - _REBIAS)
    code = np.uint32(small if magnitude < _FIRST_NORMAL else min(normal, _LARGEST))
    signed = np.uint32(code | np.uint32((bits >> _TO_SIGN) & _SIGN))
    return np.uint8(_NAN if magnitude > _INFINITY else signed)


@njit(nogil=True, error_model="numpy")
def store_scaled(values, scales, offsets, pool):
    """Writes values float32 [T, C] / scales [G] (one per C / G columns) as e4m3 at bytes offsets int64 [T] of a pool.

    A negative offset skips the row.
    """
    group = values.shape[1] // scales.shape[0]
    for token in range(values.shape[0]):
        if offsets[token] < 0:
            continue
        for g in range(scales.shape[0]):
            source = values[token, g * group : (g + 1) * group]
            target = pool[offsets[token] + g * group : offsets[token] + (g + 1) * group]
            for i in range(group):
                target[i] = e4m3_code(np.float32(source[i] / scales[g]))


@njit(nogil=True, error_model="numpy")
def store_grouped(values, group, power_of_two, min_scale, offsets, scale_offsets, pool, pool_scales):
    """Writes values float32 [T, C] as e4m3, each `group` of columns with a scale of its own: amax / 448.

    It is rounded up to a power of two if `power_of_two`, and is never below `min_scale`. NaN has no part in amax.
    `offsets` int64 [T] in bytes, a negative one skips the row; `scale_offsets` int64 [T]: a row's first scale in
    `pool_scales`, the pool's bytes as float32.
    """
    for token in range(values.shape[0]):
        if offsets[token] < 0:
            continue
        for g in range(values.shape[1] // group):
            source = values[token, g * group : (g + 1) * group]
            target = pool[offsets[token] + g * group : offsets[token] + (g + 1) * group]
            largest = np.uint32(0)
            for i in range(group):
                magnitude = np.uint32(np.float32(source[i]).view(np.uint32) & _MAGNITUDE)
                largest = max(largest, np.uint32(0) if magnitude > _INFINITY else magnitude)
            scale = np.float32(from_bits(largest) / _MAX)
            if power_of_two:
                bits = np.uint32(np.float32(scale).view(np.uint32) + _BELOW_NEXT_POWER)
                scale = from_bits(np.uint32(bits & _INFINITY))
            scale = max(scale, min_scale)
            pool_scales[scale_offsets[token] + g] = scale
            for i in range(group):
                target[i] = e4m3_code(np.float32(source[i] / scale))


@njit(nogil=True, error_model="numpy")
def e4m3_value(code):
    """float32 of an e4m3fn code (uint8), exact; the NaN codes give NaN."""
    wide = np.uint32(code)
    value = decode_e4m3(wide)
    return from_bits(_F32_NAN) if np.uint32(wide & _CODE_MAGNITUDE) == _NAN else value


@njit(nogil=True, error_model="numpy")
def load_scaled(pool, offsets, scales, values):
    """Reads e4m3 at bytes offsets int64 [T] of a pool, times scales [G] (one per C / G columns), as values [T, C].

    A negative offset reads as zeros.
    """
    group = values.shape[1] // scales.shape[0]
    for token in range(values.shape[0]):
        if offsets[token] < 0:
            values[token, :] = np.float32(0)
            continue
        for g in range(scales.shape[0]):
            source = pool[offsets[token] + g * group : offsets[token] + (g + 1) * group]
            target = values[token, g * group : (g + 1) * group]
            for i in range(group):
                target[i] = np.float32(e4m3_value(source[i]) * scales[g])


@njit(nogil=True, error_model="numpy")
def load_grouped(pool, pool_scales, offsets, scale_offsets, group, num_groups, values):
    """Reads what `store_grouped` wrote into the first columns of values float32 [T, C]; a negative offset as zeros."""
    for token in range(values.shape[0]):
        if offsets[token] < 0:
            values[token, :] = np.float32(0)
            continue
        for g in range(num_groups):
            source = pool[offsets[token] + g * group : offsets[token] + (g + 1) * group]
            target = values[token, g * group : (g + 1) * group]
            scale = pool_scales[scale_offsets[token] + g]
            for i in range(group):
                target[i] = np.float32(e4m3_value(source[i]) * scale)
