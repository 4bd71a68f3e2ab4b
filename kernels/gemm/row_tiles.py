"""Float32 products on the CPU whose rows do not depend on each other: always 16 rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from memopt.kernels.gemm.few_rows_matmul_cpu import few_rows_matmul, is_small_product
from memopt.kernels.gemm.gemv_cpu import is_single_row, row_matmul
from memopt.kernels.layout import BITS_PER_BYTE, F32_BITS

# MKL sums a row in another order for 1, 2 or 3 rows than for 16, but in one order at every place of a full tile
# (measured; tests/kernels/gemm/test_row_tiles.py repeats it). 16 is also what the INT4 kernels take at once.
ROW_TILE = 16
# The order also depends on how a row lies in memory: every row must start at a multiple of a vector register, which is
# where torch allocates.
_ALIGNMENT_BYTES = 64
_ALIGNMENT_COLUMNS = _ALIGNMENT_BYTES * BITS_PER_BYTE // F32_BITS


def is_tiled(x: Tensor) -> bool:
    """Whether products with `x` are row-invariant: float32 on the CPU."""
    return x.dtype == torch.float32 and x.device.type == "cpu"


def padded_rows(x: Tensor) -> Tensor:
    """`x` [M, K] with zero rows behind it up to a multiple of ROW_TILE, contiguous and aligned."""
    missing = -x.shape[0] % ROW_TILE
    if missing:
        return torch.cat((x, x.new_zeros(missing, x.shape[1])))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT_BYTES else x


def tiled_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """[M, N] = x [M, K] @ weight.T of a weight [N, K] of x's type; sums are float32 or better.

    For float32 on the CPU a row's bits depend on that row and the weight alone. Else this is torch's product, but for
    a single row (gemv_cpu.py) and small products (few_rows_matmul_cpu.py) on the CPU.
    """
    if not is_tiled(x):
        if x.dtype == torch.bfloat16 and weight.is_contiguous():
            if is_single_row(x, weight):
                return row_matmul(x, weight)
            if is_small_product(x, weight):
                return few_rows_matmul(x, weight)
        return x @ weight.T
    missing = -x.shape[1] % _ALIGNMENT_COLUMNS
    if missing:
        x, weight = pad(x, (0, missing)), pad(weight, (0, missing))
    rows = padded_rows(x)
    product = rows.new_empty(rows.shape[0], weight.shape[0])
    for first in range(0, rows.shape[0], ROW_TILE):
        tile = slice(first, first + ROW_TILE)
        torch.mm(rows[tile], weight.T, out=product[tile])
    return product[: x.shape[0]]
