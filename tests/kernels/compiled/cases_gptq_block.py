"""The kernel of a GPTQ column block for the gate. Rows and strides of all our experts are multiples of 16."""

from __future__ import annotations

from compiled.case import CompileCase
from memopt.kernels.calibration.column_block_triton import BLOCK_ROWS, NUM_WARPS
from memopt.kernels.calibration.gptq_block_triton import gptq_block_kernel
from memopt.kernels.layout import GPTQ_BLOCK_COLUMNS

POINTERS = {
    "weights": "*fp32",
    "factor": "*fp32",
    "scales": "*fp32",
    "groups": "*i32",
    "codes": "*i8",
    "errors": "*fp32",
}
SIZES = {
    "num_columns": "i32",
    "num_rows": "i32",
    "weights_stride": "i32",
    "factor_stride": "i32",
    "factor_row_stride": "i32",
    "scales_stride": "i32",
    "groups_stride": "i32",
    "codes_stride": "i32",
    "errors_stride": "i32",
}

CASES = (
    CompileCase(
        name="gptq_block/glm-5.2-and-kimi-k2.6-experts",
        kernel=gptq_block_kernel,
        signature={**POINTERS, **SIZES},
        constants={"BLOCK_COLUMNS": GPTQ_BLOCK_COLUMNS, "BLOCK_ROWS": BLOCK_ROWS},
        aligned=frozenset(SIZES),
        num_warps=NUM_WARPS,
        num_stages=1,
        # A turn of the loop rounds one column of the rows.
        work_items=BLOCK_ROWS,
        unit="thread-instructions per weight",
        # The loop loads a scale and a correction, 4 bytes a thread: the weights are in registers before it.
        min_load_bits=32,
    ),
)
