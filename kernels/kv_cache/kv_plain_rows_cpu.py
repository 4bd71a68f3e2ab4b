"""Rows of BF16 or float32 into a pool without scales, for numba. BF16 is passed as its bits, a pool as one line."""

from __future__ import annotations

from numba import njit

from memopt.kernels.layout import PAGE_TOKENS
from memopt.kernels.rows.row_values_cpu import narrow, widen


@njit(nogil=True, error_model="numpy")
def store_plain(values, slots, num_slots, page_stride, token_stride, pool):
    """Writes values [T, C] to the tokens at slots int64 [T]; a negative slot is skipped.

    Rounds float32 to BF16 where the pool is BF16. Returns the first token whose slot is not below `num_slots`, else -1.
    """
    is_same = values.dtype == pool.dtype
    for token in range(values.shape[0]):
        slot = slots[token]
        if slot < 0:
            continue
        if slot >= num_slots:
            return token
        start = slot // PAGE_TOKENS * page_stride + slot % PAGE_TOKENS * token_stride
        target, source = pool[start : start + values.shape[1]], values[token]
        for i in range(values.shape[1]):
            # The very bits of a BF16 NaN are kept.
            target[i] = source[i] if is_same else narrow(widen(source[i]), pool)
    return -1
