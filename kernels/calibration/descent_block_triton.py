"""One column block of coordinate descent on a GPU: one launch for all experts, a tile's gradients in registers."""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from memopt.errors import UsageError
from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.layout import GPTQ_BLOCK_COLUMNS, INT4_CODE_MAX, INT4_CODE_MIN

# As in gptq_block_triton.py: one warp, so that the sum that picks a column out of the registers crosses no warp.
BLOCK_ROWS = 32
NUM_WARPS = 1
# 1.5 * 2**23: added to a float32 of magnitude below 2**22 and subtracted again, it rounds to nearest, ties to even.
ROUNDING = tl.constexpr(12582912.0)
CODE_MIN, CODE_MAX = tl.constexpr(float(INT4_CODE_MIN)), tl.constexpr(float(INT4_CODE_MAX))


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
    inside = (column[:, None] < num_columns) & live[None, :]
    left = tl.load(gradient + column[:, None].to(tl.int64) * num_rows + row[None, :], mask=inside, other=0.0)
    row_scale = tl.load(scale + expert * scale_stride + row, mask=live, other=1.0)
    for j in range(0, num_columns):
        value = tl.load(codes, mask=live, other=0).to(tl.float32) * row_scale
        slope = tl.sum(tl.where(column[:, None] == j, left, 0.0), axis=0)
        target = tl.div_rn(value + tl.div_rn(slope, tl.load(diagonal)), row_scale)
        code = (tl.minimum(tl.maximum(target, CODE_MIN), CODE_MAX) + ROUNDING) - ROUNDING
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
    if num_columns > GPTQ_BLOCK_COLUMNS:
        raise UsageError(
            f"a block of {num_columns} columns does not fit the registers",
            remedy=f"descend {GPTQ_BLOCK_COLUMNS} columns or fewer at a time",
        )
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
        BLOCK_COLUMNS=max(triton.next_power_of_2(num_columns), 2),
        BLOCK_ROWS=BLOCK_ROWS,
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
