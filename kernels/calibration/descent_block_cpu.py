"""One column block of coordinate descent on a CPU with numba: rows side by side in vector registers.

As in gptq_block_cpu.py, a column is corrected by those before it when its turn comes: the reference's operations on
it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from torch import Tensor

from memopt.kernels import layout
from memopt.kernels.compile_cache import compiled, source_digest
from memopt.kernels.layout import INT4_CODE_MAX, INT4_CODE_MIN

TILE_ROWS = 64
_MIN, _MAX = np.float32(INT4_CODE_MIN), np.float32(INT4_CODE_MAX)


def descend_block_cpu(gradient: Tensor, hessian: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Changes `codes` of a block, expert after expert; arguments and bits as for the reference."""
    descend = _entry()
    arrays = [tensor.numpy() for tensor in (gradient, hessian, scale, codes)]
    for expert in range(codes.shape[0]):
        descend(*(array[expert] for array in arrays))


@cache
def _entry() -> Callable[..., None]:
    key = source_digest(layout.__file__, __file__)

    @compiled
    def descend(gradient, hessian, scale, codes):
        key  # noqa: B018 - makes it a closure variable
        num_columns, num_rows = codes.shape
        left = np.empty(TILE_ROWS, np.float32)
        changes = np.zeros((num_columns, TILE_ROWS), np.float32)
        for first in range(0, num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, num_rows - first)
            for j in range(num_columns):
                for r in range(rows):
                    left[r] = gradient[j, first + r]
                for i in range(j):
                    factor = hessian[i, j]
                    for r in range(TILE_ROWS):
                        left[r] -= factor * changes[i, r]
                diagonal = hessian[j, j]
                for r in range(rows):
                    s = scale[first + r]
                    value = np.float32(codes[j, first + r]) * s
                    target = (value + left[r] / diagonal) / s
                    code = np.rint(min(max(target, _MIN), _MAX))
                    changes[j, r] = code * s - value
                    codes[j, first + r] = np.int8(code)
                for r in range(rows, TILE_ROWS):
                    changes[j, r] = np.float32(0)

    return descend
