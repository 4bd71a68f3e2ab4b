"""Products of a few rows with a BF16 weight, for numba: a decode step's, where torch's GEMM is mostly its own start.

Blocks of four rows by four weights stay in registers, so that a weight is read once for four rows; sums are float32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.rows.row_values_cpu import narrow, widen

_SUMS = {"reassoc", "contract"}
_ZERO = np.float32(0)
# Rows, and weights, of a block: sixteen sums, eight operands and what is being widened fill the registers.
BLOCK = 4


@njit(nogil=True, error_model="numpy", fastmath=_SUMS)
def _dot_block(x, weight, m, n, sums):
    """sums [n to n + 4, m to m + 4] = weight [N, K] @ x [M, K].T of these places, float32."""
    x0, x1, x2, x3 = x[m], x[m + 1], x[m + 2], x[m + 3]
    w0, w1, w2, w3 = weight[n], weight[n + 1], weight[n + 2], weight[n + 3]
    s00, s01, s02, s03, s10, s11, s12, s13 = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
    s20, s21, s22, s23, s30, s31, s32, s33 = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
    for k in range(x.shape[1]):
        a0, a1, a2, a3 = x0[k], x1[k], x2[k], x3[k]
        b0, b1, b2, b3 = widen(w0[k]), widen(w1[k]), widen(w2[k]), widen(w3[k])
        s00 += b0 * a0
        s01 += b0 * a1
        s02 += b0 * a2
        s03 += b0 * a3
        s10 += b1 * a0
        s11 += b1 * a1
        s12 += b1 * a2
        s13 += b1 * a3
        s20 += b2 * a0
        s21 += b2 * a1
        s22 += b2 * a2
        s23 += b2 * a3
        s30 += b3 * a0
        s31 += b3 * a1
        s32 += b3 * a2
        s33 += b3 * a3
    # Into `sums` itself: numba takes stores into views of it for dead once `widen` was inlined.
    sums[n, m], sums[n, m + 1], sums[n, m + 2], sums[n, m + 3] = s00, s01, s02, s03
    sums[n + 1, m], sums[n + 1, m + 1], sums[n + 1, m + 2], sums[n + 1, m + 3] = s10, s11, s12, s13
    sums[n + 2, m], sums[n + 2, m + 1], sums[n + 2, m + 2], sums[n + 2, m + 3] = s20, s21, s22, s23
    sums[n + 3, m], sums[n + 3, m + 1], sums[n + 3, m + 2], sums[n + 3, m + 3] = s30, s31, s32, s33


@njit(nogil=True, error_model="numpy", fastmath=_SUMS)
def _dot_rest(x, weight, n, sums):
    """sums [n, M] = weight [n, K] @ x [M, K].T, float32."""
    row = weight[n]
    for m in range(x.shape[0]):
        total = _ZERO
        for k in range(x.shape[1]):
            total += widen(row[k]) * x[m, k]
        sums[n, m] = total


@njit(nogil=True, error_model="numpy", fastmath=_SUMS)
def _add_block(x, weight, m, sums):
    """sums [m to m + 4, N] = x [M, K] @ weight [K, N] of these rows, float32; four rows of the weight to a pass."""
    t0, t1, t2, t3 = sums[m], sums[m + 1], sums[m + 2], sums[m + 3]
    t0[:], t1[:], t2[:], t3[:] = _ZERO, _ZERO, _ZERO, _ZERO
    x0, x1, x2, x3 = x[m], x[m + 1], x[m + 2], x[m + 3]
    whole = weight.shape[0] - weight.shape[0] % BLOCK
    for k in range(0, whole, BLOCK):
        w0, w1, w2, w3 = weight[k], weight[k + 1], weight[k + 2], weight[k + 3]
        a0, a1, a2, a3 = x0[k], x0[k + 1], x0[k + 2], x0[k + 3]
        b0, b1, b2, b3 = x1[k], x1[k + 1], x1[k + 2], x1[k + 3]
        c0, c1, c2, c3 = x2[k], x2[k + 1], x2[k + 2], x2[k + 3]
        d0, d1, d2, d3 = x3[k], x3[k + 1], x3[k + 2], x3[k + 3]
        for n in range(weight.shape[1]):
            v0, v1, v2, v3 = widen(w0[n]), widen(w1[n]), widen(w2[n]), widen(w3[n])
            t0[n] += (a0 * v0 + a1 * v1) + (a2 * v2 + a3 * v3)
            t1[n] += (b0 * v0 + b1 * v1) + (b2 * v2 + b3 * v3)
            t2[n] += (c0 * v0 + c1 * v1) + (c2 * v2 + c3 * v3)
            t3[n] += (d0 * v0 + d1 * v1) + (d2 * v2 + d3 * v3)
    for k in range(whole, weight.shape[0]):
        w0, a0, b0, c0, d0 = weight[k], x0[k], x1[k], x2[k], x3[k]
        for n in range(weight.shape[1]):
            value = widen(w0[n])
            t0[n] += a0 * value
            t1[n] += b0 * value
            t2[n] += c0 * value
            t3[n] += d0 * value


@njit(nogil=True, error_model="numpy")
def _dot_all(x, weight, sums):
    """sums [N, M] = weight [N, K] @ x [M, K].T, float32; M is a multiple of BLOCK."""
    whole = weight.shape[0] - weight.shape[0] % BLOCK
    for n in range(0, whole, BLOCK):
        for m in range(0, x.shape[0], BLOCK):
            _dot_block(x, weight, m, n, sums)
    for n in range(whole, weight.shape[0]):
        _dot_rest(x, weight, n, sums)


@njit(nogil=True, error_model="numpy")
def multiply_few_rows(x, weight, product):
    """product [M, N] = x [M, K] @ weight [N, K].T, all BF16 bits."""
    num_rows = x.shape[0]
    values = np.zeros((-(-num_rows // BLOCK) * BLOCK, x.shape[1]), np.float32)
    sums = np.empty((weight.shape[0], values.shape[0]), np.float32)
    for m in range(num_rows):
        for k in range(x.shape[1]):
            values[m, k] = widen(x[m, k])
    _dot_all(values, weight, sums)
    for m in range(num_rows):
        for n in range(weight.shape[0]):
            product[m, n] = narrow(sums[n, m], product)


@njit(nogil=True, error_model="numpy")
def multiply_few_heads(x, weights, is_transposed, product):
    """product [M, H, N] = x [M, H, K] @ weights [H, K, N], or [H, N, K] if `is_transposed`; all BF16 bits."""
    num_rows, num_heads, size = product.shape
    values = np.zeros((-(-num_rows // BLOCK) * BLOCK, x.shape[2]), np.float32)
    by_column, by_row = np.empty((size, values.shape[0]), np.float32), np.empty((values.shape[0], size), np.float32)
    for h in range(num_heads):
        for m in range(num_rows):
            for k in range(x.shape[2]):
                values[m, k] = widen(x[m, h, k])
        if is_transposed:
            _dot_all(values, weights[h], by_column)
            for m in range(num_rows):
                for n in range(size):
                    product[m, h, n] = narrow(by_column[n, m], product)
        else:
            for m in range(0, values.shape[0], BLOCK):
                _add_block(values, weights[h], m, by_row)
            for m in range(num_rows):
                for n in range(size):
                    product[m, h, n] = narrow(by_row[m, n], product)
