"""FP8 blocks and INT4 groups of 32 to BF16 and FP16. Elementwise, so the weight's shape does not matter."""

from __future__ import annotations

import torch

from compiled.case import CompileCase
from memopt.kernels.dequantize_triton import (
    FLOAT8_TILE,
    INT4_TILE,
    NUM_WARPS,
    OVERFLOW_BITS,
    expand_float8,
    expand_int4,
)
from memopt.kernels.layout import CODES_PER_WORD, FP8_BLOCK_COLUMNS, FP8_BLOCK_ROWS, INT4_GROUP_SIZES


def _float8(dtype: torch.dtype, result: str) -> CompileCase:
    rows, columns = FLOAT8_TILE
    return CompileCase(
        name=f"dequantize/float8-{result}",
        kernel=expand_float8,
        signature={
            "weight": "*u8",
            "scales": "*fp32",
            "result": f"*{result}",
            "flag": "*i32",
            "num_rows": "i32",
            "num_columns": "i32",
            "num_scale_columns": "i32",
        },
        constants={
            "SCALE_ROWS": FP8_BLOCK_ROWS,
            "SCALE_COLUMNS": FP8_BLOCK_COLUMNS,
            "ONE_SCALE": True,
            "OVERFLOW": OVERFLOW_BITS[dtype],
            "IS_BF16": dtype == torch.bfloat16,
            "ROWS": rows,
            "COLUMNS": columns,
        },
        aligned=frozenset({"num_columns"}),
        num_warps=NUM_WARPS,
        num_stages=3,
        work_items=rows * columns,
        unit="thread-instructions per weight",
    )


def _int4(dtype: torch.dtype, result: str) -> CompileCase:
    rows, words = INT4_TILE
    return CompileCase(
        name=f"dequantize/int4-g32-{result}",
        kernel=expand_int4,
        signature={
            "packed": "*i32",
            "scale_bits": "*i16",
            "result": f"*{result}",
            "flag": "*i32",
            "num_rows": "i32",
            "num_words": "i32",
            "num_groups": "i32",
        },
        constants={
            "GROUP_WORDS": INT4_GROUP_SIZES[0] // CODES_PER_WORD,
            "OVERFLOW": OVERFLOW_BITS[dtype],
            "IS_BF16": dtype == torch.bfloat16,
            "ROWS": rows,
            "WORDS": words,
        },
        aligned=frozenset({"num_words"}),
        num_warps=NUM_WARPS,
        num_stages=3,
        work_items=rows * words * CODES_PER_WORD,
        unit="thread-instructions per weight",
    )


CASES = (
    _float8(torch.bfloat16, "bf16"),
    _float8(torch.float16, "fp16"),
    _int4(torch.bfloat16, "bf16"),
    _int4(torch.float16, "fp16"),
)
