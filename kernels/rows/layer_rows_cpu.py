"""What stands between a layer's products, row by row, for numba: norm, rotary embedding, activation, latents.

Each is one pass where torch makes six. Rows are computed alone, so a row's bits do not depend on the others. Arrays are
float32, or BF16 bits; results are rounded where runtime/model and silu_mul.py, the references, round.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.kernels.rows.row_values_cpu import exp_float32, narrow, widen

_ZERO, _ONE = np.float32(0), np.float32(1)


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _sum_of_squares(row):
    total = _ZERO
    for i in range(row.shape[0]):
        value = widen(row[i])
        total += value * value
    return total


@njit(nogil=True, error_model="numpy")
def _norm_row(row, weight, eps, out):
    """weight * row / rms(row); the quotient is rounded to the row's type before it is weighed."""
    scale = np.float32(_ONE / np.sqrt(np.float32(_sum_of_squares(row) / np.float32(row.shape[0]) + eps)))
    for i in range(row.shape[0]):
        quotient = widen(narrow(np.float32(widen(row[i]) * scale), out))
        out[i] = narrow(np.float32(widen(weight[i]) * quotient), out)


@njit(nogil=True, error_model="numpy")
def _rotate_row(row, cos, sin, is_interleaved, out):
    """Pairs of a row turned by the row's angles; their first elements first, then the second ones."""
    half = cos.shape[0]
    for i in range(half):
        a = widen(row[2 * i] if is_interleaved else row[i])
        b = widen(row[2 * i + 1] if is_interleaved else row[half + i])
        out[i] = narrow(np.float32(np.float32(a * cos[i]) - np.float32(b * sin[i])), out)
        out[half + i] = narrow(np.float32(np.float32(b * cos[i]) + np.float32(a * sin[i])), out)


@njit(nogil=True, error_model="numpy")
def norm_rows(x, weight, eps, out):
    """RMS norm of x [M, H] into out [M, H]."""
    for m in range(x.shape[0]):
        _norm_row(x[m], weight, eps, out[m])


@njit(nogil=True, error_model="numpy")
def rotate_heads(x, cos, sin, is_interleaved, out):
    """Turns the first S of x [R, heads, K] by cos and sin [R, S / 2] into out [R, heads, N]; then the rest, then 0."""
    turned = 2 * cos.shape[1]
    for r in range(x.shape[0]):
        for h in range(x.shape[1]):
            _rotate_row(x[r, h], cos[r], sin[r], is_interleaved, out[r, h])
            for i in range(turned, x.shape[2]):
                out[r, h, i] = x[r, h, i]
            for i in range(x.shape[2], out.shape[2]):
                out[r, h, i] = 0


@njit(nogil=True, error_model="numpy")
def silu_mul_rows(gate_up, out):
    """silu(gate) * up of gate_up [T, 2 * I], the gate's I first, into out [T, I]."""
    size = out.shape[1]
    for t in range(gate_up.shape[0]):
        gate, up, target = gate_up[t, :size], gate_up[t, size:], out[t]
        for i in range(size):
            value = widen(gate[i])
            target[i] = narrow(
                np.float32(np.float32(value / np.float32(_ONE + exp_float32(-value))) * widen(up[i])), out
            )


@njit(nogil=True, error_model="numpy")
def key_rows(kv, weight, eps, cos, sin, is_interleaved, rope_offset, out):
    """MLA's keys as a pool has them: kv [R, L + S] to out [R, .], latent normed, rope turned, from `rope_offset`.

    What lies between and behind is set to 0.
    """
    latent_size = weight.shape[0]
    rope_size = kv.shape[1] - latent_size
    for r in range(kv.shape[0]):
        row = out[r]
        _norm_row(kv[r, :latent_size], weight, eps, row[:latent_size])
        row[latent_size:rope_offset] = 0
        _rotate_row(kv[r, latent_size:], cos[r], sin[r], is_interleaved, row[rope_offset : rope_offset + rope_size])
        row[rope_offset + rope_size :] = 0
