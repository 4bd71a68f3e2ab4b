"""GQA decode at GLM-4.7's shapes (96 heads over 8 KV heads), GLM-5.2's indexer and top-k, and the merge of splits.

The configurations are the launchers' own. `work_items` is the tokens of one turn of the loop. MLA: cases_attention_mla,
a topic of its own so that the two build side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from compiled.case import CompileCase
from memopt.kernels.attention import gqa_decode_triton
from memopt.kernels.attention.decode_config import GpuFamily
from memopt.kernels.attention.gqa_decode_kernel_triton import gqa_decode_kernel
from memopt.kernels.attention.indexer_scores_triton import NUM_STAGES, NUM_WARPS, RUN_PAGES, indexer_scores_kernel
from memopt.kernels.attention.split_merge_triton import NUM_WARPS as MERGE_WARPS
from memopt.kernels.attention.split_merge_triton import merge_kernel
from memopt.kernels.attention.top_k_triton import (
    CHUNK,
    PASSES,
    count_chunks_kernel,
    count_digits_kernel,
    write_positions_kernel,
)
from memopt.kernels.attention.top_k_triton import NUM_WARPS as TOP_K_WARPS
from memopt.kernels.kv_formats import BF16, FP8_E4M3, KvFormat
from memopt.kernels.layout import (
    INDEXER_KEY_SIZE,
    MLA_LATENT_SIZE,
    PAGE_TOKENS,
)

TARGETS: dict[GpuFamily, str] = {"hopper": "sm_90", "blackwell": "sm_100", "amd": "gfx942"}
GLM_4_7_GROUP_HEADS, GLM_4_7_HEAD_DIM, GLM_4_7_KV_HEADS_TP8 = 12, 128, 1
INDEXER_HEADS, INDEXER_TOP_K, GLM_5_2_CONTEXT_TOKENS = 32, 2048, 1048576
MAX_SPLITS = 16
PER_TOKEN = "warp-instructions per token"

GQA_SIGNATURE = {
    "query": "*bf16", "keys_stride": "i32", "values_stride": "i32", "num_pages": "i32", "block_table": "*i32",
    "num_tokens": "*i32", "k_scale": "*fp32", "v_scale": "*fp32", "softmax_scale": "fp32", "lse": "*fp32",
    "num_heads": "i32", "max_pages": "i32", "num_splits": "i32",
}  # fmt: skip
INDEXER_SIGNATURE = {
    "head_weights": "*fp32", "keys": "*u8", "key_scales": "*fp32", "keys_stride": "i32", "scales_stride": "i32",
    "num_pages": "i32", "block_table": "*i32", "num_tokens": "*i32", "scores": "*fp32", "num_heads": "i32",
    "max_pages": "i32",
}  # fmt: skip
TOP_K_SIGNATURE = {
    "scores": "*fp32", "num_tokens": "*i32", "histograms": "*i32", "chunk_counts": "*i32", "positions": "*i32",
    "max_tokens": "i32", "k": "i32",
}  # fmt: skip


def _gqa(name: str, kv_format: KvFormat, group_heads: int) -> Iterator[CompileCase]:
    for family, target in TARGETS.items():
        if family == "amd" and group_heads != GLM_4_7_GROUP_HEADS:
            continue  # the same kernel as for 12 heads: its tiles are 16 heads in any case
        config = gqa_decode_triton.choose_config(kv_format, group_heads, family)
        pool = "*u8" if kv_format is FP8_E4M3 else "*bf16"
        yield CompileCase(
            name=f"gqa_decode/{name}-{kv_format.name}-{family}",
            kernel=gqa_decode_kernel,
            signature={**GQA_SIGNATURE, "keys": pool, "values": pool, "out": "*fp32"},
            constants={
                "IS_FP8": kv_format is FP8_E4M3, "KV_HEADS": GLM_4_7_KV_HEADS_TP8, "GROUP_HEADS": group_heads,
                "HEADS": config.heads, "DIM": GLM_4_7_HEAD_DIM, "TILE": config.tile, "PAGE": PAGE_TOKENS,
            },
            aligned=frozenset({"keys_stride", "values_stride"}),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            targets=(target,),
            work_items=config.tile,
            unit=PER_TOKEN,
        )  # fmt: skip


def _indexer(query: str, pointer: str) -> CompileCase:
    return CompileCase(
        name=f"indexer_scores/glm-5.2-{query}-query",
        kernel=indexer_scores_kernel,
        signature={**INDEXER_SIGNATURE, "query": pointer},
        constants={
            "IS_FP8": pointer == "*u8", "HEADS": INDEXER_HEADS, "KEY": INDEXER_KEY_SIZE, "PAGE": PAGE_TOKENS,
            "RUN_PAGES": RUN_PAGES,
        },
        aligned=frozenset({"keys_stride", "scales_stride"}),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        work_items=PAGE_TOKENS,
        unit=PER_TOKEN,
    )  # fmt: skip


def _top_k(name: str, kernel: Any, constants: Mapping[str, Any], min_load_bits: int = 128) -> CompileCase:
    constants = {"CHUNK": CHUNK, **constants}
    names = [argument for argument in kernel.arg_names if argument not in constants]
    return CompileCase(
        name=f"top_k/glm-5.2-{name}",
        kernel=kernel,
        signature={argument: TOP_K_SIGNATURE[argument] for argument in names},
        constants=constants,
        aligned=frozenset({"max_tokens"}),
        num_warps=TOP_K_WARPS,
        num_stages=1,
        min_load_bits=min_load_bits,
    )


def _merge() -> CompileCase:
    return CompileCase(
        name=f"split_merge/value-{MLA_LATENT_SIZE}",
        kernel=merge_kernel,
        signature={
            "partial": "*fp32", "log_sum_exps": "*fp32", "out": "*bf16", "lse": "*fp32", "num_heads": "i32",
            "num_splits": "i32",
        },
        constants={"VALUE": MLA_LATENT_SIZE, "SPLITS": MAX_SPLITS},
        aligned=frozenset(),
        num_warps=MERGE_WARPS,
        num_stages=1,
    )  # fmt: skip


CASES: tuple[CompileCase, ...] = (
    *_gqa("glm-4.7-tp8", FP8_E4M3, GLM_4_7_GROUP_HEADS),
    *_gqa("glm-4.7-tp8", BF16, GLM_4_7_GROUP_HEADS),
    *_gqa("8-heads-a-group", FP8_E4M3, 8),
    _indexer("fp8", "*u8"),
    _indexer("bf16", "*bf16"),
    # The bins of the first pass need one score a thread and step: 4 bytes a load, 128 a warp.
    _top_k("digit-0", count_digits_kernel, {"PASS": 0}, min_load_bits=32),
    # The last pass has the code of the second, and a digit more to find before.
    _top_k(f"digit-{PASSES - 1}", count_digits_kernel, {"PASS": PASSES - 1}),
    _top_k("chunks", count_chunks_kernel, {}),
    _top_k(
        "positions",
        write_positions_kernel,
        {"CHUNKS": GLM_5_2_CONTEXT_TOKENS // CHUNK, "PADDED_K": INDEXER_TOP_K},
    ),
    _merge(),
)
