"""The error sums that the scale search of the numba path compares: squares, the 2.4 power, and weighted squares.

A tile holds LANES groups, element-major (cpu_tile.py); the order of every sum is that of int4_reference.py.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.cpu_number import from_bits
from memopt.kernels.cpu_tile import LANES
from memopt.kernels.int4_spec import POWER_CUBIC, POWER_SEED, POWER_SLOPE
from memopt.kernels.layout import CODES_PER_WORD, F32_MAGNITUDE_MASK, F32_MAX_BITS, INT4_CODE_MAX, INT4_CODE_MIN

# What an error sum is of; the numbers are this path's own.
SQUARES, POWERS, WEIGHTED_SQUARES = 0, 1, 2

_ZERO, _ONE = np.float32(0), np.float32(1)
_CODE_MIN = np.float32(INT4_CODE_MIN)
_CODE_MAX = np.float32(INT4_CODE_MAX)
_MAGNITUDE = np.int32(F32_MAGNITUDE_MASK)
_LARGEST = np.int32(F32_MAX_BITS)
_SEED, _SLOPE = np.float32(POWER_SEED), np.float32(POWER_SLOPE)
_C0, _C1, _C2, _C3 = (np.float32(c) for c in POWER_CUBIC)


@njit(nogil=True, error_model="numpy")
def power_04(value):
    """|value| ** 0.4 as `int4_spec` defines it: float32 and integer steps only."""
    bits = np.int32(np.float32(value).view(np.int32) & _MAGNITUDE)
    bits = _LARGEST if bits > _LARGEST else bits
    x = from_bits(bits)
    z = from_bits(np.int32(_SEED - np.float32(bits) * _SLOPE))
    square = z * z
    y = x * (square * z)
    h = _ONE - y * square
    return y * (((_C3 * h + _C2) * h + _C1) * h + _C0)


@njit(nogil=True, error_model="numpy")
def square_error(weight, scale, inverse):
    """(weight - code * scale) ** 2 of the code that the product with the reciprocal gives."""
    code = np.rint(weight * inverse)
    code = _CODE_MIN if code < _CODE_MIN else code
    code = _CODE_MAX if code > _CODE_MAX else code
    d = weight - code * scale
    return d * d


@njit(nogil=True, error_model="numpy")
def power_error(weight, scale, inverse):
    """As `square_error`, to the power 2.4."""
    code = np.rint(weight * inverse)
    code = _CODE_MIN if code < _CODE_MIN else code
    code = _CODE_MAX if code > _CODE_MAX else code
    d = weight - code * scale
    return d * d * power_04(d)


@njit(nogil=True, error_model="numpy")
def _sum_squares(weights, scale, inverse, error):
    for lane in range(LANES):
        error[lane] = _ZERO
    for word in range(weights.shape[0] // (LANES * CODES_PER_WORD)):
        first = word * (LANES * CODES_PER_WORD)
        for lane in range(LANES):
            s = scale[lane]
            i = inverse[lane]
            at = first + lane
            e0 = square_error(weights[at], s, i) + square_error(weights[at + LANES], s, i)
            e2 = square_error(weights[at + 2 * LANES], s, i) + square_error(weights[at + 3 * LANES], s, i)
            e4 = square_error(weights[at + 4 * LANES], s, i) + square_error(weights[at + 5 * LANES], s, i)
            e6 = square_error(weights[at + 6 * LANES], s, i) + square_error(weights[at + 7 * LANES], s, i)
            error[lane] += (e0 + e2) + (e4 + e6)


@njit(nogil=True, error_model="numpy")
def _sum_powers(weights, scale, inverse, error):
    for lane in range(LANES):
        error[lane] = _ZERO
    for word in range(weights.shape[0] // (LANES * CODES_PER_WORD)):
        first = word * (LANES * CODES_PER_WORD)
        for lane in range(LANES):
            s = scale[lane]
            i = inverse[lane]
            at = first + lane
            e0 = power_error(weights[at], s, i) + power_error(weights[at + LANES], s, i)
            e2 = power_error(weights[at + 2 * LANES], s, i) + power_error(weights[at + 3 * LANES], s, i)
            e4 = power_error(weights[at + 4 * LANES], s, i) + power_error(weights[at + 5 * LANES], s, i)
            e6 = power_error(weights[at + 6 * LANES], s, i) + power_error(weights[at + 7 * LANES], s, i)
            error[lane] += (e0 + e2) + (e4 + e6)


@njit(nogil=True, error_model="numpy")
def _sum_weighted(weights, importance, scale, inverse, error):
    for lane in range(LANES):
        error[lane] = _ZERO
    for word in range(weights.shape[0] // (LANES * CODES_PER_WORD)):
        first = word * (LANES * CODES_PER_WORD)
        for lane in range(LANES):
            s = scale[lane]
            i = inverse[lane]
            at = first + lane
            e0 = square_error(weights[at], s, i) * importance[at]
            e1 = square_error(weights[at + LANES], s, i) * importance[at + LANES]
            e2 = square_error(weights[at + 2 * LANES], s, i) * importance[at + 2 * LANES]
            e3 = square_error(weights[at + 3 * LANES], s, i) * importance[at + 3 * LANES]
            e4 = square_error(weights[at + 4 * LANES], s, i) * importance[at + 4 * LANES]
            e5 = square_error(weights[at + 5 * LANES], s, i) * importance[at + 5 * LANES]
            e6 = square_error(weights[at + 6 * LANES], s, i) * importance[at + 6 * LANES]
            e7 = square_error(weights[at + 7 * LANES], s, i) * importance[at + 7 * LANES]
            error[lane] += ((e0 + e1) + (e2 + e3)) + ((e4 + e5) + (e6 + e7))


@njit(nogil=True, error_model="numpy")
def sum_errors(weights, importance, scale, inverse, error, kind):
    """Fills `error` [LANES] with the sums of `kind`, for weights [group * LANES] and reciprocals of the scales.

    `importance` [group * LANES] weighs each square where `kind` is WEIGHTED_SQUARES; else it is not read.
    """
    if kind == POWERS:
        _sum_powers(weights, scale, inverse, error)
    elif kind == SQUARES:
        _sum_squares(weights, scale, inverse, error)
    else:
        _sum_weighted(weights, importance, scale, inverse, error)
