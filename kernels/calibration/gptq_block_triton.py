"""One column block of GPTQ on a GPU: one launch for all experts, the block of a tile of rows kept in registers."""

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
def gptq_block_kernel(
    weights,
    factor,
    scales,
    groups,
    codes,
    errors,
    num_columns,
    num_rows,
    weights_stride,
    factor_stride,
    factor_row_stride,
    scales_stride,
    groups_stride,
    codes_stride,
    errors_stride,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """`BLOCK_ROWS` rows of one expert. Strides are of the expert dimension; a column's rows lie side by side."""
    expert = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    live = row < num_rows
    weights += expert * weights_stride
    factor += expert * factor_stride
    scales += expert * scales_stride
    groups += expert * groups_stride
    codes += expert * codes_stride
    errors += expert * errors_stride
    # Pointers that walk along, not offsets of j: j in 64 bits would make each comparison with it two instructions.
    codes += row
    errors += row
    diagonal = factor
    left = load_block(weights, column, row, num_columns, num_rows)
    for j in range(0, num_columns):
        group = tl.load(groups).to(tl.int64)
        scale = tl.load(scales + group * num_rows + row, mask=live, other=1.0)
        weight = column_of(left, column, j)
        code = nearest_code(tl.div_rn(weight, scale))
        error = tl.div_rn(weight - code * scale, tl.load(diagonal))
        tl.store(codes, code.to(tl.int8), mask=live)
        tl.store(errors, error, mask=live)
        behind = (column > j) & (column < num_columns)
        correction = tl.load(factor + column, mask=behind, other=0.0)
        left = left - correction[:, None] * error[None, :]
        groups += 1
        diagonal += factor_row_stride + 1
        factor += factor_row_stride
        codes += num_rows
        errors += num_rows


@on_tensors_device
def gptq_block_triton(
    weights: Tensor, factor: Tensor, scales: Tensor, groups: Tensor, codes: Tensor, errors: Tensor
) -> None:
    """Fills `codes` and `errors` of a block for all experts in one launch; arguments and bits as for the reference.

    Tensors may be slices of larger ones, but rows [R] must lie side by side and columns R apart. Raises UsageError for
    more than GPTQ_BLOCK_COLUMNS columns.
    """
    num_experts, num_columns, num_rows = weights.shape
    tile_columns = block_columns(num_columns)
    if weights.numel() == 0:
        return
    gptq_block_kernel[(triton.cdiv(num_rows, BLOCK_ROWS), num_experts)](
        weights,
        factor,
        scales,
        groups,
        codes,
        errors,
        num_columns,
        num_rows,
        weights.stride(0),
        factor.stride(0),
        factor.stride(1),
        scales.stride(0),
        groups.stride(0),
        codes.stride(0),
        errors.stride(0),
        BLOCK_COLUMNS=tile_columns,
        BLOCK_ROWS=BLOCK_ROWS,
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
