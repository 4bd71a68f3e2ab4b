"""One column block of coordinate descent on a GPU: one launch for all experts, a tile's gradients in registers."""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.calibration.column_block_triton import (
    BLOCK_ROWS,
    NUM_WARPS,
    block_columns,
    column_of,
    load_block,
    nearest_code,
)
from memopt.kernels.device.current_device import on_tensors_device


@triton.jit
def descent_block_kernel(
    gradient,
    hessian,
    scale,
    codes,
    num_columns,
    num_rows,
    gradient_stride,
    hessian_stride,
    hessian_row_stride,
    scale_stride,
    codes_stride,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """`BLOCK_ROWS` rows of one expert. Strides are of the expert dimension; a column's rows lie side by side."""
    expert = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    live = row < num_rows
    gradient += expert * gradient_stride
    hessian += expert * hessian_stride
    codes += expert * codes_stride + row
    diagonal = hessian
    left = load_block(gradient, column, row, num_columns, num_rows)
    row_scale = tl.load(scale + expert * scale_stride + row, mask=live, other=1.0)
    for j in range(0, num_columns):
        value = tl.load(codes, mask=live, other=0).to(tl.float32) * row_scale
        slope = column_of(left, column, j)
        code = nearest_code(tl.div_rn(value + tl.div_rn(slope, tl.load(diagonal)), row_scale))
        change = code * row_scale - value
        tl.store(codes, code.to(tl.int8), mask=live)
        behind = (column > j) & (column < num_columns)
        factor = tl.load(hessian + column, mask=behind, other=0.0)
        left = left - factor[:, None] * change[None, :]
        diagonal += hessian_row_stride + 1
        hessian += hessian_row_stride
        codes += num_rows


@on_tensors_device
def descend_block_triton(gradient: Tensor, hessian: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Changes `codes` of a block for all experts in one launch; arguments and bits as for the reference.

    Tensors may be slices of larger ones, but rows [R] must lie side by side and columns R apart. Raises UsageError for
    more than GPTQ_BLOCK_COLUMNS columns.
    """
    num_experts, num_columns, num_rows = codes.shape
    tile_columns = block_columns(num_columns)
    if codes.numel() == 0:
        return
    descent_block_kernel[(triton.cdiv(num_rows, BLOCK_ROWS), num_experts)](
        gradient,
        hessian,
        scale,
        codes,
        num_columns,
        num_rows,
        gradient.stride(0),
        hessian.stride(0),
        hessian.stride(1),
        scale.stride(0),
        codes.stride(0),
        BLOCK_COLUMNS=tile_columns,
        BLOCK_ROWS=BLOCK_ROWS,
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
