"""Elements of BF16 or float32 rows for numba, as float32: read, rounded back, exponentiated.

An array of BF16 is passed as its bits, uint16. What stands here is inlined into loops that LLVM vectorises: no branches
but selections, and an exponential that is arithmetic alone, so that an element has the same bits wherever it stands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from memopt.kernels.cpu_number import from_bits, round_bf16_bits
from memopt.kernels.kv_cache.kv_rows_cpu import e4m3_value
from memopt.kernels.layout import (
    BF16_SHIFT,
    F32_EXPONENT_BIAS,
    F32_INFINITY_BITS,
    F32_MAGNITUDE_MASK,
    F32_MANTISSA_BITS,
    F32_QUIET_NAN_BITS,
)

_SHIFT = np.uint32(BF16_SHIFT)
_MAGNITUDE, _INFINITY = np.uint32(F32_MAGNITUDE_MASK), np.uint32(F32_INFINITY_BITS)
_NAN = np.uint32(F32_QUIET_NAN_BITS >> BF16_SHIFT)
# Cephes' expf (netlib.org/cephes, single/expf.c): ln 2 in two parts, and a polynomial on [-ln 2 / 2, ln 2 / 2].
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_HALF, _ONE = np.float32(0.5), np.float32(1.0)
# Results stay normal numbers: 2 ** -126 and below 2 ** 128.
_LOWEST, _HIGHEST = np.float32(-87.33654), np.float32(88.37626)
_TO_EXPONENT, _BIAS = np.int32(F32_MANTISSA_BITS), np.int32(F32_EXPONENT_BIAS)


def widen(value: Any) -> Any:
    """float32 of an element: a float32, BF16 bits (uint16), or an e4m3 code (uint8); compiled code takes `_widen`."""
    if isinstance(value, np.uint16):
        return from_bits(np.uint32(np.uint32(value) << _SHIFT))
    return e4m3_value(value) if isinstance(value, np.uint8) else value


@overload(widen, inline="always")
def _widen(value):
    if value == types.uint16:
        return lambda value: from_bits(np.uint32(np.uint32(value) << _SHIFT))
    if value == types.uint8:
        return lambda value: e4m3_value(value)
    return lambda value: value


def narrow(value: Any, target: Any) -> Any:
    """`value` float32 as an element of the array `target`: as it is, or BF16 bits to nearest, ties to even."""
    return bf16_bits(value) if target.dtype == np.uint16 else value


@overload(narrow, inline="always")
def _narrow(value, target):
    if target.dtype == types.uint16:
        return lambda value, target: bf16_bits(value)
    return lambda value, target: value


@njit(nogil=True, error_model="numpy")
def bf16_bits(value):
    """BF16 bits (uint16) of a float32, to nearest, ties to even; any NaN is 0x7FC0."""
    magnitude = np.uint32(np.float32(value).view(np.uint32) & _MAGNITUDE)
    return np.uint16(_NAN if magnitude > _INFINITY else round_bf16_bits(value))


@njit(nogil=True, error_model="numpy")
def exp_float32(value):
    """e ** value within 2 units in the last place; below -87.3 and above 88.3 as there, NaN for NaN."""
    x = np.float32(value)
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    turns = np.floor(np.float32(np.float32(x * _LOG2_E) + _HALF))
    x = np.float32(np.float32(x - np.float32(turns * _LN2_HIGH)) - np.float32(turns * _LN2_LOW))
    p = np.float32(np.float32(_P0 * x) + _P1)
    p = np.float32(np.float32(p * x) + _P2)
    p = np.float32(np.float32(p * x) + _P3)
    p = np.float32(np.float32(p * x) + _P4)
    p = np.float32(np.float32(p * x) + _P5)
    p = np.float32(np.float32(np.float32(p * np.float32(x * x)) + x) + _ONE)
    power = np.int32(np.int32(np.int32(turns) + _BIAS) << _TO_EXPONENT)
    return np.float32(p * from_bits(np.uint32(power)))
