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

from memopt.kernels.cpu_number import round_bf16
from memopt.kernels.cpu_search_error import POWERS, SQUARES, power_error, square_error, sum_errors
from memopt.kernels.cpu_tile import LANES
from memopt.kernels.layout import INT4_CODE_MAX, INT4_CODE_MIN, INT4_HALF_SPAN

_ZERO, _ONE = np.float32(0), np.float32(1)
_INFINITY = np.float32(np.inf)
_CODE_MAX = np.float32(INT4_CODE_MAX)
_CODE_SPAN = np.float32(-INT4_CODE_MIN)
_HALF_SPAN = np.float32(INT4_HALF_SPAN)
# Rows of working space that `search_scale` needs.
SEARCH_ROWS = 7
_PREFERRED, _OTHER, _GO_ON = np.int32(1), np.int32(2), np.int32(4)


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
        bound = square_error(largest[lane], scale[lane], inverse[lane])
        bound_other = square_error(largest[lane], -scale[lane], -inverse[lane])
        state[lane] = _state(largest[lane], inverse[lane], bound, bound_other, best[lane])


@njit(nogil=True, error_model="numpy")
def _bound_powers(largest, scale, inverse, best, state):
    """As `_bound_squares`, for the exponent 2.4."""
    for lane in range(LANES):
        bound = power_error(largest[lane], scale[lane], inverse[lane])
        bound_other = power_error(largest[lane], -scale[lane], -inverse[lane])
        state[lane] = _state(largest[lane], inverse[lane], bound, bound_other, best[lane])


@njit(nogil=True, error_model="numpy")
def _bound_weighted(largest, largest_importance, scale, inverse, best, state):
    """As `_bound_squares`, for weighted squares: of the largest weight too, times what it counts for."""
    for lane in range(LANES):
        bound = square_error(largest[lane], scale[lane], inverse[lane]) * largest_importance[lane]
        bound_other = square_error(largest[lane], -scale[lane], -inverse[lane]) * largest_importance[lane]
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
def _importance_of_largest(weights, importance, largest, found):
    """What each lane's largest weight counts for, into `found`; of equal ones the last: each bounds the sum."""
    for lane in range(LANES):
        found[lane] = _ZERO
    for k in range(weights.shape[0] // LANES):
        at = k * LANES
        for lane in range(LANES):
            is_largest = weights[at + lane] == largest[lane]
            found[lane] = importance[at + lane] if is_largest else found[lane]


@njit(nogil=True, error_model="numpy")
def search_scale(weights, importance, largest, grid, signed, kind, scale, rows, state):
    """Replaces the absmax `scale` [LANES] by the best of the grid, for weights [group * LANES] of largest [LANES].

    `kind` and `importance` as for `sum_errors`. Working space: `rows`, float32 [SEARCH_ROWS, LANES], and `state`,
    int32 [LANES].
    """
    sign, s, inverse, best, preferred, other = rows[0], rows[1], rows[2], rows[3], rows[4], rows[5]
    largest_importance = rows[6]
    _start(largest, signed, scale, sign, inverse)
    sum_errors(weights, importance, scale, inverse, best, kind)
    _keep_one(largest, best)
    for lane in range(LANES):
        other[lane] = _INFINITY
    if kind != SQUARES and kind != POWERS:
        _importance_of_largest(weights, importance, largest, largest_importance)
    for k in range(grid.shape[0]):
        _candidate(largest, grid[k], sign, s, inverse)
        if kind == POWERS:
            _bound_powers(largest, s, inverse, best, state)
        elif kind == SQUARES:
            _bound_squares(largest, s, inverse, best, state)
        else:
            _bound_weighted(largest, largest_importance, s, inverse, best, state)
        flags = _union(state)
        if not flags & _GO_ON:
            break
        try_other = signed and flags & _OTHER
        if not (try_other or flags & _PREFERRED):
            continue
        sum_errors(weights, importance, s, inverse, preferred, kind)
        if try_other:
            _negate(s, inverse)
            sum_errors(weights, importance, s, inverse, other, kind)
        elif signed:
            _copy_agreeing(largest, inverse, preferred, other)
        _choose(sign, s, preferred, other, best, scale)
