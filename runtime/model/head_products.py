"""Products with a matrix of every head: absorption into MLA's latent, and back out of it."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.gemm.few_rows_matmul_cpu import few_rows_head_matmul, is_small_product
from memopt.kernels.gemm.gemv_cpu import is_single_row, row_head_matmul
from memopt.kernels.gemm.row_tiles import ROW_TILE, is_tiled


def head_matmul(x: Tensor, weights: Tensor) -> Tensor:
    """[R, H, N] of x [R, H, K] and a matrix [H, K, N] for each head, contiguous, in x's type.

    For float32 on the CPU a row's bits depend on that row and the weights alone: it is ROW_TILE rows at a time.
    """
    num_rows, num_heads, _ = x.shape
    if not is_tiled(x):
        if is_single_row(x, weights):
            return row_head_matmul(x, weights)
        if is_small_product(x, weights):
            return few_rows_head_matmul(x, weights)
        return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1).contiguous()
    product = x.new_empty(num_rows, num_heads, weights.shape[2])
    for first in range(0, num_rows, ROW_TILE):
        rows = x[first : first + ROW_TILE]
        tile = x.new_zeros(num_heads, ROW_TILE, x.shape[2])
        tile[:, : rows.shape[0]] = rows.transpose(0, 1)
        product[first : first + ROW_TILE] = torch.bmm(tile, weights)[:, : rows.shape[0]].transpose(0, 1)
    return product
