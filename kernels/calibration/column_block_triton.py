"""What the kernels of a block of columns share: a tile of rows in registers, one of its columns, a column's codes."""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from memopt.errors import UsageError
from memopt.kernels.layout import GPTQ_BLOCK_COLUMNS, INT4_CODE_MAX, INT4_CODE_MIN

# Rows a program. One warp, so that the sum that picks a column out of the registers crosses no warp.
BLOCK_ROWS = 32
NUM_WARPS = 1
# 1.5 * 2**23: added to a float32 of magnitude below 2**22 and subtracted again, it rounds to nearest, ties to even.
_ROUNDING = tl.constexpr(12582912.0)
_CODE_MIN, _CODE_MAX = tl.constexpr(float(INT4_CODE_MIN)), tl.constexpr(float(INT4_CODE_MAX))


@triton.jit
def load_block(pointer, column, row, num_columns, num_rows):
    """float32 [columns, rows] of a block whose columns lie `num_rows` apart; 0 outside of it."""
    inside = (column[:, None] < num_columns) & (row[None, :] < num_rows)
    return tl.load(pointer + column[:, None].to(tl.int64) * num_rows + row[None, :], mask=inside, other=0.0)


@triton.jit
def column_of(block, column, j):
    """float32 [rows]: column `j` of `block`."""
    return tl.sum(tl.where(column[:, None] == j, block, 0.0), axis=0)


@triton.jit
def nearest_code(ratio):
    """The INT4 code next to float32 `ratio`, as float32."""
    return (tl.minimum(tl.maximum(ratio, _CODE_MIN), _CODE_MAX) + _ROUNDING) - _ROUNDING


def block_columns(num_columns: int) -> int:
    """Columns of the tile for a block of `num_columns`, a power of two. UsageError above GPTQ_BLOCK_COLUMNS."""
    if num_columns > GPTQ_BLOCK_COLUMNS:
        raise UsageError(
            f"a block of {num_columns} columns does not fit the registers",
            remedy=f"take {GPTQ_BLOCK_COLUMNS} columns or fewer at a time",
        )
    return max(triton.next_power_of_2(num_columns), 2)
