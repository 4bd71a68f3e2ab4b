"""One column block of GPTQ on a CPU with numba: rows side by side in vector registers, columns one after another.

A column is corrected by all columns before it when its turn comes: the same operations on it, in the same order, as
when each column corrects those behind, but the tile is written once. It runs on the calling thread, without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from torch import Tensor

from memopt.kernels import layout
from memopt.kernels.compile_cache import compiled, source_digest
from memopt.kernels.layout import INT4_CODE_MAX, INT4_CODE_MIN

# Rows at a time: 128 columns of errors are then 32 KiB, which stay in the first cache.
TILE_ROWS = 64
_MIN, _MAX = np.float32(INT4_CODE_MIN), np.float32(INT4_CODE_MAX)


def gptq_block_cpu(
    weights: Tensor, factor: Tensor, scales: Tensor, groups: Tensor, codes: Tensor, errors: Tensor
) -> None:
    """Fills `codes` and `errors` of a block, expert after expert; arguments and bits as for the reference."""
    solve = _entry()
    arrays = [tensor.numpy() for tensor in (weights, factor, scales, groups, codes, errors)]
    for expert in range(weights.shape[0]):
        solve(*(array[expert] for array in arrays))


@cache
def _entry() -> Callable[..., None]:
    # Closed over, so that numba's cache knows every file that the compiled code depends on (kernels/cpu_entry.py).
    key = source_digest(layout.__file__, __file__)

    @compiled
    def solve(weights, factor, scales, groups, codes, errors):
        key  # noqa: B018 - makes it a closure variable
        num_columns, num_rows = weights.shape
        left = np.empty(TILE_ROWS, np.float32)
        tile = np.empty((num_columns, TILE_ROWS), np.float32)
        for first in range(0, num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, num_rows - first)
            for j in range(num_columns):
                for r in range(rows):
                    left[r] = weights[j, first + r]
                for i in range(j):
                    correction = factor[i, j]
                    for r in range(TILE_ROWS):
                        left[r] -= correction * tile[i, r]
                diagonal = factor[j, j]
                scale = scales[groups[j]]
                for r in range(rows):
                    ratio = min(max(left[r] / scale[first + r], _MIN), _MAX)
                    code = np.rint(ratio)
                    error = (left[r] - code * scale[first + r]) / diagonal
                    tile[j, r] = error
                    codes[j, first + r] = np.int8(code)
                    errors[j, first + r] = error
                for r in range(rows, TILE_ROWS):
                    tile[j, r] = np.float32(0)

    return solve
