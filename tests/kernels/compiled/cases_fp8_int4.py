"""FP8 and BF16 rows to INT4 as the releases of GLM-5.2 and Kimi K2.6 round them: groups of 32, blocks of 128 x 128."""

from __future__ import annotations

from typing import Any

from compiled.case import CompileCase
from memopt.kernels.fp8_int4_triton import ROW_SUM_ROWS, ROW_SUM_STEP, SEARCH_FACTORS, TILES, tile_of
from memopt.kernels.int4_rounding_triton import CHUNK_WEIGHTS
from memopt.kernels.int4_tiles_triton import quantize_groups, quantize_long_groups, sum_rows
from memopt.kernels.layout import FP8_BLOCK_COLUMNS, FP8_BLOCK_ROWS

_OUTPUTS = {
    "packed": "*i32",
    "scale_bits": "*i16",
    "group_sums": "*fp32",
    "max_square": "*i32",
    "num_clipped": "*i32",
    "flag": "*i32",
    "num_rows": "i32",
    "num_groups": "i32",
    "num_scale_columns": "i32",
}


NVIDIA, AMD = ("sm_90", "sm_100"), ("gfx942",)


def _cases(name: str, group: int | None, search: str, *, is_fp8: bool) -> tuple[CompileCase, CompileCase]:
    """For NVIDIA, where pairs of numbers go through PTX, and for AMD, where they do not."""
    return (
        _case(name, group, search, is_fp8=is_fp8, uses_assembly=True),
        _case(f"{name}-plain", group, search, is_fp8=is_fp8, uses_assembly=False),
    )


def _case(name: str, group: int | None, search: str, *, is_fp8: bool, uses_assembly: bool) -> CompileCase:
    tile = tile_of(group)
    signature = {"weight": "*i32", **_OUTPUTS}
    constants: dict[str, Any] = {
        "IS_FP8": is_fp8,
        "SCALE_ROWS": FP8_BLOCK_ROWS,
        "SCALE_COLUMNS": FP8_BLOCK_COLUMNS,
        "ONE_SCALE": True,
        "SEARCH": search,
        "NORM": "2",
        "GRID": len(SEARCH_FACTORS),
        "ROWS": tile.rows,
        "ROW_GROUPS": tile.row_groups,
        "USE_ASSEMBLY": uses_assembly,
    }
    for pointer, is_used in (("scales", is_fp8), ("grid", search != "absmax")):
        if is_used:
            signature[pointer] = "*fp32"
        else:
            constants[pointer] = None
    is_short = group in TILES
    if is_short:
        constants["GROUP"] = group
    else:
        signature["group_size"] = "i32"
        constants["HAS_TAIL"] = False
    groups_a_program = tile.rows * tile.row_groups
    return CompileCase(
        name=f"fp8_int4/{name}",
        kernel=quantize_groups if is_short else quantize_long_groups,
        signature=signature,
        constants=constants,
        aligned=frozenset() if is_short else frozenset({"group_size"}),
        num_warps=tile.num_warps,
        num_stages=3,
        targets=NVIDIA if uses_assembly else AMD,
        # A short group's search loops over candidates, with all its weights; a long one's loops take a chunk a turn.
        work_items=groups_a_program * (group if is_short and group else CHUNK_WEIGHTS),
        unit="thread-instructions per weight",
        # The loop over candidates loads the next factor only: the weights are in registers.
        min_load_bits=32 if is_short and search != "absmax" else 128,
    )


_SUM_ROWS = CompileCase(
    name="fp8_int4/sum_rows",
    kernel=sum_rows,
    signature={"group_sums": "*fp32", "row_sums": "*fp64", "num_rows": "i32", "num_groups": "i32"},
    constants={"ROWS": ROW_SUM_ROWS, "STEP": ROW_SUM_STEP},
    aligned=frozenset({"num_groups"}),
    num_warps=1,
    num_stages=3,
    # A thread's loads are of its own row; they are 1/64 of the bytes of the weights.
    min_load_bits=32,
)

CASES = (
    *_cases("fp8-g32-absmax", 32, "absmax", is_fp8=True),
    *_cases("fp8-g32-mse-signed", 32, "mse-signed", is_fp8=True),
    *_cases("fp8-g64-absmax", 64, "absmax", is_fp8=True),
    *_cases("fp8-g64-mse-signed", 64, "mse-signed", is_fp8=True),
    *_cases("fp8-g128-absmax", 128, "absmax", is_fp8=True),
    *_cases("fp8-g128-mse-signed", 128, "mse-signed", is_fp8=True),
    *_cases("fp8-channel-mse-signed", None, "mse-signed", is_fp8=True),
    *_cases("bf16-g32-absmax", 32, "absmax", is_fp8=False),
    *_cases("bf16-g32-mse-signed", 32, "mse-signed", is_fp8=False),
    _SUM_ROWS,
)
