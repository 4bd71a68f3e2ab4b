"""The INT4 GEMM and its MoE form, at eight-way tensor parallelism for the most part.

Sizes are run-time arguments: what is compiled differs by group, tokens of a tile, split of K and tail alone, so that
GLM-5.2 and Kimi K2.6 share the cases of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiled.case import CompileCase
from memopt.kernels.gemm.int4_gemm_triton import SUM_TILE, blocks_per_split, int4_gemm_kernel, sum_splits_kernel
from memopt.kernels.gemm.moe_gemm_triton import DOWN_TILES, moe_down_kernel, moe_gate_up_kernel, moe_sum_kernel
from memopt.kernels.gemm.moe_routing_triton import NUM_WARPS as ROUTING_WARPS
from memopt.kernels.gemm.moe_routing_triton import PAIRS_A_STEP, expert_tiles_kernel
from memopt.kernels.gemm.planar import num_planar_blocks
from memopt.kernels.gemm.planar_triton import FEW_TOKENS, MOST_TOKENS, NUM_WARPS, TILE_ROWS, num_stages
from memopt.kernels.layout import PLANAR_BLOCK_CODES

NVIDIA, AMD = ("sm_90", "sm_100"), ("gfx942",)


def _signature(pointers: Mapping[str, str], numbers: str) -> dict[str, str]:
    return {**pointers, **dict.fromkeys(numbers.split(), "i32")}


def _tiled(
    name: str, kernel: Any, signature: Mapping[str, str], aligned: str, tokens: int, **constants: int | bool
) -> list[CompileCase]:
    """The case for NVIDIA, where words are unpacked by PTX, and for tiles of 16 for AMD, where they are not."""
    targets = {True: NVIDIA, False: AMD if tokens == MOST_TOKENS else ()}
    return [
        CompileCase(
            f"{name}/{tokens}-tokens" + ("" if uses_assembly else "-plain"),
            kernel,
            signature,
            {
                "TOKENS": tokens,
                "ROWS": TILE_ROWS,
                "USE_ASSEMBLY": uses_assembly,
                "STAGES": num_stages(tokens),
                **constants,
            },
            frozenset(aligned.split()),
            NUM_WARPS,
            num_stages(tokens),
            targets=chosen,
            work_items=TILE_ROWS * PLANAR_BLOCK_CODES,
            unit="thread-instructions per weight",
        )
        for uses_assembly, chosen in targets.items()
        if chosen
    ]


def _gemm(name: str, num_rows: int, num_columns: int, group_size: int, tokens: int) -> list[CompileCase]:
    blocks = num_planar_blocks(num_columns)
    is_split = blocks_per_split(num_rows, blocks) < blocks
    pointers = {"x": "*bf16", "words": "*i32", "scales": "*i32", "out": "*fp32" if is_split else "*bf16"}
    return _tiled(
        f"int4_gemm/{name}",
        int4_gemm_kernel,
        _signature(pointers, "num_tokens num_rows num_columns num_blocks split_blocks"),
        "num_rows num_columns",
        tokens,
        GROUP_SIZE=group_size,
        HAS_TAIL=num_columns % PLANAR_BLOCK_CODES != 0,
        IS_SPLIT=is_split,
    )


_TILES = {"tile_slots": "*i32", "tile_experts": "*i32"}
_WEIGHT = {"words": "*i32", "scales": "*i32"}


def _gate_up(name: str, hidden_size: int, group_size: int, tokens: int) -> list[CompileCase]:
    return _tiled(
        f"moe_gate_up/{name}",
        moe_gate_up_kernel,
        _signature(
            {"x": "*bf16", **_WEIGHT, **_TILES, "hidden": "*bf16"},
            "num_slots top_k hidden_size num_columns num_blocks num_scale_words",
        ),
        "hidden_size num_columns num_scale_words",
        tokens,
        GROUP_SIZE=group_size,
        HAS_TAIL=hidden_size % PLANAR_BLOCK_CODES != 0,
    )


def _down(name: str, intermediate_size: int, group_size: int, tokens: int) -> list[CompileCase]:
    return _tiled(
        f"moe_down/{name}",
        moe_down_kernel,
        _signature(
            {"hidden": "*bf16", **_WEIGHT, **_TILES, "choices": "*fp32"},
            "num_slots num_rows num_columns num_blocks num_scale_words",
        ),
        "num_rows num_columns",
        tokens,
        GROUP_SIZE=group_size,
        HAS_TAIL=intermediate_size % PLANAR_BLOCK_CODES != 0,
        ROW_TILES=DOWN_TILES if num_planar_blocks(intermediate_size) == 1 else 1,
    )


_SPLITS = CompileCase(
    "int4_gemm/sum_splits",
    sum_splits_kernel,
    _signature({"partial": "*fp32", "out": "*bf16"}, "num_values num_splits"),
    {"TILE": SUM_TILE},
    frozenset({"num_values"}),
    NUM_WARPS,
    3,
)
_CHOICES = CompileCase(
    "moe_sum/glm-5.2-kimi-k2.6",
    moe_sum_kernel,
    _signature(
        {"choices": "*fp32", "expert_ids": "*i32", "expert_weights": "*fp32", "out": "*bf16"},
        "num_experts num_rows top_k",
    ),
    {"TILE": SUM_TILE},
    frozenset({"num_rows"}),
    NUM_WARPS,
    3,
)
# 16 tokens of 8 choices; 256 and 384 experts need the same number of bins. It loads ids only, four bytes a thread.
_ROUTING = CompileCase(
    "moe_routing/glm-5.2-kimi-k2.6-16-tokens",
    expert_tiles_kernel,
    _signature({"expert_ids": "*i32", "slots": "*i32", "experts": "*i32"}, "num_slots num_experts num_tiles"),
    {"SLOTS": 128, "BINS": 512, "TILE_TOKENS": FEW_TOKENS, "STEP": PAIRS_A_STEP // 128},
    frozenset(),
    ROUTING_WARPS,
    3,
    min_load_bits=0,
)

CASES = (
    *_gemm("glm-5.2-o_proj-tp8-g32", 6144, 2048, 32, FEW_TOKENS),
    *_gemm("glm-5.2-o_proj-tp8-g32", 6144, 2048, 32, MOST_TOKENS),
    *_gemm("glm-5.2-dense_gate_up-tp8-g128", 3072, 6144, 128, MOST_TOKENS),
    *_gemm("kimi-k2.6-dense_down-tp8-g64", 7168, 2304, 64, FEW_TOKENS),
    *_gemm("kimi-k2.6-dense_down-tp8-channel", 7168, 2304, 0, MOST_TOKENS),
    *_gemm("glm-5.2-dense_gate_up-tp1-g32", 24576, 6144, 32, FEW_TOKENS),
    *_gate_up("glm-5.2-kimi-k2.6-tp8-g32", 6144, 32, FEW_TOKENS),
    *_gate_up("glm-5.2-kimi-k2.6-tp8-g32", 6144, 32, MOST_TOKENS),
    *_down("glm-5.2-kimi-k2.6-tp8-g32", 256, 32, FEW_TOKENS),
    *_down("glm-5.2-kimi-k2.6-tp8-g32", 256, 32, MOST_TOKENS),
    # 192 columns are three quarters of a block.
    *_down("glm-4.7-tp8-g32", 192, 32, FEW_TOKENS),
    *_down("glm-5.2-tp2-g128", 1024, 128, FEW_TOKENS),
    _SPLITS,
    _CHOICES,
    _ROUTING,
)
