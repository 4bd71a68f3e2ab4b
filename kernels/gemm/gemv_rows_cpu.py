"""Products of one row with a BF16 weight, for numba: a decode step's, where torch's GEMM is mostly its own start.

A weight is read once, four rows at a time; sums are float32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.rows.row_values_cpu import narrow, widen

_SUMS = {"reassoc", "contract"}
_ZERO = np.float32(0)


@njit(nogil=True, error_model="numpy", fastmath=_SUMS)
def _dot_rows(x, weight, sums):
    """sums [N] = weight [N, K] @ x [K], float32."""
    num_rows, size = weight.shape
    whole = num_rows - num_rows % 4
    for n in range(0, whole, 4):
        w0, w1, w2, w3 = weight[n], weight[n + 1], weight[n + 2], weight[n + 3]
        s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
        for k in range(size):
            value = x[k]
            s0 += value * widen(w0[k])
            s1 += value * widen(w1[k])
            s2 += value * widen(w2[k])
            s3 += value * widen(w3[k])
        sums[n], sums[n + 1], sums[n + 2], sums[n + 3] = s0, s1, s2, s3
    for n in range(whole, num_rows):
        total = _ZERO
        for k in range(size):
            total += x[k] * widen(weight[n, k])
        sums[n] = total


@njit(nogil=True, error_model="numpy", fastmath=_SUMS)
def _add_rows(x, weight, sums):
    """sums [N] = x [K] @ weight [K, N], float32."""
    size = weight.shape[0]
    whole = size - size % 4
    sums[:] = _ZERO
    for k in range(0, whole, 4):
        x0, x1, x2, x3 = x[k], x[k + 1], x[k + 2], x[k + 3]
        w0, w1, w2, w3 = weight[k], weight[k + 1], weight[k + 2], weight[k + 3]
        for n in range(sums.shape[0]):
            sums[n] += (x0 * widen(w0[n]) + x1 * widen(w1[n])) + (x2 * widen(w2[n]) + x3 * widen(w3[n]))
    for k in range(whole, size):
        x0, w0 = x[k], weight[k]
        for n in range(sums.shape[0]):
            sums[n] += x0 * widen(w0[n])


@njit(nogil=True, error_model="numpy")
def multiply_row(x, weight, product):
    """product [1, N] = x [1, K] @ weight [N, K].T, all BF16 bits."""
    values, sums = np.empty(x.shape[1], np.float32), np.empty(weight.shape[0], np.float32)
    for k in range(x.shape[1]):
        values[k] = widen(x[0, k])
    _dot_rows(values, weight, sums)
    for n in range(sums.shape[0]):
        product[0, n] = narrow(sums[n], product)


@njit(nogil=True, error_model="numpy")
def multiply_heads(x, weights, is_transposed, product):
    """product [1, H, N] = x [1, H, K] @ weights [H, K, N], or [H, N, K] if `is_transposed`; all BF16 bits."""
    values, sums = np.empty(x.shape[2], np.float32), np.empty(product.shape[2], np.float32)
    for h in range(weights.shape[0]):
        for k in range(x.shape[2]):
            values[k] = widen(x[0, h, k])
        if is_transposed:
            _dot_rows(values, weights[h], sums)
        else:
            _add_rows(values, weights[h], sums)
        for n in range(sums.shape[0]):
            product[0, h, n] = narrow(sums[n], product)
