"""The kernel of a block of coordinate descent for the gate: a group of the recipes, and the longest block."""

from __future__ import annotations

from compiled.case import CompileCase
from memopt.kernels.calibration.column_block_triton import BLOCK_ROWS, NUM_WARPS
from memopt.kernels.calibration.descent_block_triton import descent_block_kernel
from memopt.kernels.layout import GPTQ_BLOCK_COLUMNS, INT4_GROUP_SIZES

POINTERS = {"gradient": "*fp32", "hessian": "*fp32", "scale": "*fp32", "codes": "*i8"}
SIZES = {
    "num_columns": "i32",
    "num_rows": "i32",
    "gradient_stride": "i32",
    "hessian_stride": "i32",
    "hessian_row_stride": "i32",
    "scale_stride": "i32",
    "codes_stride": "i32",
}


def _case(name: str, block_columns: int) -> CompileCase:
    return CompileCase(
        name=f"descent_block/{name}",
        kernel=descent_block_kernel,
        signature={**POINTERS, **SIZES},
        constants={"BLOCK_COLUMNS": block_columns, "BLOCK_ROWS": BLOCK_ROWS},
        aligned=frozenset(SIZES),
        num_warps=NUM_WARPS,
        num_stages=1,
        # A turn of the loop sets one column of the rows.
        work_items=BLOCK_ROWS,
        unit="thread-instructions per weight",
        # The loop loads a code, a byte a thread, and a factor: the gradients are in registers before it.
        min_load_bits=8,
    )


CASES = (_case("groups-of-32", INT4_GROUP_SIZES[0]), _case("blocks-of-128", GPTQ_BLOCK_COLUMNS))
