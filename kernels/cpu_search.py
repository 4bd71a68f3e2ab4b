"""Searches the INT4 scale of a tile of groups over the grid, for the numba path.

Gives the scale that trying every candidate in order gives (int4_reference.py, `search_scale`), with four shortcuts
that cannot change it, because IEEE rounding is symmetric in sign and sums of non-negative terms never shrink:
 - error(-s) is computed as the same sum with scale and reciprocal negated;
 - a candidate is skipped when the error of the group's largest weight alone is no smaller than the best sum so far;
 - the search ends once that holds for every group, both signs and all smaller scales (`_bound_squares`);
 - one sign stands for both while the largest weight rounds to within -7..7, where both code ranges agree.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.cpu_number import from_bits, round_bf16
from memopt.kernels.cpu_tile import LANES
from memopt.kernels.int4_spec import POWER_CUBIC, POWER_SEED, POWER_SLOPE
from memopt.kernels.layout import (
    CODES_PER_WORD,
    F32_MAGNITUDE_MASK,
    F32_MAX_BITS,
    INT4_CODE_MAX,
    INT4_CODE_MIN,
    INT4_HALF_SPAN,
)

_ZERO, _ONE = np.float32(0), np.float32(1)
_INFINITY = np.float32(np.inf)
_CODE_MIN = np.float32(INT4_CODE_MIN)
_CODE_MAX = np.float32(INT4_CODE_MAX)
_CODE_SPAN = np.float32(-INT4_CODE_MIN)
_HALF_SPAN = np.float32(INT4_HALF_SPAN)
_MAGNITUDE = np.int32(F32_MAGNITUDE_MASK)
_LARGEST = np.int32(F32_MAX_BITS)
_SEED, _SLOPE = np.float32(POWER_SEED), np.float32(POWER_SLOPE)
_PREFERRED, _OTHER, _GO_ON = np.int32(1), np.int32(2), np.int32(4)
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
def _square(weight, scale, inverse):
    code = np.rint(weight * inverse)
    code = _CODE_MIN if code < _CODE_MIN else code
    code = _CODE_MAX if code > _CODE_MAX else code
    d = weight - code * scale
    return d * d


@njit(nogil=True, error_model="numpy")
def _power(weight, scale, inverse):
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
            e0 = _square(weights[at], s, i) + _square(weights[at + LANES], s, i)
            e2 = _square(weights[at + 2 * LANES], s, i) + _square(weights[at + 3 * LANES], s, i)
            e4 = _square(weights[at + 4 * LANES], s, i) + _square(weights[at + 5 * LANES], s, i)
            e6 = _square(weights[at + 6 * LANES], s, i) + _square(weights[at + 7 * LANES], s, i)
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
            e0 = _power(weights[at], s, i) + _power(weights[at + LANES], s, i)
            e2 = _power(weights[at + 2 * LANES], s, i) + _power(weights[at + 3 * LANES], s, i)
            e4 = _power(weights[at + 4 * LANES], s, i) + _power(weights[at + 5 * LANES], s, i)
            e6 = _power(weights[at + 6 * LANES], s, i) + _power(weights[at + 7 * LANES], s, i)
            error[lane] += (e0 + e2) + (e4 + e6)


@njit(nogil=True, error_model="numpy")
def _sum_errors(weights, scale, inverse, error, power):
    if power:
        _sum_powers(weights, scale, inverse, error)
    else:
        _sum_squares(weights, scale, inverse, error)


@njit(nogil=True, error_model="numpy")
def _agree(largest, inverse):
    """Whether both signs of a scale give the same error: the largest code is within both code ranges."""
    return abs(np.rint(largest * inverse)) <= _CODE_MAX


@njit(nogil=True, error_model="numpy")
def _state(largest, inverse, bound, bound_other, best):
    hopeful = np.int32(not bound >= best)
    differ = np.int32(not _agree(largest, inverse))
    hopeful_other = np.int32(np.int32(not bound_other >= best) & differ)
    clipped = abs(largest * inverse) >= _CODE_SPAN
    open_end = np.int32(hopeful | np.int32(np.int32(not bound_other >= best) | np.int32(not clipped)))
    # Lanes that keep the scale 1 are no reason to go on.
    open_end = np.int32(open_end & np.int32(best >= _ZERO))
    return np.int32(hopeful * _PREFERRED | hopeful_other * _OTHER | open_end * _GO_ON)


@njit(nogil=True, error_model="numpy")
def _bound_squares(largest, scale, inverse, best, state):
    """What may still beat `best` in each lane: flags _PREFERRED (scale), _OTHER (-scale), _GO_ON (smaller scales).

    Smaller scales may not, once the largest weight is beyond code -8 and its error alone is too much with both signs:
    it only grows as the scale shrinks (by more than the 2.4 power's inaccuracy, as scales are 2**-8 or more apart).
    """
    for lane in range(LANES):
        bound = _square(largest[lane], scale[lane], inverse[lane])
        bound_other = _square(largest[lane], -scale[lane], -inverse[lane])
        state[lane] = _state(largest[lane], inverse[lane], bound, bound_other, best[lane])


@njit(nogil=True, error_model="numpy")
def _bound_powers(largest, scale, inverse, best, state):
    """As `_bound_squares`, for the exponent 2.4."""
    for lane in range(LANES):
        bound = _power(largest[lane], scale[lane], inverse[lane])
        bound_other = _power(largest[lane], -scale[lane], -inverse[lane])
        state[lane] = _state(largest[lane], inverse[lane], bound, bound_other, best[lane])


@njit(nogil=True, error_model="numpy")
def absmax_scale(largest, scale):
    """bf16(|largest| / 7.5) of each lane into `scale` [LANES], and 1 where that is zero."""
    for lane in range(LANES):
        s = round_bf16(abs(largest[lane]) / _HALF_SPAN)
        scale[lane] = _ONE if s == _ZERO else s


@njit(nogil=True, error_model="numpy")
def _start(largest, signed, scale, sign, inverse):
    """Signs that give the largest weight the code range's longer end, -8, and the absmax scale's reciprocal."""
    for lane in range(LANES):
        sign[lane] = -_ONE if signed and largest[lane] > _ZERO else _ONE
        inverse[lane] = _ONE / scale[lane]


@njit(nogil=True, error_model="numpy")
def _keep_one(largest, best):
    """A group whose absmax scale is zero keeps the scale 1: no error is smaller than -1."""
    for lane in range(LANES):
        s = round_bf16(abs(largest[lane]) / _HALF_SPAN)
        best[lane] = -_ONE if s == _ZERO else best[lane]


@njit(nogil=True, error_model="numpy")
def _candidate(largest, factor, sign, s, inverse):
    for lane in range(LANES):
        positive = round_bf16(abs(largest[lane]) * factor / _HALF_SPAN)
        s[lane] = positive * sign[lane]
        inverse[lane] = _ONE / positive * sign[lane]


@njit(nogil=True, error_model="numpy")
def _negate(s, inverse):
    for lane in range(LANES):
        s[lane] = -s[lane]
        inverse[lane] = -inverse[lane]


@njit(nogil=True, error_model="numpy")
def _copy_agreeing(largest, inverse, preferred, other):
    for lane in range(LANES):
        other[lane] = preferred[lane] if _agree(largest[lane], inverse[lane]) else _INFINITY


@njit(nogil=True, error_model="numpy")
def _choose(sign, s, preferred, other, best, scale):
    """Takes +s when it is strictly better, then -s when that is."""
    for lane in range(LANES):
        positive = abs(s[lane])
        a, b, now, error = preferred[lane], other[lane], scale[lane], best[lane]
        plus = a if sign[lane] > _ZERO else b
        minus = b if sign[lane] > _ZERO else a
        now = positive if plus < error else now
        error = plus if plus < error else error
        scale[lane] = -positive if minus < error else now
        best[lane] = minus if minus < error else error


@njit(nogil=True, error_model="numpy")
def _union(flags):
    found = np.int32(0)
    for lane in range(LANES):
        found = np.int32(found | flags[lane])
    return found


@njit(nogil=True, error_model="numpy")
def search_scale(weights, largest, grid, signed, power, scale, rows, state):
    """Replaces the absmax `scale` [LANES] by the best of the grid, for weights [group * LANES] of largest [LANES].

    Working space: `rows`, six float32 [LANES], and `state`, int32 [LANES].
    """
    sign, s, inverse, best, preferred, other = rows
    _start(largest, signed, scale, sign, inverse)
    _sum_errors(weights, scale, inverse, best, power)
    _keep_one(largest, best)
    for lane in range(LANES):
        other[lane] = _INFINITY
    for k in range(grid.shape[0]):
        _candidate(largest, grid[k], sign, s, inverse)
        if power:
            _bound_powers(largest, s, inverse, best, state)
        else:
            _bound_squares(largest, s, inverse, best, state)
        flags = _union(state)
        if not flags & _GO_ON:
            break
        try_other = signed and flags & _OTHER
        if not (try_other or flags & _PREFERRED):
            continue
        _sum_errors(weights, s, inverse, preferred, power)
        if try_other:
            _negate(s, inverse)
            _sum_errors(weights, s, inverse, other, power)
        elif signed:
            _copy_agreeing(largest, inverse, preferred, other)
        _choose(sign, s, preferred, other, best, scale)
